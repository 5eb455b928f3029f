"""Batches on disk, for when no server takes them: bounded, durable, in order, found again by the next attempt."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args
from urllib.parse import quote

from holdfast.protocol.messages import Lane

log = logging.getLogger("holdfast")

LIMIT_BYTES = 64 * 1024 * 1024
SUFFIX = ".batch"
ASIDE_SUFFIX = ".refused"
ASIDE_FILES = 20


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """A batch's name for ever; in the order in which batches are to be sent."""

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
    """A directory with one file for each batch, the bytes that will be posted. Never raises on a failing disk."""

    def __init__(self, directory: Path, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._warned = False
        self._used_bytes = sum(size for _, size in self._files())

    def write(self, key: Key, payload: bytes) -> bool:
        """Make the batch durable. False: there is no room, or the disk does not take it."""
        if self._used_bytes + len(payload) > self._limit_bytes:
            self._used_bytes = sum(size for _, size in self._files())  # others of this job may have sent some
        if self._used_bytes + len(payload) > self._limit_bytes:
            self._warn(f"{self._limit_bytes >> 20} MiB of unsent reports are stored already")
            return False
        try:
            self._write(key.filename, payload)
        except OSError as error:
            self._warn(str(error))
            return False
        self._used_bytes += len(payload)
        return True

    def read(self, key: Key) -> bytes | None:
        """None when it is gone: another process of this job has sent it."""
        try:
            return (self._directory / key.filename).read_bytes()
        except OSError:
            return None

    def remove(self, key: Key) -> None:
        path = self._directory / key.filename
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            path.unlink()
            self._used_bytes -= size

    def set_aside(self, key: Key, payload: bytes) -> None:
        """Keep a refused batch for whoever wants to know why, the last few of them."""
        path = self._directory / key.filename
        with contextlib.suppress(OSError):
            self._directory.mkdir(parents=True, exist_ok=True)
            aside = path.with_suffix(ASIDE_SUFFIX)
            aside.write_bytes(payload)
            self.remove(key)
            for old in sorted(self._directory.glob(f"*{ASIDE_SUFFIX}"))[:-ASIDE_FILES]:
                old.unlink()

    def left_by_others(self, uid: str, rank: int) -> list[Key]:
        """Batches of earlier attempts, oldest first. Rank 0 sends those of all ranks: there may be fewer now."""
        if rank != 0:
            return []
        # Half-written by attempts that were killed. One that still lives finds its write failed and repeats it.
        for torn in self._directory.glob(f"*{SUFFIX}.tmp"):
            if f".{uid}." not in torn.name:
                with contextlib.suppress(OSError):
                    torn.unlink()
        return sorted(key for key, _ in self._files() if key.uid != uid)

    def _files(self) -> Iterator[tuple[Key, int]]:
        try:
            entries = list(os.scandir(self._directory))
        except OSError:
            return
        for entry in entries:
            key = _key(entry.name)
            if key is not None:
                with contextlib.suppress(OSError):
                    if entry.is_file():  # to read a pipe would wait for its writer
                        yield key, entry.stat().st_size

    def _write(self, name: str, payload: bytes) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        temporary = self._directory / f"{name}.tmp"
        try:
            with temporary.open("wb") as file:
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self._directory / name)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        directory = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("Reports for the server cannot be kept in %s: %s", self._directory, reason)


def spool_of(store: str, job: str) -> Path:
    """Beside the checkpoints; for an object store, which takes no appended reports, on this machine's disk."""
    if "://" not in store:
        return Path(store) / job / "spool"
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "holdfast" / quote(store, safe="") / job / "spool"


def _key(name: str) -> Key | None:
    if not name.endswith(SUFFIX):
        return None
    parts = name.removesuffix(SUFFIX).split(".")
    if len(parts) == 4:
        parts.insert(3, "control")
    if len(parts) != 5 or parts[3] not in get_args(Lane):
        return None
    try:
        return Key(int(parts[0]), parts[1], int(parts[2]), cast("Lane", parts[3]), int(parts[4]))
    except ValueError:
        return None
