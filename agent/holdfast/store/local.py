"""Checkpoints in a directory, on a local disk or on NFS with an export that honors fsync.

Files are written into a temporary directory and fsynced, the manifest last. Then the temporary directory is
fsynced and renamed, and the directory of the job is fsynced. Only then does `commit` return.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import re
import secrets
import socket
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from holdfast.errors import DamagedCheckpoint, Fenced, StoreFull
from holdfast.format.manifest import MANIFEST
from holdfast.protocol.field_types import MAX_ATTEMPT
from holdfast.protocol.ids import checkpoint_id, is_checkpoint_id, is_job_name, parse_checkpoint_id, validate_job
from holdfast.store.base import FileReplacer, Leftover, Pace, Store
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
from holdfast.store.records import FOLDERS, Attempt, Ending, Lineage, require_number
from holdfast.system.files import LINK, RECORD_BYTES, Files
from holdfast.units import format_bytes

HEADROOM = 1.2
"""Free space that a checkpoint requires before it is begun, as a multiple of its size."""
logger = logging.getLogger("holdfast")

LEFTOVER = re.compile(r"\.tmp-([0-9]+)-|[0-9]+-[0-9]+\.damaged-([0-9]+)-")
"""Names of what an attempt was writing or deleting, or set aside; removable once a newer attempt has begun."""
REPLACEMENT = ".repair-"
"""Prefix of a file that is being written in the place of a damaged one."""
HALF_WRITTEN = re.compile(r"\..*\.json-.*")
"""Names of records that were being written."""
NOT_LINKED = (errno.EXDEV, errno.EMLINK, *NO_LINKS)
"""Errors by which a file system, or missing permissions, refuse a hard link."""


def open_directory(url: str) -> LocalStore:
    """Open the store in a directory, given as a path or `file://` address; ValueError for a file."""
    if not (text := url.removeprefix("file://")):
        raise ValueError(f"store={url!r} is empty: give a directory")
    path = Path(text).expanduser().absolute()
    if os.path.isfile(path):
        raise ValueError(f"store {path} is a file: give a directory")
    return LocalStore(path)


class LocalStore(Store):
    """A `Store` in a directory; see `holdfast.store.base` for the guarantees."""

    shares_files = takes_descriptors = True

    def __init__(self, root: Path, files: Files | None = None) -> None:
        self.root = root
        self.url = str(root)
        self.read_threads = 8  # also on two cores: storage devices need several requests at a time
        self.files = files or Files()
        self.files.root = root
        self._folders: dict[str, Path] = {}
        self._prepared: set[str] = set()
        self._volumes: dict[int, Volume] = {}

    def free_bytes(self) -> int | None:
        return self.files.free_bytes(self.root)

    def total_bytes(self) -> int | None:
        return self.files.total_bytes(self.root)

    def jobs(self) -> list[str]:
        """List the names of all jobs, and of links that may have been put in the place of one."""
        if self.files.stat(self.root) is None:
            return []
        return sorted(filter(is_job_name, self.files.links_and_holders(self.root, FOLDERS[Attempt])))

    def checkpoints(self, job: str) -> list[str]:
        directory = self._job(job)
        if self.files.stat(directory) is None:
            return []
        # a link is listed, so that it is named as damaged instead of being passed over in silence
        found = filter(is_checkpoint_id, self.files.links_and_holders(directory, MANIFEST))
        return sorted(found, key=parse_checkpoint_id)

    def open_file(self, job: str, checkpoint: str, file: str, *, from_disk: bool = False) -> LocalReader:
        return LocalReader(self.files, self.path(job, checkpoint) / Path(file).name, from_disk=from_disk)

    def begin(self, job: str, checkpoint: str, attempt: int, size_bytes: int) -> LocalWriter:
        self.prepare(job)
        self._require_room(self._job(job), size_bytes)
        folder = f"{_folder_prefix(checkpoint, attempt)}{secrets.token_hex(4)}"
        writer = LocalWriter(self, job, checkpoint, attempt, folder)
        self.files.make_directory(self._job(job) / folder)
        return writer

    def join(self, job: str, checkpoint: str, attempt: int, folder: str, size_bytes: int) -> LocalWriter:
        if not re.fullmatch(re.escape(_folder_prefix(checkpoint, attempt)) + "[0-9a-f]{8}", folder):
            raise ValueError(f"{folder!r} is not a directory in which attempt {attempt} writes {checkpoint}")
        directory = self._job(job) / folder
        if not self.files.is_directory(directory):
            self.require_newest(job, attempt)
            reason = "rank 0 began the checkpoint, but it is not visible here: all ranks need the same store"
            raise OSError(errno.ENOENT, reason, str(directory))
        self._require_room(directory, size_bytes)
        return LocalWriter(self, job, checkpoint, attempt, folder, joined=True)

    def file_replacer(self, job: str, checkpoint: str) -> FileReplacer:
        from holdfast.store.local_replacer import LocalReplacer  # for repairs, which are rare

        return LocalReplacer(self, job, checkpoint)

    def delete(self, job: str, checkpoint: str, attempt: int) -> None:
        directory = self.path(job, checkpoint)
        doomed = directory.with_name(f".tmp-{attempt:08d}-deleted-{checkpoint}-{secrets.token_hex(4)}")
        with self.fenced(job, attempt):
            rename(self.files, directory, doomed)
        # sync the rename before files are removed: a power cut must not leave the name with half of the files
        self.files.sync_directory(directory.parent)
        remove(self.files, doomed)

    def acquire_attempt(self, job: str, uid: str, at_least: int = 1, *, order: str | None = None) -> Attempt:
        self.prepare(job)
        with self._locked(job):
            self._remove_half_written_records(job)
            attempt = self._record_attempt(job, uid, at_least, order)
        self._remove_leftovers(job, attempt.number)
        return attempt

    def leftovers(self, job: str) -> list[Leftover]:
        # list the directory before the attempts: anything that is being written belongs to the newest attempt
        names, leftovers = sorted(self.files.names(self._job(job))), []
        newest = self.latest_attempt(job)
        for name in names:
            if found := LEFTOVER.match(name):
                unfinished, damaged = found.groups()
                if damaged or int(unfinished) != newest:
                    what = f"set aside as damaged by attempt {int(damaged)}" if damaged else ""
                    what = what or f"left unfinished by attempt {int(unfinished)}"
                    tree = self.files.tree(self._job(job) / name)
                    size_bytes = sum(each.st_size for _, each in tree if stat.S_ISREG(each.st_mode))
                    leftovers.append(Leftover(name=name, what=what, size_bytes=size_bytes))
        return leftovers

    def remove_leftover(self, job: str, name: str) -> None:
        if LEFTOVER.match(name) and os.sep not in name:
            remove(self.files, path := self._job(job) / name)
            if self.files.stat(path) is not None:
                raise OSError(errno.ENOTEMPTY, "something in it is mounted, or cannot be removed", str(path))

    def read_record(self, job: str, name: str) -> bytes:
        path = self._job(job) / name
        with os.fdopen(self.files.open(path), "rb") as file:
            data = file.read(RECORD_BYTES + 1)
        if len(data) > RECORD_BYTES:
            raise OSError(errno.EFBIG, f"is larger than {RECORD_BYTES:,} bytes, too large for a record", str(path))
        return data

    @contextlib.contextmanager
    def fenced(self, job: str, attempt: int) -> Iterator[None]:
        """Hold the lock of the job while `attempt` is its newest: no newer attempt can begin."""
        with self._locked(job):
            self.require_newest(job, attempt)
            yield

    def require_newest(self, job: str, attempt: int) -> None:
        newest = self.latest_attempt(job)
        if newest > attempt:
            raise Fenced(f"attempt {newest} of {job} has started; attempt {attempt} can no longer commit")

    def volume(self, path: Path) -> Volume:
        """Return the file system that a path is on."""
        return self._volumes.setdefault(self.files.device(path), Volume())

    def path(self, job: str, checkpoint: str) -> Path:
        return self._job(job) / checkpoint_id(*parse_checkpoint_id(checkpoint))

    def _job(self, job: str) -> Path:
        if job not in self._folders:
            self._folders[job] = self.root / validate_job(job)
        return self._folders[job]

    def prepare(self, job: str) -> None:
        directory = self._job(job)
        if job not in self._prepared or not self.files.is_directory(directory):
            make_durably(self.files, self.root, directory, *(FOLDERS[kind] for kind in (Attempt, Ending, Lineage)))
            self._prepared.add(job)

    def _require_room(self, directory: Path, size_bytes: int) -> None:
        free = self.files.free_bytes(directory)
        if free < size_bytes * HEADROOM:
            reason = f"{format_bytes(free)} free, too little for a checkpoint of {format_bytes(size_bytes)}"
            raise StoreFull(reason, str(directory), round(size_bytes * HEADROOM - free), free)

    def _locked(self, job: str) -> contextlib.AbstractContextManager[None]:
        return self.files.lock(self._job(job) / ".lock")

    def record_files(self, job: str, folder: str) -> Iterable[str]:
        directory = self._job(job) / folder
        return self.files.names(directory) if self.files.stat(directory) is not None else ()

    def create_record(self, job: str, name: str, data: bytes) -> None:
        path = self._job(job) / name
        if not self.files.is_directory(path.parent):  # folders of pins and holds are created when first needed
            make_durably(self.files, self.root, self._job(job), path.parent.name)
        create_durably(self.files, path, data)

    def remove_records(self, job: str, names: Iterable[str]) -> None:
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
            name = f"{FOLDERS[Attempt]}/{self.record_name(attempt)}"
            # without locks between hosts two attempts may pick the same number: creating the record decides
            with contextlib.suppress(FileExistsError):
                self.create_record(job, name, msgspec.json.encode(attempt))
                return attempt

    def _remove_half_written_records(self, job: str) -> None:
        for folder in FOLDERS.values():
            for name in filter(HALF_WRITTEN.fullmatch, self.record_files(job, folder)):
                with contextlib.suppress(OSError):
                    self.files.unlink(self._job(job) / folder / name)

    def _remove_leftovers(self, job: str, attempt: int) -> None:
        for name in sorted(self.files.names(self._job(job))):
            found = LEFTOVER.match(name)
            if found and int(found[1] or found[2]) < attempt:  # fenced, so that nothing is written there
                remove(self.files, self._job(job) / name)


class LocalWriter:
    """Writes a checkpoint in a temporary directory with a unique name, so that attempts never share one."""

    def __init__(
        self, store: LocalStore, job: str, checkpoint: str, attempt: int, folder: str, *, joined: bool = False
    ) -> None:
        self._store, self._job, self._attempt, self.folder = store, job, attempt, folder
        self._joined = joined
        self._files = store.files
        self._final = store.path(job, checkpoint)
        self._temporary = self._final.with_name(folder)
        self._volume = store.volume(self._final.parent)

    def write(self, file: str, parts: Sequence[memoryview | bytes], *, pace: Pace | None = None) -> None:
        with self._unless_cleared_away():
            write_durably(self._files, self._temporary / file, parts, self._volume, pace=pace)

    def write_with(self, file: str, write: Callable[[Files, Path], None]) -> None:
        """Have `write` create a file at a path and make its bytes durable. Raises as `write` of this class."""
        with self._unless_cleared_away():
            write(self._files, self._temporary / file)

    def copy_file(
        self, job: str, checkpoint: str, file: str, *, only_link: bool = False, size_bytes: int | None = None
    ) -> None:
        source, target = self._store.path(job, checkpoint) / Path(file).name, self._temporary / Path(file).name
        with self._unless_cleared_away():
            found = self._files.stat(source)
            if size_bytes is not None and found is not None and found.st_size != size_bytes:
                raise DamagedCheckpoint(str(source), f"is {found.st_size:,} bytes long, not {size_bytes:,}")
            try:
                self._files.link(source, target)
            except OSError as error:
                if self._files.stat(source) is None:
                    raise DamagedCheckpoint(str(source), "there is no such file") from error
                if only_link or error.errno not in NOT_LINKED:
                    raise
                self._copy(source, target)
            else:
                self._require_regular(source, target)

    def _require_regular(self, source: Path, target: Path) -> None:
        """Remove the link again if it is not one to a file: the source was something else."""
        linked = self._files.stat(target)
        if linked is not None and not stat.S_ISREG(linked.st_mode):
            self._files.unlink(target)
            raise DamagedCheckpoint(str(source), LINK if stat.S_ISLNK(linked.st_mode) else "is not a regular file")

    def _copy(self, source: Path, target: Path) -> None:
        with (
            os.fdopen(self._files.open(source), "rb") as opened,
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as whole,
        ):
            write_durably(self._files, target, [whole], self._volume)

    def make_durable(self) -> None:
        with self._unless_cleared_away():
            self._files.sync_directory(self._temporary)

    def commit(self, manifest: bytes, *, replace: bool = False) -> None:
        assert not self._joined, "the process that began the checkpoint commits it"
        self.write(MANIFEST, [manifest])
        self.make_durable()
        with self._store.fenced(self._job, self._attempt):
            if self._files.stat(self._final) is not None:
                self._set_aside(replace)
            rename(self._files, self._temporary, self._final)
        try:
            self._files.sync_directory(self._final.parent)
        except OSError:
            self._withdraw()
            raise

    def abort(self) -> None:
        if not self._joined:
            discard(self._files, self._temporary)

    @contextlib.contextmanager
    def _unless_cleared_away(self) -> Iterator[None]:
        """Raise Fenced where a newer attempt has begun and removed the temporary directory."""
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
        """Rename back: a checkpoint that may not be durable must not be listed, nor block the next try."""
        with contextlib.suppress(OSError, Fenced), self._store.fenced(self._job, self._attempt):
            rename(self._files, self._final, self._temporary)


def _folder_prefix(checkpoint: str, attempt: int) -> str:
    return f".tmp-{attempt:08d}-{checkpoint_id(*parse_checkpoint_id(checkpoint))}-"
