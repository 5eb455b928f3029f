"""Checkpoints in a directory: a local disk, or NFS as far as its export keeps its word.

Committed means durable: files are written under a temporary name and fsynced, the manifest last; then the
temporary directory is fsynced, renamed, and the job's directory fsynced. Only then does `commit` return.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import mmap
import os
import re
import secrets
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from holdfast.errors import DamagedCheckpoint, Fenced
from holdfast.format import MANIFEST
from holdfast.protocol import (
    MAX_ATTEMPT,
    MAX_LINEAGE,
    checkpoint_id,
    is_checkpoint_id,
    parse_checkpoint_id,
    validate_job,
)
from holdfast.store import directories, pin_notes
from holdfast.store.base import (
    MOST_MANIFEST_BYTES,
    Attempt,
    Ending,
    Hold,
    Leftover,
    Lineage,
    Pace,
    Pins,
    Record,
    decode_record,
    require_number,
)
from holdfast.store.files import Files, read_record
from holdfast.store.pin_notes import PINS
from holdfast.store.reading import LocalReader
from holdfast.store.writing import Volume, write_durably

T = TypeVar("T")
logger = logging.getLogger("holdfast")

HEADROOM = 1.2
"""Free space asked for before a checkpoint is begun, as a multiple of its size."""
LEFTOVER = re.compile(r"\.tmp-([0-9]+)-|[0-9]+-[0-9]+\.damaged-([0-9]+)-")
"""What an attempt was writing or deleting, or set aside: it may go once a newer attempt has begun."""
ATTEMPTS = "attempts"
ENDINGS = "endings"
LINEAGES = "lineages"
HOLDS = "holds"
RECORDS: dict[Literal["attempt", "ending", "lineage"], str] = {
    "attempt": ATTEMPTS, "ending": ENDINGS, "lineage": LINEAGES,
}  # fmt: skip
NOT_LINKED = (errno.EXDEV, errno.EMLINK, *directories.NO_LINKS)
"""How a file system, or the rights on a file of somebody else's, refuse another name for it."""


