"""Checkpoints in a directory: a local disk, or NFS as far as its export keeps its word.

Committed means durable: files are written under a temporary name and fsynced, the manifest last; then the
temporary directory is fsynced, renamed, and the job's directory fsynced. Only then does `commit` return.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import msgspec

from holdfast.errors import DamagedCheckpoint, Fenced
from holdfast.format import MANIFEST
from holdfast.protocol import checkpoint_id, parse_checkpoint_id, validate_job
from holdfast.store.base import Attempt, Lineage, Pace

logger = logging.getLogger("holdfast")

WRITE_BYTES = 8 << 20
HEADROOM = 1.2
"""Free space asked for before a checkpoint is begun, as a multiple of its size."""


class LocalStore:
    """A `Store` under one directory; see `holdfast.store.base` for the promises."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)
        self.readers = 2

    def jobs(self) -> list[str]:
        if not self.root.exists():
            return []
        return sorted(p.name for p in self.root.iterdir() if p.is_dir() and (p / "attempts").is_dir())

    def checkpoints(self, job: str) -> list[str]:
        directory = self._job(job)
        if not directory.exists():
            return []
        found = [name for name in os.listdir(directory) if _is_checkpoint(name)]
        return sorted((n for n in found if (directory / n / MANIFEST).exists()), key=parse_checkpoint_id)

    def read_manifest(self, job: str, checkpoint: str) -> bytes:
        with self.open_file(job, checkpoint, MANIFEST) as file:
            data = bytearray(file.size_bytes)
            file.read_into(0, memoryview(data))
        return bytes(data)

    def open_file(self, job: str, checkpoint: str, file: str) -> LocalReader:
        return LocalReader(self._checkpoint(job, checkpoint) / Path(file).name)

    def begin(self, job: str, checkpoint: str, attempt: int, size_bytes: int) -> LocalWriter:
        directory = self._job(job)
        directory.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(directory).free
        if free < size_bytes * HEADROOM:
            raise OSError(
                errno.ENOSPC,
                f"{free / 1e6:,.0f} MB free, too little for a checkpoint of {size_bytes / 1e6:,.0f} MB",
                str(directory),
            )
        return LocalWriter(self, job, checkpoint, attempt)

    def delete(self, job: str, checkpoint: str, attempt: int) -> None:
        directory = self._checkpoint(job, checkpoint)
        doomed = directory.with_name(f".tmp-{attempt:08d}-deleted-{checkpoint}-{secrets.token_hex(4)}")
        with self.only_newest(job, attempt):
            directory.rename(doomed)  # gone from the list in one step, whatever happens to the rest
        shutil.rmtree(doomed, ignore_errors=True)

    def acquire_attempt(self, job: str, uid: str, at_least: int = 1) -> Attempt:
        directory = self._job(validate_job(job)) / "attempts"
        directory.mkdir(parents=True, exist_ok=True)
        with self._locked(job):
            number = max(self.latest_attempt(job) + 1, at_least)
            attempt = Attempt(
                number=number, uid=uid, host=socket.gethostname(), pid=os.getpid(), started_at=time.time()
            )
            _create_durably(directory / f"{number:08d}.json", msgspec.json.encode(attempt))
        self._remove_leftovers(job, number)
        return attempt

    def latest_attempt(self, job: str) -> int:
        directory = self._job(job) / "attempts"
        return max((int(p.stem) for p in _records(directory)), default=0)

    def begin_lineage(self, job: str, lineage: Lineage) -> None:
        directory = self._job(job) / "lineages"
        directory.mkdir(parents=True, exist_ok=True)
        with self.only_newest(job, lineage.attempt):
            _create_durably(directory / f"{lineage.number:06d}.json", msgspec.json.encode(lineage))

    def lineages(self, job: str) -> list[Lineage]:
        found = []
        for path in _records(self._job(job) / "lineages"):
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=Lineage))
            except msgspec.DecodeError as error:
                logger.warning("%s is not a lineage's record and is passed over: %s", path, error)
        return found

    @contextlib.contextmanager
    def only_newest(self, job: str, attempt: int) -> Iterator[None]:
        """Hold the job's lock, with `attempt` its newest: no newer one can begin meanwhile."""
        with self._locked(job):
            newest = self.latest_attempt(job)
            if newest > attempt:
                raise Fenced(f"attempt {newest} of {job} has started; attempt {attempt} commits nothing more")
            yield

    def _job(self, job: str) -> Path:
        return self.root / validate_job(job)

    def _checkpoint(self, job: str, checkpoint: str) -> Path:
        return self._job(job) / checkpoint_id(*parse_checkpoint_id(checkpoint))

    @contextlib.contextmanager
    def _locked(self, job: str) -> Iterator[None]:
        # flock, not a file with a process id in it: the kernel lets go when the holder dies, in whatever container
        with open(self._job(job) / ".lock", "a") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            try:
                yield
            finally:
                # closing is not enough: a data worker forked meanwhile holds the same lock through its copy
                fcntl.flock(handle, fcntl.LOCK_UN)

    def _remove_leftovers(self, job: str, attempt: int) -> None:
        for path in self._job(job).glob(".tmp-*"):
            number = path.name.split("-")[1]
            if number.isdigit() and int(number) < attempt:  # fenced: nobody writes there any more
                shutil.rmtree(path, ignore_errors=True)


