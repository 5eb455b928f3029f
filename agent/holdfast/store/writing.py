"""Writing a file durably: in large blocks, from memory straight to the device where the file system has that."""

from __future__ import annotations

import collections
import contextlib
import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.format import BLOCK_BYTES
from holdfast.store.base import Pace
from holdfast.store.blocks import Block, Bounce, cut, padded
from holdfast.store.crew import Crew, share
from holdfast.store.files import Files

DIRECT_BYTES = 1 << 20
"""Smaller files gain nothing from direct I/O."""
SHARED_BYTES = 64 << 20
"""Smaller files are written by one thread."""
NOT_DIRECTLY = (errno.EINVAL, errno.EFAULT)
"""How direct I/O is refused: not the device's alignment, or memory that it cannot take from."""


class Volume:
    """What the store has learnt of a file system while it wrote to it."""

    def __init__(self) -> None:
        self.direct = True
        """Until it refuses."""
        self.crew = Crew()


def write_durably(
    files: Files,
    path: Path,
    parts: Sequence[memoryview | bytes],
    volume: Volume,
    *,
    pace: Pace | None = None,
) -> None:
    """Create a file of these bytes; when it returns they are on the device, though perhaps not yet its name.

    After an OSError the file is of no use and must not be synced again: the kernel reports once that it could
    not write, and then holds the pages to be clean.
    """
    with naming(path):
        fd = files.create(path)
        try:
            _Writing(files, fd, parts, volume, pace).run()
            files.sync(fd)
        except BaseException:  # the first error is the one to tell, not that of closing after it
            with contextlib.suppress(OSError):
                files.close(fd)
            raise
        files.close(fd)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to an OSError that has none: those of calls on open files."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


class _Writing:
    """One file's bytes on their way."""

    def __init__(
        self, files: Files, fd: int, parts: Sequence[memoryview | bytes], volume: Volume, pace: Pace | None
    ) -> None:
        self._files, self._fd, self._volume, self._pace = files, fd, volume, pace
        self._blocks = collections.deque(cut(parts))
        self._size = sum(block.size_bytes for block in self._blocks)
        self._large = self._size >= DIRECT_BYTES
        self._direct = self._large and volume.direct and files.set_direct(fd, True)
        self._seconds: list[float] = []

    def run(self) -> None:
        size = padded(self._size) if self._direct else self._size
        if self._large:
            self._files.reserve(self._fd, size)
        if self._direct and self._size >= SHARED_BYTES:
            self._run_shared(self._volume.crew)
        else:
            self._drain()
        if size != self._size:
            self._files.truncate(self._fd, self._size)

    def _run_shared(self, crew: Crew) -> None:
        count = crew.choose()
        share(self._drain, count)
        if self._direct:
            # seconds inside the calls, so that holding back for the sake of training is not held against them
            crew.judge(count, self._size * count / sum(self._seconds))

    def _drain(self) -> None:
        """Write blocks until there are none left, on any thread; after one that fails no other is begun."""
        bounce, before = Bounce(), None
        try:
            while (block := self._next()) is not None:
                if self._pace is not None:
                    self._pace(block.size_bytes)
                self._write(block, bounce)
                if self._large and not self._direct:
                    self._write_out(block, before)
                    before = block
        except BaseException:  # the other threads have nothing left to do; it is raised again
            self._blocks.clear()
            raise

    def _next(self) -> Block | None:
        try:
            return self._blocks.popleft()
        except IndexError:
            return None

    def _write(self, block: Block, bounce: Bounce) -> None:
        if block.straight or (len(block.views) == 1 and not self._direct):
            data = block.views[0]
        else:
            data = bounce.gather(block, pad=self._direct)
        started = self._files.clock()
        self._write_all(data, block.at)
        self._seconds.append(self._files.clock() - started)

    def _write_all(self, data: memoryview, at: int) -> None:
        while len(data):
            direct = self._direct
            try:
                count = self._files.write(self._fd, data, at)
            except OSError as error:
                if not direct or error.errno not in NOT_DIRECTLY:
                    raise
                self._volume.direct = False
                self._go_through_cache()
                continue
            if not count:
                raise OSError(errno.EIO, "the file system takes no more bytes and does not say why")
            data, at = data[count:], at + count
            if direct and len(data) and count % BLOCK_BYTES:
                self._go_through_cache()  # cut short within a block: the rest is not aligned any more

    def _go_through_cache(self) -> None:
        self._direct = False
        self._files.set_direct(self._fd, False)

    def _write_out(self, block: Block, before: Block | None) -> None:
        """Keep dirty pages from piling up: start on this block, have the one before it out of the cache."""
        self._files.start_writing(self._fd, block.at, block.size_bytes)
        if before is not None:
            self._files.wait_written(self._fd, before.at, before.size_bytes)
            self._files.forget(self._fd, before.at, before.size_bytes)
