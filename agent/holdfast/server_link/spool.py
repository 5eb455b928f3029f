"""Unsent batches on disk: bounded, durable, in order, and sent by the next attempt if need be."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args
from urllib.parse import quote

from holdfast.protocol.wire import Lane
from holdfast.system.files import Files

log = logging.getLogger("holdfast")

LIMIT_BYTES = 64 * 1024 * 1024
SUFFIX = ".2.batch"
"""Of the files of this version of Holdfast; those of others are kept and not sent."""
ANY_SUFFIX = ".batch"


@dataclass(frozen=True, slots=True, order=True)
class BatchKey:
    """Identifies a batch; keys sort in the order of sending."""

    attempt: int
    uid: str
    rank: int
    lane: Lane
    sequence: int

    @property
    def filename(self) -> str:
        lane = "" if self.lane == "control" else f".{self.lane}"
        return f"{self.attempt:08d}.{self.uid}.{self.rank}{lane}.{self.sequence:012d}{SUFFIX}"


class Spool:
    """A directory with one file per batch, which holds the bytes to post. Never raises if the disk fails.

    It is below a store, where no symbolic link is followed: neither it nor the directory of its job may be one.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._files = directory, Files()
        self._files.root = directory.parent.parent
        self._warned = False
        self._used_bytes = sum(size for _, size in self._batches())

    def write(self, key: BatchKey, payload: bytes) -> bool:
        """Make a batch durable. Return whether there was room and the disk accepted it."""
        if self._used_bytes + len(payload) > LIMIT_BYTES:
            self._used_bytes = sum(size for _, size in self._batches())  # other processes may have sent some
        if self._used_bytes + len(payload) > LIMIT_BYTES:
            self._warn(f"it already holds {LIMIT_BYTES >> 20} MiB of unsent reports")
            return False
        try:
            self._write(key.filename, payload)
        except OSError as error:
            self._warn(str(error))
            return False
        self._used_bytes += len(payload)
        return True

    def read(self, key: BatchKey) -> bytes | None:
        """Return the bytes of a batch, or `None` if another process of this job has sent it."""
        try:
            with os.fdopen(self._files.open(self._directory / key.filename), "rb") as file:
                return file.read()
        except OSError:
            return None

    def remove(self, key: BatchKey) -> None:
        path = self._directory / key.filename
        with contextlib.suppress(OSError):
            found = self._files.stat(path)
            self._files.unlink(path)
            self._used_bytes -= found.st_size if found is not None else 0

    def left_by_others(self, uid: str, rank: int) -> list[BatchKey]:
        """Return the batches of earlier attempts, oldest first. Rank 0 sends them for all ranks."""
        if rank != 0:
            return []
        # Killed attempts leave partial files. An attempt that still runs notices the failed write and repeats it.
        for name in self._names():
            if name.endswith(f"{SUFFIX}.tmp") and f".{uid}." not in name:
                with contextlib.suppress(OSError):
                    self._files.unlink(self._directory / name)
        others = [name for name in self._names() if name.endswith(ANY_SUFFIX) and not name.endswith(SUFFIX)]
        if others:
            log.info(
                "%d unsent reports in %s are from another version of Holdfast: they are kept and not sent",
                *(len(others), self._directory),
            )
        return sorted(key for key, _ in self._batches() if key.uid != uid)

    def _names(self) -> list[str]:
        with contextlib.suppress(OSError):
            return self._files.names(self._directory)
        return []

    def _batches(self) -> Iterator[tuple[BatchKey, int]]:
        for name in self._names():
            if (key := _key(name)) is not None:
                with contextlib.suppress(OSError):
                    found = self._files.stat(self._directory / name)
                    if found is not None and stat.S_ISREG(found.st_mode):  # reading a pipe would block
                        yield key, found.st_size

    def _write(self, name: str, payload: bytes) -> None:
        if not self._files.is_directory(self._directory):
            self._make_directory()
        temporary = self._directory / f"{name}.tmp"
        try:
            with contextlib.suppress(FileNotFoundError):
                self._files.unlink(temporary)
            with os.fdopen(self._files.create(temporary), "wb") as file:
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            self._files.rename(temporary, self._directory / name)
        except OSError:
            with contextlib.suppress(OSError):
                self._files.unlink(temporary)
            raise
        self._files.sync_directory(self._directory)

    def _make_directory(self) -> None:
        self._directory.parent.parent.mkdir(parents=True, exist_ok=True)
        for directory in (self._directory.parent, self._directory):
            with contextlib.suppress(FileExistsError):
                self._files.make_directory(directory)

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("Cannot store unsent reports in %s: %s", self._directory, reason)


def spool_directory(store: str, job: str) -> Path:
    """Return the spool of a job: next to its checkpoints, or on the local disk if those are in an object store."""
    if "://" not in store:
        return Path(store) / job / "spool"
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "holdfast" / quote(store, safe="") / job / "spool"


def _key(name: str) -> BatchKey | None:
    if not name.endswith(SUFFIX):
        return None
    parts = name.removesuffix(SUFFIX).split(".")
    if len(parts) == 4:
        parts.insert(3, "control")
    if len(parts) != 5 or parts[3] not in get_args(Lane):
        return None
    try:
        return BatchKey(int(parts[0]), parts[1], int(parts[2]), cast("Lane", parts[3]), int(parts[4]))
    except ValueError:
        return None