class LocalStore:
    """A `Store` under one directory; see `holdfast.store.base` for the promises."""

    def __init__(self, root: Path, files: Files | None = None) -> None:
        self.root = root
        self.url = str(root)
        self.readers = 8  # on two cores as well: a device answers late what it has not been asked before
        self.files = files or Files()
        self._prepared: set[str] = set()
        self._volumes: dict[int, Volume] = {}

    def free_bytes(self) -> int | None:
        return self.files.free_bytes(self.root)

    def jobs(self) -> list[str]:
        if not self.root.exists():
            return []
        return sorted(p.name for p in self.root.iterdir() if p.is_dir() and (p / ATTEMPTS).is_dir())

    def checkpoints(self, job: str) -> list[str]:
        directory = self._job(job)
        if not directory.exists():
            return []
        found = [name for name in os.listdir(directory) if is_checkpoint_id(name)]
        return sorted((n for n in found if (directory / n / MANIFEST).exists()), key=parse_checkpoint_id)

    def read_manifest(self, job: str, checkpoint: str) -> bytes:
        with self.open_file(job, checkpoint, MANIFEST) as file:
            if file.size_bytes > MOST_MANIFEST_BYTES:
                raise DamagedCheckpoint(
                    f"{checkpoint}/{MANIFEST}", f"is {file.size_bytes:,} bytes long: no manifest is"
                )
            data = bytearray(file.size_bytes)
            file.read_into(0, memoryview(data))
        return bytes(data)

    def open_file(self, job: str, checkpoint: str, file: str, *, from_disk: bool = False) -> LocalReader:
        return LocalReader(self.files, self.path(job, checkpoint) / Path(file).name, from_disk=from_disk)

    def begin(self, job: str, checkpoint: str, attempt: int, size_bytes: int) -> LocalWriter:
        self._prepare(job)
        self._require_room(self._job(job), size_bytes)
        place = f"{_place_prefix(checkpoint, attempt)}{secrets.token_hex(4)}"
        writer = LocalWriter(self, job, checkpoint, attempt, place)
        self.files.make_directory(self._job(job) / place)
        return writer

    def join(self, job: str, checkpoint: str, attempt: int, place: str, size_bytes: int) -> JoinedWriter:
        if not re.fullmatch(re.escape(_place_prefix(checkpoint, attempt)) + "[0-9a-f]{8}", place):
            raise ValueError(f"{place!r} is no place where attempt {attempt} writes {checkpoint}")
        directory = self._job(job) / place
        if not directory.is_dir():
            self.require_newest(job, attempt)
            reason = "rank 0 has begun it, and it is not to be seen here: all ranks need the same store"
            raise OSError(errno.ENOENT, reason, str(directory))
        self._require_room(directory, size_bytes)
        return JoinedWriter(self, job, checkpoint, attempt, place)

    def delete(self, job: str, checkpoint: str, attempt: int) -> None:
        directory = self.path(job, checkpoint)
        doomed = directory.with_name(f".tmp-{attempt:08d}-deleted-{checkpoint}-{secrets.token_hex(4)}")
        with self.only_newest(job, attempt):
            directories.rename(self.files, directory, doomed)
        # the name must be gone for good before the files go, or a power cut could leave it with half of them
        self.files.sync_directory(directory.parent)
        directories.remove(self.files, doomed)

    def acquire_attempt(self, job: str, uid: str, at_least: int = 1, *, order: str | None = None) -> Attempt:
        self._prepare(validate_job(job))
        with self._locked(job):
            self._remove_half_written_records(job)
            attempt = self._record_attempt(job, uid, at_least, order)
        self._remove_leftovers(job, attempt.number)
        return attempt

    def latest_attempt(self, job: str) -> int:
        return max((int(p.stem) for p in _records(self._job(job) / ATTEMPTS, MAX_ATTEMPT)), default=0)

    def newest_attempt(self, job: str) -> Attempt | None:
        records = _records(self._job(job) / ATTEMPTS, MAX_ATTEMPT)
        newest = max(records, key=lambda path: int(path.stem), default=None)
        try:
            return None if newest is None else decode_record(read_record(newest), Attempt, int(newest.stem))
        except msgspec.DecodeError as error:
            raise OSError(errno.EIO, f"is not an attempt's record: {error}", str(newest)) from error

    def note_ending(self, job: str, ending: Ending) -> None:
        self._prepare(job)
        path = self._job(job) / ENDINGS / f"{ending.attempt:08d}.json"
        with self.only_newest(job, ending.attempt):
            directories.create_durably(self.files, path, msgspec.json.encode(ending))

    def attempts(self, job: str, since: int = 1) -> list[Attempt]:
        return self._read_records(job, ATTEMPTS, Attempt, since)

    def endings(self, job: str, since: int = 1) -> list[Ending]:
        return self._read_records(job, ENDINGS, Ending, since)

    def note_pins(self, job: str, pins: Pins) -> None:
        directory = self._job(job) / PINS
        if not directory.is_dir():  # most jobs never have one
            directories.make_durably(self.files, self.root, self._job(job), PINS)
        with self.only_newest(job, pins.attempt):
            before = self._pin_notes(job)
            path = directory / pin_notes.following(before, pins.attempt)
            directories.create_durably(self.files, path, msgspec.json.encode(pins))
            for name in before:
                with contextlib.suppress(OSError):  # it counts no more, whether it goes or not
                    self.files.unlink(directory / name)

    def pins(self, job: str) -> Pins | None:
        while notes := self._pin_notes(job):
            path = self._job(job) / PINS / notes[-1]
            try:
                return decode_record(read_record(path), Pins)
            except FileNotFoundError:  # replaced just now
                continue
            except msgspec.DecodeError as error:
                raise OSError(errno.EIO, f"is no note of pins ({error}): remove it", str(path)) from error
        return None

    def hold(self, job: str, hold: Hold) -> None:
        directory = self._job(job) / HOLDS
        if not directory.is_dir():
            directories.make_durably(self.files, self.root, self._job(job), HOLDS)
        directories.create_durably(self.files, directory / f"{hold.uid}.json", msgspec.json.encode(hold))

    def release(self, job: str, uid: str) -> None:
        with contextlib.suppress(OSError):
            self.files.unlink(self._job(job) / HOLDS / f"{uid}.json")

    def holds(self, job: str) -> list[Hold]:
        found, directory = [], self._job(job) / HOLDS
        for path in sorted(directory.glob("*.json")) if directory.is_dir() else ():
            with contextlib.suppress(OSError, msgspec.DecodeError):  # taken back just now; none of ours
                found.append(decode_record(read_record(path), Hold))
        return found

    def leftovers(self, job: str) -> list[Leftover]:
        # listed first: what is being written then is of the newest attempt, or of one whose record was removed
        paths, leftovers = sorted(self._job(job).iterdir()), []
        newest = self.latest_attempt(job)
        for path in paths:
            if found := LEFTOVER.match(path.name):
                half_done, damaged = found.groups()
                if damaged or int(half_done) != newest:
                    what = f"set aside as damaged by attempt {int(damaged)}" if damaged else ""
                    what = what or f"left half-done by attempt {int(half_done)}"
                    leftovers.append(Leftover(name=path.name, what=what, size_bytes=_size(path)))
        return leftovers

    def remove_leftover(self, job: str, name: str) -> None:
        if LEFTOVER.match(name) and os.sep not in name:
            directories.remove(self.files, self._job(job) / name)

    def records(self, job: str) -> list[Record]:
        return [
            Record(name=f"{folder}/{path.name}", kind=kind, number=int(path.stem))
            for kind, folder in RECORDS.items()
            for path in _records(self._job(job) / folder)
        ]

    def read_record(self, job: str, name: str) -> bytes:
        return read_record(self._job(job) / name)

    def remove_record(self, job: str, name: str, attempt: int) -> None:
        path = self._job(job) / name
        with self.only_newest(job, attempt):
            self.files.unlink(path)
            self.files.sync_directory(path.parent)

    def forsake(self, job: str, checkpoint: str, attempt: int) -> None:
        for path in self._job(job).glob(f"{_place_prefix(checkpoint, attempt)}*"):
            directories.discard(self.files, path)

    def begin_lineage(self, job: str, lineage: Lineage) -> None:
        require_number(lineage.number, MAX_LINEAGE, "lineage", job, self.url)
        self._prepare(job)
        path = self._job(job) / LINEAGES / f"{lineage.number:06d}.json"
        with self.only_newest(job, lineage.attempt):
            directories.create_durably(self.files, path, msgspec.json.encode(lineage))

    def lineages(self, job: str) -> list[Lineage]:
        return self._read_records(job, LINEAGES, Lineage)

    @contextlib.contextmanager
    def only_newest(self, job: str, attempt: int) -> Iterator[None]:
        """Hold the job's lock, with `attempt` its newest: no newer one can begin meanwhile."""
        with self._locked(job):
            self.require_newest(job, attempt)
            yield

    def require_newest(self, job: str, attempt: int) -> None:
        newest = self.latest_attempt(job)
        if newest > attempt:
            raise Fenced(f"attempt {newest} of {job} has started; attempt {attempt} commits nothing more")

    def volume(self, path: Path) -> Volume:
        """The file system that something is on."""
        return self._volumes.setdefault(self.files.device(path), Volume())

    def path(self, job: str, checkpoint: str) -> Path:
        return self._job(job) / checkpoint_id(*parse_checkpoint_id(checkpoint))

    def _job(self, job: str) -> Path:
        return self.root / validate_job(job)

    def _prepare(self, job: str) -> None:
        directory = self._job(job)
        if job not in self._prepared or not directory.is_dir():
            directories.make_durably(self.files, self.root, directory, ATTEMPTS, ENDINGS, LINEAGES)
            self._prepared.add(job)

    def _pin_notes(self, job: str) -> list[str]:
        directory = self._job(job) / PINS
        return pin_notes.in_order(os.listdir(directory)) if directory.is_dir() else []

    def _require_room(self, directory: Path, size_bytes: int) -> None:
        free = self.files.free_bytes(directory)
        if free < size_bytes * HEADROOM:
            raise OSError(
                errno.ENOSPC,
                f"{free / 1e6:,.0f} MB free, too little for a checkpoint of {size_bytes / 1e6:,.0f} MB",
                str(directory),
            )

    def _locked(self, job: str) -> contextlib.AbstractContextManager[None]:
        return self.files.lock(self._job(job) / ".lock")

    def _read_records(self, job: str, kind: str, record: type[T], since: int = 1) -> list[T]:
        found, most = [], MAX_LINEAGE if kind == LINEAGES else MAX_ATTEMPT
        for path in (path for path in _records(self._job(job) / kind, most) if int(path.stem) >= since):
            try:
                found.append(decode_record(read_record(path), record, int(path.stem)))
            except msgspec.DecodeError as error:
                logger.warning("%s is not a record of Holdfast's and is passed over: %s", path, error)
            except OSError as error:
                if error.errno not in (errno.ENXIO, errno.EFBIG):
                    raise
                logger.warning("%s is not a record of Holdfast's and is passed over: %s", path, error.strerror)
        return found

    def _record_attempt(self, job: str, uid: str, at_least: int, order: str | None) -> Attempt:
        while True:
            number = max(self.latest_attempt(job) + 1, at_least)
            require_number(number, MAX_ATTEMPT, "attempt", job, self.url)
            attempt = Attempt(
                number=number,
                uid=uid,
                host=socket.gethostname(),
                pid=os.getpid(),
                started_at=self.files.now(),
                order=order,
            )
            path = self._job(job) / ATTEMPTS / f"{number:08d}.json"
            # where locks do not reach from host to host, two may pick one number: then it is the link that decides
            with contextlib.suppress(FileExistsError):
                directories.create_durably(self.files, path, msgspec.json.encode(attempt))
                return attempt

    def _remove_half_written_records(self, job: str) -> None:
        for kind in (ATTEMPTS, ENDINGS, LINEAGES, PINS, HOLDS):
            for path in (self._job(job) / kind).glob(".*.json-*"):
                with contextlib.suppress(OSError):
                    self.files.unlink(path)

    def _remove_leftovers(self, job: str, attempt: int) -> None:
        for path in sorted(self._job(job).iterdir()):
            found = LEFTOVER.match(path.name)
            if found and int(found[1] or found[2]) < attempt:  # fenced: nobody writes there any more
                directories.remove(self.files, path)


