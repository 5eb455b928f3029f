"""Checkpoints in a bucket of an S3-compatible server. Why it is safe without a lock is told in `object_keys`."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, ClassVar, Self

import msgspec

from holdfast.errors import DamagedCheckpoint, Fenced
from holdfast.format.manifest import MANIFEST
from holdfast.protocol.messages import MAX_ATTEMPT, checkpoint_id, parse_checkpoint_id, validate_job
from holdfast.store import s3_connection
from holdfast.store import s3_keys as keys
from holdfast.store.base import Leftover, Pace
from holdfast.store.records import FOLDERS, PATTERNS, Attempt, Lineage, RecordName, RecordStore, require_number
from holdfast.store.s3_bucket import Bucket
from holdfast.store.s3_connection import NoSuchObject, Place, Unanswered
from holdfast.store.s3_keys import Folder, Seen, Survey

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


class ObjectStore(RecordStore):
    """A `Store` under a prefix in a bucket; see `holdfast.store.base` for the promises."""

    patterns: ClassVar = {Attempt: keys.ATTEMPT, Lineage: keys.LINEAGE, **PATTERNS}

    def __init__(self, url: str) -> None:
        bucket, prefix = parse_url(url)
        if find_spec("obstore") is None:
            raise ValueError(
                f"store {url!r}: object stores need obstore: pip install obstore, or install Holdfast with its "
                "extra `s3`"
            )
        self.bucket = Bucket(Place(bucket, prefix, s3_connection.server(os.environ)))
        self.url = self.bucket.place.url
        self.readers = 8
        self._read: dict[str, bytes] = {}
        """Records that were read: they never change."""
        self._turns: dict[tuple[str, str], int] = {}
        """What was begun before, of which a late request may still be on its way."""

    def free_bytes(self) -> int | None:
        return None  # a bucket has no end that anybody could see coming

    def jobs(self) -> list[str]:
        return sorted(job for job in self.bucket.folders() if FOLDERS[Attempt] in self.bucket.folders(f"{job}/"))

    def checkpoints(self, job: str) -> list[str]:
        return sorted(self.survey(job).committed(), key=parse_checkpoint_id)

    def open_file(self, job: str, checkpoint: str, file: str, *, from_disk: bool = False) -> ObjectReader:
        folder = self._find(job, checkpoint)
        name = f"{job}/{folder.path}/{file}"
        if file not in folder.files:
            raise DamagedCheckpoint(f"{self.url}/{name}", "there is no such object")
        return ObjectReader(self.bucket, name, folder.files[file])

    def begin(self, job: str, checkpoint: str, attempt: int, size_bytes: int) -> ObjectWriter:
        survey = self.survey(job, checkpoint)
        self.require_newest(job, attempt, survey.newest)  # before the bytes of a fenced one are on their way
        turns = [turn for number, turn in (folder.order for folder in survey.folders) if number == attempt]
        turn = max(*turns, self._turns.get((job, checkpoint), 0), 0) + 1
        self._turns[job, checkpoint] = turn
        return ObjectWriter(self, job, Folder(checkpoint, keys.folder_name(attempt, turn), {}))

    def join(self, job: str, checkpoint: str, attempt: int, place: str, size_bytes: int) -> JoinedWriter:
        if not keys.is_folder_of(place, attempt):
            raise ValueError(f"{place!r} is no place where attempt {attempt} writes {checkpoint}")
        self.require_newest(job, attempt)
        return JoinedWriter(self, job, Folder(checkpoint, place, {}))

    def delete(self, job: str, checkpoint: str, attempt: int) -> None:
        survey = self.survey(job, checkpoint)
        self.require_newest(job, attempt, survey.newest)
        doomed = [folder for folder in survey.folders if MANIFEST in folder.files and folder.order[0] <= attempt]
        if not doomed:
            raise FileNotFoundError(errno.ENOENT, "there is no checkpoint of that name", f"{self.url}/{job}")
        # A newer attempt may begin just now and have noted it as there. Retention deletes none that it would use.
        self._delete(job, sorted(doomed, key=lambda folder: folder.order))
        self.require_newest(job, attempt)

    def acquire_attempt(self, job: str, uid: str, at_least: int = 1, *, order: str | None = None) -> Attempt:
        attempt = self._claim(validate_job(job), uid, at_least, order)
        survey = self.survey(job)
        seen = Seen(
            checkpoints=sorted(folder.path for folder in survey.counting_folders()),
            lineages=survey.counting_lineages(),
        )
        noted = keys.seen_name(f"{FOLDERS[Attempt]}/{self._record_name(attempt)}")
        self._create_record(job, noted, msgspec.json.encode(seen))
        self._remove_leftovers(job, attempt.number, survey, seen)
        return attempt

    def leftovers(self, job: str) -> list[Leftover]:
        return [
            Leftover(name=folder.path, what=what, size_bytes=sum(folder.files.values()))
            for folder, what in self.survey(job).leftovers()
        ]

    def remove_leftover(self, job: str, name: str) -> None:
        self._delete(job, [folder for folder, _ in self.survey(job).leftovers() if folder.path == name])

    def record_names(self, job: str) -> list[RecordName]:
        # an attempt deletes no folder of a later one, so that this must stay on record
        writers = {folder.order[0] for folder in self.survey(job).counting_folders()}
        found = [
            msgspec.structs.replace(each, is_needed=each.kind == "attempt" and each.number in writers)
            for each in super().record_names(job)
        ]
        # what an attempt saw goes first: on its own it would rule out what later attempts write
        return sorted(found, key=lambda each: (each.kind, each.number, not each.name.endswith(keys.SEEN)))

    def read_record(self, job: str, name: str) -> bytes:
        name = f"{validate_job(job)}/{name}"
        if name not in self._read:
            self._read[name] = self.bucket.get(name)
        return self._read[name]

    @contextlib.contextmanager
    def fenced(self, job: str, attempt: int) -> Iterator[None]:
        """Looks before, to spare what is in vain, and after: only then it is known that no newer one was there."""
        self.require_newest(job, attempt)
        yield
        self.require_newest(job, attempt)

    def forsake(self, job: str, checkpoint: str, attempt: int) -> None:
        try:
            folders = self.survey(job, checkpoint).folders
            self._delete(job, [f for f in folders if f.order[0] == attempt and MANIFEST not in f.files])
        except OSError as error:
            logger.warning("what is half-done of %s stays in %s: %s", checkpoint, self.url, error.strerror)

    def survey(self, job: str, checkpoint: str = "") -> Survey:
        """What there is of a job, or of one checkpoint, and what of it counts."""
        sizes = self.names(job, f"{checkpoint_id(*parse_checkpoint_id(checkpoint))}/" if checkpoint else "")
        attempts = super()._numbered(job, Attempt)  # after the rest: what was listed is judged by no older `seen`
        newest = max((number for number, name in attempts if not name.endswith(keys.SEEN)), default=0)
        decider, name = max((each for each in attempts if each[1].endswith(keys.SEEN)), default=(0, ""))
        seen = self._seen(job, name) if name else Seen(checkpoints=[], lineages=[])
        return Survey(keys.folders_of(sizes), keys.lineages_of(sizes), newest, decider, seen)

    def names(self, job: str, below: str = "") -> dict[str, int]:
        """Names below the job, and their sizes."""
        top = f"{validate_job(job)}/"
        return {name.removeprefix(top): size for name, size in self.bucket.sizes(top + below).items()}

    def require_newest(self, job: str, attempt: int, newest: int | None = None) -> None:
        """Fenced when there is a newer attempt: by what was just seen, or by another look."""
        newest = self.latest_attempt(job) if newest is None else newest
        if newest > attempt:
            raise Fenced(f"attempt {newest} of {job} has started; attempt {attempt} commits nothing more")

    def _record_files(self, job: str, folder: str) -> Iterable[str]:
        return [name.removeprefix(f"{folder}/") for name in self.names(job, f"{folder}/")]

    def _record_name(self, record: Attempt | Lineage) -> str:
        if isinstance(record, Attempt):
            return f"{record.number:08d}-{record.uid}.json"
        return f"{record.number:06d}-{record.attempt:08d}.json"

    def _create_record(self, job: str, name: str, data: bytes) -> None:
        self.bucket.put_new(f"{validate_job(job)}/{name}", data)

    def _remove_records(self, job: str, names: Iterable[str]) -> None:
        for name in names:
            self._read.pop(f"{job}/{name}", None)
            self.bucket.delete([f"{validate_job(job)}/{name}"])

    def _prepare(self, job: str) -> None:
        """Nothing: a bucket has no directories."""

    def _numbered(self, job: str, kind: type[Any]) -> list[tuple[int, str]]:
        if kind is Lineage:
            names = self.survey(job).counting_lineages()
            return sorted((keys.record_number(name), name) for name in names)
        found = super()._numbered(job, kind)
        if kind is Attempt:
            # of those that put the same number, the one that got it has noted what it saw, and comes last
            seen = {name for _, name in found if name.endswith(keys.SEEN)}
            found = [each for each in found if each[1] not in seen]
            found.sort(key=lambda each: (each[0], keys.seen_name(each[1]) in seen))
        return found

    def _seen(self, job: str, name: str) -> Seen:
        try:
            return msgspec.json.decode(self.read_record(job, name), type=Seen)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            reason = f"is no record of Holdfast's ({error}): remove it"
            raise OSError(errno.EIO, reason, f"{self.url}/{job}/{name}") from error

    def _find(self, job: str, checkpoint: str) -> Folder:
        folder = self.survey(job, checkpoint).committed().get(checkpoint)
        if folder is None:
            raise DamagedCheckpoint(f"{self.url}/{job}/{checkpoint}/{MANIFEST}", "there is no such object")
        return folder

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
            name = f"{FOLDERS[Attempt]}/{self._record_name(attempt)}"
            self._create_record(job, name, msgspec.json.encode(attempt))
            if all(n < number for n, other in self._numbered(job, Attempt) if other != name):
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


class ObjectReader:
    """A file of a checkpoint."""

    def __init__(self, bucket: Bucket, name: str, size_bytes: int) -> None:
        self._bucket, self.name, self.size_bytes = bucket, name, size_bytes

    def read_into(self, start: int, target: memoryview) -> None:
        """As in `FileReader`; OSError when the server is away, which says nothing about the checkpoint."""
        url = f"{self._bucket.place.url}/{self.name}"
        if start + len(target) > self.size_bytes:
            raise DamagedCheckpoint(url, f"ends at byte {self.size_bytes:,}")
        try:
            self._bucket.read(self.name, start, target)
        except NoSuchObject as error:
            raise DamagedCheckpoint(url, "there is no such object any more") from error

    def close(self) -> None:
        """Nothing is open between two requests."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ObjectWriter:
    """A checkpoint in a folder of its own, where no late request of another attempt or try meets its bytes."""

    def __init__(self, store: ObjectStore, job: str, folder: Folder) -> None:
        self._store, self._job, self._folder = store, job, folder
        self._decided = False
        """Its manifest is there, or may be: it is for the next attempt to say what it is."""
        self._told = False
        """Others were told of the place, and may have written there."""

    @property
    def place(self) -> str:
        self._told = True
        return self._folder.name

    def write(self, file: str, parts: Sequence[memoryview | bytes], *, pace: Pace | None = None) -> None:
        self._folder.files[file] = sum(len(part) for part in parts)
        self._store.bucket.upload(f"{self._job}/{self._folder.path}/{file}", parts, pace)

    def adopt(self, job: str, checkpoint: str, file: str) -> None:
        source = self._store.open_file(job, checkpoint, file)
        self._folder.files[file] = source.size_bytes
        try:
            self._store.bucket.copy(source.name, f"{self._job}/{self._folder.path}/{file}", source.size_bytes)
        except NoSuchObject as error:
            url = f"{self._store.url}/{source.name}"
            raise DamagedCheckpoint(url, "there is no such object any more") from error

    def settle(self) -> None:
        """Nothing: an object that was put stays."""

    def commit(self, manifest: bytes, *, replace: bool = False) -> None:
        store, job, checkpoint = self._store, self._job, self._folder.checkpoint
        attempt, _ = self._folder.order
        survey = store.survey(job, checkpoint)
        store.require_newest(job, attempt, survey.newest)
        if not replace and checkpoint in survey.committed():
            url = f"{store.url}/{job}/{checkpoint}"
            raise FileExistsError(errno.EEXIST, "there is a checkpoint of that name", url)
        self._put(manifest)
        store.require_newest(job, attempt)  # else its list may have missed the manifest

    def _put(self, manifest: bytes) -> None:
        try:
            self._decided = True
            self._store.bucket.put_new(f"{self._job}/{self._folder.path}/{MANIFEST}", manifest)
        except Unanswered:
            raise
        except OSError:  # refused, so that no manifest will come of it
            self._decided = False
            raise

    def abort(self) -> None:
        if not self._decided:
            with contextlib.suppress(OSError):
                below = f"{self._folder.path}/"
                put = self._store.names(self._job, below) if self._told else self._folder.keys
                self._store.bucket.delete(f"{self._job}/{key}" for key in put)


class JoinedWriter(ObjectWriter):
    """Of another process than the one that has begun the checkpoint, and will commit or abort it."""

    def commit(self, manifest: bytes, *, replace: bool = False) -> None:
        raise AssertionError("a checkpoint is committed by the process that has begun it")

    def abort(self) -> None:
        """Nothing: what was written here may have been committed."""
