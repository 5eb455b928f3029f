"""Checkpoints in a bucket of an object store; `object_keys` explains why they need no lock."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, ClassVar

import msgspec

from holdfast.errors import DamagedCheckpoint, Fenced
from holdfast.format.manifest import MANIFEST
from holdfast.protocol.field_types import MAX_ATTEMPT
from holdfast.protocol.ids import checkpoint_id, parse_checkpoint_id, validate_job
from holdfast.store import object_keys as keys
from holdfast.store.base import FileReader, Leftover, Pace, Store
from holdfast.store.bucket import Bucket, NoSuchObject, Place, Unanswered
from holdfast.store.object_keys import Folder, Seen, Survey
from holdfast.store.records import FOLDERS, PATTERNS, Attempt, Lineage, require_number

logger = logging.getLogger("holdfast")

MOST_REMEMBERED = 64
"""Folders of checkpoints that are kept: those that are linked from are among the newest."""
CLAIMS = 10
"""Number of tries to become the newest attempt while others start the same job."""
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")


def open_bucket(url: str, extra: str, place: Callable[[str, str], Place]) -> ObjectStore:
    """Open the store in a bucket, of which `place` gets the name and the prefix.

    ValueError for an address without them, or without obstore, which `extra` installs.
    """
    scheme, _, path = url.partition("://")
    bucket, _, prefix = path.partition("/")
    prefix = prefix.strip("/")
    if not _BUCKET.fullmatch(bucket) or any(part in ("", ".", "..") for part in prefix.split("/") if prefix):
        scheme = scheme.partition(":")[0]
        raise ValueError(f"store {url!r}: give a bucket and a prefix, as in {scheme}://my-bucket/checkpoints")
    if find_spec("obstore") is None:
        raise ValueError(
            f"store {url!r}: object stores need obstore: pip install obstore, or install Holdfast with its "
            f"extra `{extra}`"
        )
    return ObjectStore(Bucket(place(bucket, prefix)))


class ObjectStore(Store):
    """A `Store` under a prefix in a bucket; see `holdfast.store.base` for the guarantees."""

    shares_files = False
    patterns: ClassVar = {Attempt: keys.ATTEMPT, Lineage: keys.LINEAGE, **PATTERNS}

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.url = bucket.place.url
        self.read_threads = 8
        self._read: dict[str, bytes] = {}
        """Records that were read; they never change."""
        self._turns: dict[tuple[str, str], int] = {}
        """Checkpoints that were begun before, whose late requests may still arrive."""
        self.written = dict[tuple[str, str], Folder]()
        """The folders of the last checkpoints that this process wrote: a copy from them needs no list."""

    def free_bytes(self) -> int | None:
        return None  # unknown for a bucket

    def jobs(self) -> list[str]:
        return sorted(job for job in self.bucket.folders() if FOLDERS[Attempt] in self.bucket.folders(f"{job}/"))

    def checkpoints(self, job: str) -> list[str]:
        return sorted(self.survey(job).committed(), key=parse_checkpoint_id)

    def open_file(self, job: str, checkpoint: str, file: str, *, from_disk: bool = False) -> ObjectReader:
        folder = self.find(job, checkpoint)
        name = f"{job}/{folder.path}/{file}"
        if file not in folder.files:
            raise DamagedCheckpoint(f"{self.url}/{name}", "there is no such object")
        return ObjectReader(self.bucket, name, folder.files[file])

    def begin(self, job: str, checkpoint: str, attempt: int, size_bytes: int) -> ObjectWriter:
        survey = self.survey(job, checkpoint)
        self.require_newest(job, attempt, survey.newest)  # before the payload is uploaded
        turns = [turn for number, turn in (folder.order for folder in survey.folders) if number == attempt]
        turn = max(*turns, self._turns.get((job, checkpoint), 0), 0) + 1
        self._turns[job, checkpoint] = turn
        return ObjectWriter(self, job, Folder(checkpoint, keys.folder_name(attempt, turn), {}))

    def join(self, job: str, checkpoint: str, attempt: int, folder: str, size_bytes: int) -> ObjectWriter:
        if not keys.is_folder_of(folder, attempt):
            raise ValueError(f"{folder!r} is not a folder in which attempt {attempt} writes {checkpoint}")
        self.require_newest(job, attempt)
        return ObjectWriter(self, job, Folder(checkpoint, folder, {}), joined=True)

    def file_replacer(self, job: str, checkpoint: str) -> ObjectReplacer:
        return ObjectReplacer(self, job, self.find(job, checkpoint))

    def delete(self, job: str, checkpoint: str, attempt: int) -> None:
        survey = self.survey(job, checkpoint)
        self.require_newest(job, attempt, survey.newest)
        doomed = [folder for folder in survey.folders if MANIFEST in folder.files and folder.order[0] <= attempt]
        if not doomed:
            raise FileNotFoundError(errno.ENOENT, "there is no checkpoint of that name", f"{self.url}/{job}")
        # a newer attempt that begins now may have listed it: retention deletes none that it would resume from
        self._delete(job, sorted(doomed, key=lambda folder: folder.order))
        self.require_newest(job, attempt)

    def acquire_attempt(self, job: str, uid: str, at_least: int = 1, *, order: str | None = None) -> Attempt:
        attempt = self._claim(validate_job(job), uid, at_least, order)
        survey = self.survey(job)
        seen = Seen(
            checkpoints=sorted(folder.path for folder in survey.counting_folders()),
            lineages=survey.counting_lineages(),
        )
        noted = keys.seen_name(f"{FOLDERS[Attempt]}/{self.record_name(attempt)}")
        self.create_record(job, noted, msgspec.json.encode(seen))
        self._remove_leftovers(job, attempt.number, survey, seen)
        return attempt

    def leftovers(self, job: str) -> list[Leftover]:
        return [
            Leftover(name=folder.path, what=what, size_bytes=sum(folder.files.values()))
            for folder, what in self.survey(job).leftovers()
        ]

    def remove_leftover(self, job: str, name: str) -> None:
        self._delete(job, [folder for folder, _ in self.survey(job).leftovers() if folder.path == name])

    def read_record(self, job: str, name: str) -> bytes:
        name = f"{validate_job(job)}/{name}"
        if name not in self._read:
            self._read[name] = self.bucket.get(name)
        return self._read[name]

    @contextlib.contextmanager
    def fenced(self, job: str, attempt: int) -> Iterator[None]:
        """Check before, to save useless work, and after: only then no newer attempt can have begun in between."""
        self.require_newest(job, attempt)
        yield
        self.require_newest(job, attempt)

    def survey(self, job: str, checkpoint: str = "") -> Survey:
        """List the objects of a job, or of one checkpoint, and determine which of them count."""
        sizes = self.names(job, f"{checkpoint_id(*parse_checkpoint_id(checkpoint))}/" if checkpoint else "")
        attempts = super()._numbered(job, Attempt)  # listed last: no older `seen` may judge what was listed
        newest = max((number for number, name in attempts if not name.endswith(keys.SEEN)), default=0)
        decider, name = max((each for each in attempts if each[1].endswith(keys.SEEN)), default=(0, ""))
        seen = self._seen(job, name) if name else Seen(checkpoints=[], lineages=[])
        return Survey(keys.folders_of(sizes), keys.lineages_of(sizes), newest, decider, seen)

    def names(self, job: str, below: str = "") -> dict[str, int]:
        """List the names below a job, with their sizes."""
        top = f"{validate_job(job)}/"
        return {name.removeprefix(top): size for name, size in self.bucket.sizes(top + below).items()}

    def require_newest(self, job: str, attempt: int, newest: int | None = None) -> None:
        """Raise Fenced when there is a newer attempt; without `newest` the attempts are listed again."""
        newest = self.latest_attempt(job) if newest is None else newest
        if newest > attempt:
            raise Fenced(f"attempt {newest} of {job} has started; attempt {attempt} can no longer commit")

    def record_files(self, job: str, folder: str) -> Iterable[str]:
        return [name.removeprefix(f"{folder}/") for name in self.names(job, f"{folder}/")]

    def record_name(self, record: Attempt | Lineage) -> str:
        if isinstance(record, Attempt):
            return f"{record.number:08d}-{record.uid}.json"
        return f"{record.number:06d}-{record.attempt:08d}.json"

    def create_record(self, job: str, name: str, data: bytes) -> None:
        self.bucket.put_new(f"{validate_job(job)}/{name}", data)

    def remove_records(self, job: str, names: Iterable[str]) -> None:
        for name in names:
            self._read.pop(f"{job}/{name}", None)
            self.bucket.delete([f"{validate_job(job)}/{name}"])

    def _numbered(self, job: str, kind: type[Any]) -> list[tuple[int, str]]:
        if kind is Lineage:
            names = self.survey(job).counting_lineages()
            return sorted((keys.record_number(name), name) for name in names)
        found = super()._numbered(job, kind)
        if kind is Attempt:
            # of several attempts with the same number, the one that has a `seen` record owns it, and comes last
            seen = {name for _, name in found if name.endswith(keys.SEEN)}
            found = [each for each in found if each[1] not in seen]
            found.sort(key=lambda each: (each[0], keys.seen_name(each[1]) in seen))
        return found

    def _seen(self, job: str, name: str) -> Seen:
        try:
            return msgspec.json.decode(self.read_record(job, name), type=Seen)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            reason = f"is not a Holdfast record ({error}): remove it"
            raise OSError(errno.EIO, reason, f"{self.url}/{job}/{name}") from error

    def remember(self, job: str, folder: Folder) -> None:
        """Keep the folder of a checkpoint that this process wrote."""
        self.written.pop((job, folder.checkpoint), None)
        self.written[job, folder.checkpoint] = folder
        if len(self.written) > MOST_REMEMBERED:
            del self.written[next(iter(self.written))]

    def find(self, job: str, checkpoint: str) -> Folder:
        """Return the folder of a committed checkpoint. DamagedCheckpoint when there is none."""
        folder = self.survey(job, checkpoint).committed().get(checkpoint)
        if folder is None:
            raise DamagedCheckpoint(f"{self.url}/{job}/{checkpoint}/{MANIFEST}", "there is no such object")
        return folder

    def _claim(self, job: str, uid: str, at_least: int, order: str | None) -> Attempt:
        """Record an attempt whose number is unique and the highest.

        An attempt owns its number when a list that begins after its record was put shows no other record as high:
        of two attempts that put the same number, the list of the later one shows both.
        """
        host, pid, started_at = socket.gethostname(), os.getpid(), time.time()
        for claim in range(CLAIMS):
            number = max(self.latest_attempt(job) + 1, at_least)
            require_number(number, MAX_ATTEMPT, "attempt", job, self.url)
            attempt = Attempt(number=number, uid=uid, host=host, pid=pid, started_at=started_at, order=order)
            name = f"{FOLDERS[Attempt]}/{self.record_name(attempt)}"
            self.create_record(job, name, msgspec.json.encode(attempt))
            if all(n < number for n, other in self._numbered(job, Attempt) if other != name):
                return attempt
            self.bucket.wait(0.05 * 2**claim)
        raise OSError(errno.EAGAIN, f"other processes keep starting {job} at the same time", self.url)

    def _remove_leftovers(self, job: str, attempt: int, survey: Survey, seen: Seen) -> None:
        """Remove what older attempts left unfinished, unless a newer attempt has begun, which does it itself."""
        doomed = [f for f in survey.folders if f.order[0] < attempt and f.path not in seen.checkpoints]
        records = [n for n in survey.lineages if keys.lineage_attempt(n) < attempt and n not in seen.lineages]
        try:
            if (doomed or records) and self.latest_attempt(job) == attempt:
                self._delete(job, doomed)
                self.bucket.delete(f"{job}/{name}" for name in records)
        except OSError as error:
            logger.warning("leftovers of %s remain in %s: %s", job, self.url, error.strerror)

    def _delete(self, job: str, folders: Sequence[Folder]) -> None:
        """Delete folders, manifests first, so that no checkpoint is listed without its payload."""
        manifests = [f"{folder.path}/{MANIFEST}" for folder in folders if MANIFEST in folder.files]
        rest = [key for folder in folders for key in folder.keys if key not in manifests]
        self.bucket.delete(f"{job}/{key}" for key in manifests + rest)


class ObjectReader(FileReader):
    """A file of a checkpoint."""

    def __init__(self, bucket: Bucket, name: str, size_bytes: int) -> None:
        self._bucket, self.name, self.size_bytes = bucket, name, size_bytes

    def read_into(self, start: int, target: memoryview) -> None:
        url = f"{self._bucket.place.url}/{self.name}"
        if start + len(target) > self.size_bytes:
            raise DamagedCheckpoint(url, f"ends at byte {self.size_bytes:,}")
        try:
            self._bucket.read(self.name, start, target)
        except NoSuchObject as error:
            raise DamagedCheckpoint(url, "the object no longer exists") from error


class ObjectWriter:
    """Writes a checkpoint in a unique folder, which no late request of another attempt or try can change."""

    def __init__(self, store: ObjectStore, job: str, folder: Folder, *, joined: bool = False) -> None:
        self._store, self._job, self._folder, self._joined = store, job, folder, joined
        self._decided = False
        """Its manifest was put, or may have been; then only the next attempt can decide whether it counts."""
        self._is_shared = False
        """Other processes know the folder, and may have written there."""

    @property
    def folder(self) -> str:
        self._is_shared = True
        return self._folder.name

    def write(self, file: str, parts: Sequence[memoryview | bytes], *, pace: Pace | None = None) -> None:
        self._folder.files[file] = sum(len(part) for part in parts)
        self._store.bucket.upload(f"{self._job}/{self._folder.path}/{file}", parts, pace)

    def copy_file(
        self, job: str, checkpoint: str, file: str, *, only_link: bool = False, size_bytes: int | None = None
    ) -> None:
        store = self._store
        folder = store.written.get((job, checkpoint))
        if folder is None or file not in folder.files:  # another rank may have written the file
            folder = store.find(job, checkpoint)
        name, found = f"{job}/{folder.path}/{file}", folder.files.get(file)
        if found is None:
            raise DamagedCheckpoint(f"{store.url}/{name}", "there is no such object")
        if size_bytes not in (None, found):
            raise DamagedCheckpoint(f"{store.url}/{name}", f"is {found:,} bytes long, not {size_bytes:,}")
        self._folder.files[file] = found
        try:
            store.bucket.copy(name, f"{self._job}/{self._folder.path}/{file}", found, only_on_server=only_link)
        except NoSuchObject as error:
            raise DamagedCheckpoint(f"{store.url}/{name}", "the object no longer exists") from error

    def make_durable(self) -> None:
        """Check what a process that joined has put: objects are durable once they are."""
        if self._joined:
            try:
                self._require_sizes(self._store.names(self._job, f"{self._folder.path}/"))
            except OSError:
                self._store.require_newest(self._job, self._folder.order[0])  # which removes what it finds
                raise
            self._store.remember(self._job, self._folder)

    def commit(self, manifest: bytes, *, replace: bool = False) -> None:
        assert not self._joined, "the process that began the checkpoint commits it"
        store, job, checkpoint = self._store, self._job, self._folder.checkpoint
        attempt, _ = self._folder.order
        survey = store.survey(job, checkpoint)
        store.require_newest(job, attempt, survey.newest)
        if not replace and checkpoint in survey.committed():
            url = f"{store.url}/{job}/{checkpoint}"
            raise FileExistsError(errno.EEXIST, "there is a checkpoint of that name", url)
        put = next((folder for folder in survey.folders if folder == self._folder), None)  # also by other ranks
        self._require_sizes(put.sizes if put is not None else {})
        self._put(manifest)
        store.require_newest(job, attempt)  # otherwise the list of a newer attempt may have missed the manifest
        store.remember(job, put or self._folder)

    def _require_sizes(self, found: Mapping[str, int]) -> None:
        """Compare all objects that this process put with a list: one request instead of one for each."""
        for key, size_bytes in self._folder.sizes.items():
            self._store.bucket.require_size(f"{self._job}/{key}", size_bytes, found.get(key, 0))

    def _put(self, manifest: bytes) -> None:
        try:
            self._decided = True
            self._store.bucket.put_new(f"{self._job}/{self._folder.path}/{MANIFEST}", manifest)
        except Unanswered:
            raise
        except OSError:  # refused: no manifest was put
            self._decided = False
            raise

    def abort(self) -> None:
        if not self._decided and not self._joined:
            with contextlib.suppress(OSError):
                below = f"{self._folder.path}/"
                put = self._store.names(self._job, below) if self._is_shared else self._folder.keys
                self._store.bucket.delete(f"{self._job}/{key}" for key in put)


class ObjectReplacer:
    """Replaces objects in the folder of a checkpoint by what was put there first.

    A late request does no harm: it puts the same bytes, and a checkpoint of a newer write is in another folder.
    """

    def __init__(self, store: ObjectStore, job: str, folder: Folder) -> None:
        self._store, self._job, self._folder = store, job, folder
        self._attempt = store.latest_attempt(job)

    def replace(self, file: str, parts: Sequence[memoryview | bytes], *, pace: Pace | None = None) -> None:
        with self._store.fenced(self._job, self._attempt):
            if self._store.find(self._job, self._folder.checkpoint) != self._folder:
                raise Fenced(f"{self._folder.checkpoint} of {self._job} was replaced during its repair")
            name = f"{self._job}/{self._folder.path}/{file}"
            self._store.bucket.upload(name, parts, pace)
            self._store.bucket.require_size(name, sum(len(part) for part in parts))
