"""Checkpoints in a bucket of an S3-compatible server. Why it is safe without a lock is told in `object_keys`."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import socket
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TypeVar

import msgspec

from holdfast.errors import DamagedCheckpoint
from holdfast.format import MANIFEST
from holdfast.protocol import MAX_ATTEMPT, MAX_LINEAGE, checkpoint_id, parse_checkpoint_id, validate_job
from holdfast.store import connection, pin_notes
from holdfast.store import object_keys as keys
from holdfast.store.base import (
    MOST_MANIFEST_BYTES,
    Attempt,
    Ending,
    Hold,
    Leftover,
    Lineage,
    Pins,
    Record,
    decode_record,
    require_number,
)
from holdfast.store.bucket import Bucket
from holdfast.store.bucket_errors import NoSuchObject, Place
from holdfast.store.object_files import JoinedWriter, ObjectReader, ObjectWriter, require_newest
from holdfast.store.object_keys import Folder, Seen, Survey
from holdfast.store.pin_notes import PINS

T = TypeVar("T")
logger = logging.getLogger("holdfast")

SCHEME = "s3://"
CLAIMS = 10
"""So often an attempt is claimed anew when others start the same job at the same time."""
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")


def parse_url(url: str) -> tuple[str, str]:
    """(bucket, prefix) of `s3://bucket/prefix`; ValueError when it is not one."""
    bucket, _, prefix = url.removeprefix(SCHEME).partition("/")
    prefix = prefix.strip("/")
    if not _BUCKET.fullmatch(bucket) or any(part in ("", ".", "..") for part in prefix.split("/") if prefix):
        raise ValueError(f"store {url!r}: give a bucket and a prefix, as in s3://my-bucket/checkpoints")
    return bucket, prefix


class ObjectStore:
    """A `Store` under a prefix in a bucket; see `holdfast.store.base` for the promises."""

    def __init__(self, url: str) -> None:
        bucket, prefix = parse_url(url)
        if find_spec("obstore") is None:
            raise ValueError(
                f"store {url!r}: object stores need obstore: pip install obstore, or install Holdfast with its "
                "extra `s3`"
            )
        self.bucket = Bucket(Place(bucket, prefix, connection.server(os.environ)))
        self.url = self.bucket.place.url
        self.readers = 8
        self._records: dict[str, bytes] = {}
        """Those that were read: they never change."""
        self._turns: dict[tuple[str, str], int] = {}
        """What was begun before, of which a late request may still be on its way."""

    def free_bytes(self) -> int | None:
        return None  # a bucket has no end that anybody could see coming

    def jobs(self) -> list[str]:
        return sorted(job for job in self.bucket.folders() if keys.ATTEMPTS in self.bucket.folders(f"{job}/"))

    def checkpoints(self, job: str) -> list[str]:
        return sorted(self.survey(job).committed(), key=parse_checkpoint_id)

    def read_manifest(self, job: str, checkpoint: str) -> bytes:
        folder = self._find(job, checkpoint)
        name = f"{job}/{folder.path}/{MANIFEST}"
        if folder.files[MANIFEST] > MOST_MANIFEST_BYTES:
            size = f"{folder.files[MANIFEST]:,}"
            raise DamagedCheckpoint(f"{self.url}/{name}", f"is {size} bytes long: no manifest is")
        return self._read(name)

    def open_file(self, job: str, checkpoint: str, file: str, *, from_disk: bool = False) -> ObjectReader:
        folder = self._find(job, checkpoint)
        name = f"{job}/{folder.path}/{file}"
        if file not in folder.files:
            raise DamagedCheckpoint(f"{self.url}/{name}", "there is no such object")
        return ObjectReader(self.bucket, name, folder.files[file])

    def begin(self, job: str, checkpoint: str, attempt: int, size_bytes: int) -> ObjectWriter:
        survey = self.survey(job, checkpoint)
        require_newest(survey.newest, job, attempt)  # before the bytes of a fenced one are on their way
        turns = [turn for number, turn in (folder.order for folder in survey.folders) if number == attempt]
        turn = max(*turns, self._turns.get((job, checkpoint), 0), 0) + 1
        self._turns[job, checkpoint] = turn
        return ObjectWriter(self, job, Folder(checkpoint, keys.folder_name(attempt, turn), {}))

    def join(self, job: str, checkpoint: str, attempt: int, place: str, size_bytes: int) -> JoinedWriter:
        if not keys.is_folder_of(place, attempt):
            raise ValueError(f"{place!r} is no place where attempt {attempt} writes {checkpoint}")
        require_newest(self.survey(job, checkpoint).newest, job, attempt)
        return JoinedWriter(self, job, Folder(checkpoint, place, {}))

    def delete(self, job: str, checkpoint: str, attempt: int) -> None:
        survey = self.survey(job, checkpoint)
        require_newest(survey.newest, job, attempt)
        doomed = [folder for folder in survey.folders if MANIFEST in folder.files and folder.order[0] <= attempt]
        if not doomed:
            raise FileNotFoundError(errno.ENOENT, "there is no checkpoint of that name", f"{self.url}/{job}")
        # A newer attempt may begin just now and have noted it as there. Retention deletes none that it would use.
        self._delete(job, sorted(doomed, key=lambda folder: folder.order))
        require_newest(self.latest_attempt(job), job, attempt)

    def acquire_attempt(self, job: str, uid: str, at_least: int = 1, *, order: str | None = None) -> Attempt:
        attempt = self._claim(validate_job(job), uid, at_least, order)
        survey = self.survey(job)
        seen = Seen(
            checkpoints=sorted(folder.path for folder in survey.counting_folders()),
            lineages=survey.counting_lineages(),
        )
        self.bucket.put_new(f"{job}/{keys.seen_name(attempt.number, uid)}", msgspec.json.encode(seen))
        self._remove_leftovers(job, attempt.number, survey, seen)
        return attempt

    def latest_attempt(self, job: str) -> int:
        return max((number for number, _ in keys.attempts_of(self._attempts(job))), default=0)

    def newest_attempt(self, job: str) -> Attempt | None:
        names = self._attempts(job)
        # of those that put the same number, the one that got it has noted what it saw
        got = max(keys.attempts_of(names), key=lambda a: (a[0], keys.seen_name(*a) in names), default=None)
        return self._decoded(f"{job}/{keys.attempt_name(*got)}", Attempt) if got else None

    def leftovers(self, job: str) -> list[Leftover]:
        return [
            Leftover(name=folder.path, what=what, size_bytes=sum(folder.files.values()))
            for folder, what in self.survey(job).leftovers()
        ]

    def remove_leftover(self, job: str, name: str) -> None:
        self._delete(job, [folder for folder, _ in self.survey(job).leftovers() if folder.path == name])

    def records(self, job: str) -> list[Record]:
        names, survey = self._names(job), self.survey(job)
        # an attempt deletes no folder of a later one, so that this must stay on record
        writers = {folder.order[0] for folder in survey.counting_folders()}
        found = [(*each, name) for name in names if (each := keys.record_of(name)) is not None]
        return [
            Record(name=name, kind=kind, number=number, is_needed=kind == "attempt" and number in writers)
            # what an attempt saw goes first: on its own it would rule out what later attempts write
            for kind, number, name in sorted(found, key=lambda each: (*each[:2], not each[2].endswith(keys.SEEN)))
        ]

    def read_record(self, job: str, name: str) -> bytes:
        return self.bucket.get(f"{validate_job(job)}/{name}")

    def remove_record(self, job: str, name: str, attempt: int) -> None:
        require_newest(self.latest_attempt(job), job, attempt)
        self._records.pop(f"{job}/{name}", None)
        self.bucket.delete([f"{job}/{name}"])

    def forsake(self, job: str, checkpoint: str, attempt: int) -> None:
        try:
            folders = self.survey(job, checkpoint).folders
            self._delete(job, [f for f in folders if f.order[0] == attempt and MANIFEST not in f.files])
        except OSError as error:
            logger.warning("what is half-done of %s stays in %s: %s", checkpoint, self.url, error.strerror)

    def begin_lineage(self, job: str, lineage: Lineage) -> None:
        require_number(lineage.number, MAX_LINEAGE, "lineage", job, self.url)
        survey = self.survey(job)
        require_newest(survey.newest, job, lineage.attempt)
        name = f"{job}/{keys.lineage_name(lineage.number, lineage.attempt)}"
        if lineage.number in map(keys.record_number, survey.counting_lineages()):
            raise FileExistsError(errno.EEXIST, "there is a lineage of that number", f"{self.url}/{name}")
        self._records[name] = msgspec.json.encode(lineage)
        self.bucket.put_new(name, self._records[name])
        require_newest(self.latest_attempt(job), job, lineage.attempt)

    def lineages(self, job: str) -> list[Lineage]:
        names = sorted(self.survey(job).counting_lineages(), key=keys.record_number)
        return self._read_records(job, names, Lineage)

    def note_ending(self, job: str, ending: Ending) -> None:
        name = f"{validate_job(job)}/{keys.ending_name(ending.attempt)}"
        require_newest(self.latest_attempt(job), job, ending.attempt)
        self.bucket.put_new(name, msgspec.json.encode(ending))

    def attempts(self, job: str, since: int = 1) -> list[Attempt]:
        found = sorted(each for each in keys.attempts_of(self._attempts(job)) if each[0] >= since)
        return self._read_records(job, [keys.attempt_name(*each) for each in found], Attempt)

    def endings(self, job: str, since: int = 1) -> list[Ending]:
        first = keys.ending_name(since)
        names = filter(keys.is_ending, self._names(job, f"{keys.ENDINGS}/"))
        return self._read_records(job, sorted(name for name in names if name >= first), Ending)

    def note_pins(self, job: str, pins: Pins) -> None:
        require_newest(self.latest_attempt(job), job, pins.attempt)
        top, before = f"{job}/{PINS}/", self._pin_notes(job)
        self.bucket.put_new(top + pin_notes.following(before, pins.attempt), msgspec.json.encode(pins))
        require_newest(self.latest_attempt(job), job, pins.attempt)
        with contextlib.suppress(OSError):  # they count no more, whether they go or not
            self.bucket.delete(top + name for name in before)

    def pins(self, job: str) -> Pins | None:
        while notes := self._pin_notes(job):
            try:
                return self._decoded(f"{job}/{PINS}/{notes[-1]}", Pins)
            except NoSuchObject:  # replaced just now
                continue
        return None

    def hold(self, job: str, hold: Hold) -> None:
        self.bucket.put_new(f"{validate_job(job)}/{keys.HOLDS}/{hold.uid}.json", msgspec.json.encode(hold))

    def release(self, job: str, uid: str) -> None:
        with contextlib.suppress(OSError):
            self.bucket.delete([f"{validate_job(job)}/{keys.HOLDS}/{uid}.json"])

    def holds(self, job: str) -> list[Hold]:
        found = []
        for name in self._names(job, f"{keys.HOLDS}/"):
            with contextlib.suppress(NoSuchObject, msgspec.DecodeError):  # taken back just now; none of ours
                found.append(decode_record(self.bucket.get(f"{job}/{name}"), Hold))
        return found

    def survey(self, job: str, checkpoint: str = "") -> Survey:
        """What there is of a job, or of one checkpoint, and what of it counts."""
        sizes = self._names(job, f"{checkpoint_id(*parse_checkpoint_id(checkpoint))}/" if checkpoint else "")
        attempts = self._attempts(job)  # after the rest: what was listed is judged by no older `seen`
        newest = max((number for number, _ in keys.attempts_of(attempts)), default=0)
        folders, lineages = keys.folders_of(sizes), [name for name in sizes if keys.is_lineage(name)]
        decider, seen = 0, Seen(checkpoints=[], lineages=[])
        if (record := keys.newest_seen(attempts)) is not None:
            decider, name = record
            seen = self._decoded(f"{job}/{name}", Seen)
        return Survey(folders, lineages, newest, decider, seen)

    def keys_below(self, job: str, folder: str) -> list[str]:
        return list(self._names(job, folder))

    def source(self, job: str, checkpoint: str, file: str) -> tuple[str, int]:
        """The object that a file of a committed checkpoint is, and its bytes. DamagedCheckpoint: there is none."""
        found = self.open_file(job, checkpoint, file)
        return found.name, found.size_bytes

    def _read_records(self, job: str, names: Sequence[str], record: type[T]) -> list[T]:
        found = []
        for name in names:
            try:
                found.append(decode_record(self._record(f"{job}/{name}"), record, keys.record_number(name)))
            except msgspec.DecodeError as error:
                where = f"{self.url}/{job}/{name}"
                logger.warning("%s is not a record of Holdfast's and is passed over: %s", where, error)
        return found

    def _decoded(self, name: str, kind: type[T]) -> T:
        try:
            return decode_record(self._record(name), kind)
        except msgspec.DecodeError as error:
            reason = f"is no record of Holdfast's ({error}): remove it"
            raise OSError(errno.EIO, reason, f"{self.url}/{name}") from error

    def _names(self, job: str, below: str = "") -> dict[str, int]:
        """Names below the job, and their sizes."""
        top = f"{validate_job(job)}/"
        return {name.removeprefix(top): size for name, size in self.bucket.sizes(top + below).items()}

    def _attempts(self, job: str) -> list[str]:
        return list(self._names(job, f"{keys.ATTEMPTS}/"))

    def _pin_notes(self, job: str) -> list[str]:
        return pin_notes.in_order(name.rpartition("/")[2] for name in self._names(job, f"{PINS}/"))

    def _record(self, name: str) -> bytes:
        if name not in self._records:
            self._records[name] = self.bucket.get(name)
        return self._records[name]

    def _find(self, job: str, checkpoint: str) -> Folder:
        folder = self.survey(job, checkpoint).committed().get(checkpoint)
        if folder is None:
            raise DamagedCheckpoint(f"{self.url}/{job}/{checkpoint}/{MANIFEST}", "there is no such object")
        return folder

    def _read(self, name: str) -> bytes:
        try:
            return self.bucket.get(name)
        except NoSuchObject as error:
            raise DamagedCheckpoint(f"{self.url}/{name}", "there is no such object") from error

    def _claim(self, job: str, uid: str, at_least: int, order: str | None) -> Attempt:
        """Record an attempt that is alone with its number and the highest.

        Whoever lists after its record is there, and finds no other as high, has the number: of two that put
        theirs, the later one's list shows both.
        """
        host, pid, started_at = socket.gethostname(), os.getpid(), time.time()
        for claim in range(CLAIMS):
            number = max(self.latest_attempt(job) + 1, at_least)
            require_number(number, MAX_ATTEMPT, "attempt", job, self.url)
            attempt = Attempt(number=number, uid=uid, host=host, pid=pid, started_at=started_at, order=order)
            self.bucket.put_new(f"{job}/{keys.attempt_name(number, uid)}", msgspec.json.encode(attempt))
            others = [n for n, other in keys.attempts_of(self._attempts(job)) if other != uid]
            if max(others, default=0) < number:
                return attempt
            self.bucket.wait(0.05 * 2**claim)
        raise OSError(errno.EAGAIN, f"others start {job} again and again at the same time", self.url)

    def _remove_leftovers(self, job: str, attempt: int, survey: Survey, seen: Seen) -> None:
        """What older attempts left unfinished; only while newest, since one that came later judges for itself."""
        doomed = [f for f in survey.folders if f.order[0] < attempt and f.path not in seen.checkpoints]
        records = [n for n in survey.lineages if keys.lineage_attempt(n) < attempt and n not in seen.lineages]
        try:
            if (doomed or records) and self.latest_attempt(job) == attempt:
                self._delete(job, doomed)
                self.bucket.delete(f"{job}/{name}" for name in records)
        except OSError as error:
            logger.warning("leftovers of %s stay in %s: %s", job, self.url, error.strerror)

    def _delete(self, job: str, folders: Sequence[Folder]) -> None:
        """The manifests first, so that none is ever listed without its payload; the last is that which counts."""
        manifests = [f"{folder.path}/{MANIFEST}" for folder in folders if MANIFEST in folder.files]
        rest = [key for folder in folders for key in folder.keys if key not in manifests]
        self.bucket.delete(f"{job}/{key}" for key in manifests + rest)
