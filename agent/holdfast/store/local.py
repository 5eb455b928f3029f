"""Checkpoints in a directory: a local disk, or NFS as far as its export keeps its word.

Committed means durable: files are written under a temporary name and fsynced, the manifest last; then the
temporary directory is fsynced, renamed, and the job's directory fsynced. Only then does `commit` return.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import secrets
import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec

from holdfast.errors import DamagedCheckpoint, Fenced
from holdfast.format.manifest import MANIFEST
from holdfast.protocol.messages import (
    MAX_ATTEMPT,
    checkpoint_id,
    is_checkpoint_id,
    parse_checkpoint_id,
    validate_job,
)
from holdfast.store.base import Leftover, Pace
from holdfast.store.local_reader import LocalReader
from holdfast.store.local_writer import (
    NO_LINKS,
    Volume,
    create_durably,
    discard,
    make_durably,
    remove,
    rename,
    write_durably,
)
from holdfast.store.records import FOLDERS, PATTERNS, Attempt, Ending, Lineage, RecordStore, require_number
from holdfast.system.files import RECORD_BYTES, Files

HEADROOM = 1.2
"""Free space asked for before a checkpoint is begun, as a multiple of its size."""
LEFTOVER = re.compile(r"\.tmp-([0-9]+)-|[0-9]+-[0-9]+\.damaged-([0-9]+)-")
"""What an attempt was writing or deleting, or set aside: it may go once a newer attempt has begun."""
NOT_LINKED = (errno.EXDEV, errno.EMLINK, *NO_LINKS)
"""How a file system, or the rights on a file of somebody else's, refuse another name for it."""


class LocalStore(RecordStore):
    """A `Store` under one directory; see `holdfast.store.base` for the promises."""

    patterns: ClassVar = dict.fromkeys((Attempt, Lineage), re.compile(r"([0-9]+)\.json")) | PATTERNS

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
        return sorted(p.name for p in self.root.iterdir() if p.is_dir() and (p / FOLDERS[Attempt]).is_dir())

    def checkpoints(self, job: str) -> list[str]:
        directory = self._job(job)
        if not directory.exists():
            return []
        found = [name for name in os.listdir(directory) if is_checkpoint_id(name)]
        return sorted((n for n in found if (directory / n / MANIFEST).exists()), key=parse_checkpoint_id)

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
        with self.fenced(job, attempt):
            rename(self.files, directory, doomed)
        # the name must be gone for good before the files go, or a power cut could leave it with half of them
        self.files.sync_directory(directory.parent)
        remove(self.files, doomed)

    def acquire_attempt(self, job: str, uid: str, at_least: int = 1, *, order: str | None = None) -> Attempt:
        self._prepare(validate_job(job))
        with self._locked(job):
            self._remove_half_written_records(job)
            attempt = self._record_attempt(job, uid, at_least, order)
        self._remove_leftovers(job, attempt.number)
        return attempt

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
            remove(self.files, self._job(job) / name)

    def read_record(self, job: str, name: str) -> bytes:
        path = self._job(job) / name
        with os.fdopen(self.files.open(path), "rb") as file:
            data = file.read(RECORD_BYTES + 1)
        if len(data) > RECORD_BYTES:
            raise OSError(errno.EFBIG, f"is larger than {RECORD_BYTES:,} bytes, which no record is", str(path))
        return data

    def forsake(self, job: str, checkpoint: str, attempt: int) -> None:
        for path in self._job(job).glob(f"{_place_prefix(checkpoint, attempt)}*"):
            discard(self.files, path)

    @contextlib.contextmanager
    def fenced(self, job: str, attempt: int) -> Iterator[None]:
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
            make_durably(self.files, self.root, directory, *(FOLDERS[kind] for kind in (Attempt, Ending, Lineage)))
            self._prepared.add(job)

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

    def _record_files(self, job: str, folder: str) -> Iterable[str]:
        directory = self._job(job) / folder
        return os.listdir(directory) if directory.is_dir() else ()

    def _record_name(self, record: Attempt | Lineage) -> str:
        return f"{record.number:0{8 if isinstance(record, Attempt) else 6}d}.json"

    def _create_record(self, job: str, name: str, data: bytes) -> None:
        path = self._job(job) / name
        if not path.parent.is_dir():  # most jobs never have pins or holds
            make_durably(self.files, self.root, self._job(job), path.parent.name)
        create_durably(self.files, path, data)

    def _remove_records(self, job: str, names: Iterable[str]) -> None:
        for name in names:
            path = self._job(job) / name
            self.files.unlink(path)
            self.files.sync_directory(path.parent)

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
            name = f"{FOLDERS[Attempt]}/{self._record_name(attempt)}"
            # where locks do not reach from host to host, two may pick one number: then it is the link that decides
            with contextlib.suppress(FileExistsError):
                self._create_record(job, name, msgspec.json.encode(attempt))
                return attempt

    def _remove_half_written_records(self, job: str) -> None:
        for folder in FOLDERS.values():
            for path in (self._job(job) / folder).glob(".*.json-*"):
                with contextlib.suppress(OSError):
                    self.files.unlink(path)

    def _remove_leftovers(self, job: str, attempt: int) -> None:
        for path in sorted(self._job(job).iterdir()):
            found = LEFTOVER.match(path.name)
            if found and int(found[1] or found[2]) < attempt:  # fenced: nobody writes there any more
                remove(self.files, path)


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
        with self._store.fenced(self._job, self._attempt):
            if self._final.exists():
                self._set_aside(replace)
            rename(self._files, self._temporary, self._final)
        try:
            self._files.sync_directory(self._final.parent)
        except OSError:
            self._withdraw()
            raise

    def abort(self) -> None:
        discard(self._files, self._temporary)

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
        rename(self._files, self._final, self._final.with_name(damaged))

    def _withdraw(self) -> None:
        """What is not known to be durable must not be listed, nor stand in the way of the next try."""
        with contextlib.suppress(OSError, Fenced), self._store.fenced(self._job, self._attempt):
            rename(self._files, self._final, self._temporary)


class JoinedWriter(LocalWriter):
    """Of another process than the one that has begun the checkpoint, and will commit or abort it."""

    def commit(self, manifest: bytes, *, replace: bool = False) -> None:
        raise AssertionError("a checkpoint is committed by the process that has begun it")

    def abort(self) -> None:
        """Nothing: what was written here may have been committed."""


def _place_prefix(checkpoint: str, attempt: int) -> str:
    return f".tmp-{attempt:08d}-{checkpoint_id(*parse_checkpoint_id(checkpoint))}-"


def _size(directory: Path) -> int:
    """Of the files in a directory that somebody else may be removing."""
    size = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
    return size
