"""Read a file of a checkpoint from the page cache if it is cached, otherwise with direct I/O."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from holdfast.errors import DamagedCheckpoint
from holdfast.format.manifest import BLOCK_BYTES
from holdfast.store.base import FileReader
from holdfast.store.local_writer import NOT_DIRECTLY, address, naming
from holdfast.system.files import Files, is_cached

DIRECT_BYTES = 256 << 10
"""Smaller reads gain nothing from direct I/O."""
DAMAGE = {
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.ELOOP,
    errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EBADMSG, errno.EUCLEAN,
}  # fmt: skip
"""Errors of the file itself: it is gone or a link, or its device cannot read it. Other errors concern this process
or the connection to the device, and do not mean that the checkpoint is damaged."""


class LocalReader(FileReader):
    """Reads a file.

    Large uncached reads bypass the page cache, so that bytes that are read once take no memory from training. With
    `from_disk` none come from the cache.
    """

    def __init__(self, files: Files, path: Path, *, from_disk: bool = False) -> None:
        self._files, self._path, self._from_disk = files, path, from_disk
        self.seeks_freely = not from_disk
        with self._damage(), contextlib.ExitStack() as opened:
            self._fd = files.open(path)
            opened.callback(files.close, self._fd)
            self.size_bytes = os.fstat(self._fd).st_size
            self._direct = self._open_direct(opened) if self.size_bytes >= DIRECT_BYTES else None
            if from_disk:
                files.forget(self._fd)
            self._opened = opened.pop_all()

    def read_into(self, start: int, target: memoryview) -> None:
        with self._damage():
            done = 0
            if self._direct is not None and len(target) >= DIRECT_BYTES:
                done = self._read_directly(self._direct, start, target)
            self._read(start + done, target[done:])

    def close(self) -> None:
        self._opened.close()

    @contextlib.contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            with naming(self._path):
                yield
        except OSError as error:
            if error.errno not in DAMAGE:
                raise
            raise DamagedCheckpoint(str(self._path), error.strerror or str(error)) from error

    def _open_direct(self, opened: contextlib.ExitStack) -> int | None:
        fd = self._files.open(self._path)
        opened.callback(self._files.close, fd)
        return fd if self._files.set_direct(fd, True) else None

    def _read(self, start: int, target: memoryview) -> None:
        while len(target):
            count = self._files.read(self._fd, target, start)
            if not count:
                raise DamagedCheckpoint(str(self._path), f"ends at byte {start:,}")
            start, target = start + count, target[count:]

    def _read_directly(self, fd: int, start: int, target: memoryview) -> int:
        """Read up to the last whole block where the memory is aligned, and return the number of bytes read."""
        before = -start % BLOCK_BYTES
        whole = (len(target) - before) // BLOCK_BYTES * BLOCK_BYTES
        cached = not self._from_disk and is_cached(self._fd, start, len(target))
        if cached or address(target[before:]) % BLOCK_BYTES:
            return 0
        self._read(start, target[:before])
        at, end = before, before + whole
        while at < end and (count := self._read_some_directly(fd, start + at, target[at:end])):
            at += count
        return at

    def _read_some_directly(self, fd: int, start: int, target: memoryview) -> int:
        try:
            return self._files.read(fd, target, start)
        except OSError as error:
            if error.errno not in NOT_DIRECTLY:
                raise
            self._direct = None
            return 0