class LocalReader:
    """A file of a checkpoint."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDONLY)
            self.size_bytes = os.fstat(self._fd).st_size
        except OSError as error:
            raise DamagedCheckpoint(str(path), error.strerror or str(error)) from error

    def read_into(self, start: int, target: memoryview) -> None:
        try:
            while len(target):
                count = os.preadv(self._fd, [target], start)
                if not count:
                    raise DamagedCheckpoint(str(self._path), f"ends at byte {start:,}")
                start, target = start + count, target[count:]
        except OSError as error:
            raise DamagedCheckpoint(str(self._path), error.strerror or str(error)) from error

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class LocalWriter:
    """A checkpoint under a temporary name of its own, so that two attempts never meet in one directory."""

    def __init__(self, store: LocalStore, job: str, checkpoint: str, attempt: int) -> None:
        self._store, self._job, self._attempt = store, job, attempt
        self._final = store._checkpoint(job, checkpoint)
        self._temporary = self._final.with_name(f".tmp-{attempt:08d}-{checkpoint}-{secrets.token_hex(4)}")
        self._temporary.mkdir()

    def write(
        self, file: str, parts: Sequence[memoryview | bytes], *, threads: bool = True, pace: Pace | None = None
    ) -> None:
        fd = os.open(self._temporary / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            size = sum(len(part) for part in parts)
            if size:
                _reserve(fd, size)
            for part in parts:
                _write_all(fd, memoryview(part))
            os.fsync(fd)
        finally:
            os.close(fd)

    def commit(self, manifest: bytes, *, replace: bool = False) -> None:
        self.write(MANIFEST, [manifest])
        _fsync_directory(self._temporary)
        with self._store.only_newest(self._job, self._attempt):
            if self._final.exists():
                if not replace:
                    raise FileExistsError(errno.EEXIST, "there is a checkpoint of that name", str(self._final))
                self._final.rename(self._final.with_name(f"{self._final.name}.damaged-{secrets.token_hex(4)}"))
            self._temporary.rename(self._final)
        _fsync_directory(self._final.parent)

    def abort(self) -> None:
        shutil.rmtree(self._temporary, ignore_errors=True)


def _records(directory: Path) -> list[Path]:
    """The numbered records in a directory; whatever else was put there is none of ours."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.glob("*.json") if path.stem.isdecimal())


def _is_checkpoint(name: str) -> bool:
    try:
        parse_checkpoint_id(name)
    except ValueError:
        return False
    return True


def _reserve(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)  # a full disk shows here, before the time is spent on writing
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


def _write_all(fd: int, data: memoryview) -> None:
    for start in range(0, len(data), WRITE_BYTES):
        piece = data[start : start + WRITE_BYTES]
        while len(piece):
            piece = piece[os.write(fd, piece) :]


def _create_durably(path: Path, data: bytes) -> None:
    """Create a small file that is there whole or not at all; FileExistsError when its name is taken."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        _write_all(fd, memoryview(data))
        os.fsync(fd)
    finally:
        os.close(fd)
    try:
        os.link(temporary, path)  # unlike rename, refuses to replace
    finally:
        temporary.unlink()
    for directory in (path.parent, path.parent.parent, path.parent.parent.parent):
        _fsync_directory(directory)


def _fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