class LocalWriter:
    """A checkpoint under a temporary name of its own, so that two attempts never meet in one directory."""

    def __init__(self, store: LocalStore, job: str, checkpoint: str, attempt: int, place: str) -> None:
        self._store, self._job, self._attempt, self.place = store, job, attempt, place
        self._files = store.files
        self._final = store.path(job, checkpoint)
        self._temporary = self._final.with_name(place)
        self._volume = store.volume(self._final.parent)

    def write(self, file: str, parts: Sequence[memoryview | bytes], *, pace: Pace | None = None) -> None:
        with self._unless_cleared_away():
            path = self._temporary / file
            write_durably(self._files, path, parts, self._volume, pace=pace)

    def adopt(self, job: str, checkpoint: str, file: str) -> None:
        source, target = self._store.path(job, checkpoint) / Path(file).name, self._temporary / Path(file).name
        with self._unless_cleared_away():
            try:
                self._files.link(source, target)
            except OSError as error:
                if not source.exists():
                    raise DamagedCheckpoint(str(source), "there is no such file") from error
                if error.errno not in NOT_LINKED:
                    raise
                self._copy(source, target)

    def _copy(self, source: Path, target: Path) -> None:
        with (
            os.fdopen(self._files.open(source), "rb") as opened,
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as whole,
        ):
            write_durably(self._files, target, [whole], self._volume)

    def settle(self) -> None:
        with self._unless_cleared_away():
            self._files.sync_directory(self._temporary)

    def commit(self, manifest: bytes, *, replace: bool = False) -> None:
        self.write(MANIFEST, [manifest])
        self.settle()
        with self._store.only_newest(self._job, self._attempt):
            if self._final.exists():
                self._set_aside(replace)
            directories.rename(self._files, self._temporary, self._final)
        try:
            self._files.sync_directory(self._final.parent)
        except OSError:
            self._withdraw()
            raise

    def abort(self) -> None:
        directories.discard(self._files, self._temporary)

    @contextlib.contextmanager
    def _unless_cleared_away(self) -> Iterator[None]:
        """Fenced, where a newer attempt has begun and removed what this one was writing."""
        try:
            yield
        except FileNotFoundError:
            self._store.require_newest(self._job, self._attempt)
            raise

    def _set_aside(self, replace: bool) -> None:
        if not replace:
            raise FileExistsError(errno.EEXIST, "there is a checkpoint of that name", str(self._final))
        damaged = f"{self._final.name}.damaged-{self._attempt:08d}-{secrets.token_hex(4)}"
        directories.rename(self._files, self._final, self._final.with_name(damaged))

    def _withdraw(self) -> None:
        """What is not known to be durable must not be listed, nor stand in the way of the next try."""
        with contextlib.suppress(OSError, Fenced), self._store.only_newest(self._job, self._attempt):
            directories.rename(self._files, self._final, self._temporary)


class JoinedWriter(LocalWriter):
    """Of another process than the one that has begun the checkpoint, and will commit or abort it."""

    def commit(self, manifest: bytes, *, replace: bool = False) -> None:
        raise AssertionError("a checkpoint is committed by the process that has begun it")

    def abort(self) -> None:
        """Nothing: what was written here may have been committed."""


def _place_prefix(checkpoint: str, attempt: int) -> str:
    return f".tmp-{attempt:08d}-{checkpoint_id(*parse_checkpoint_id(checkpoint))}-"


def _records(directory: Path, most: float = math.inf) -> list[Path]:
    """The records in a directory with numbers up to `most`; whatever else was put there is none of ours."""
    if not directory.is_dir():
        return []
    numbered = (path for path in directory.glob("*.json") if path.stem.isascii() and path.stem.isdecimal())
    return sorted(path for path in numbered if int(path.stem) <= most)


def _size(directory: Path) -> int:
    """Of the files in a directory that somebody else may be removing."""
    size = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
    return size
