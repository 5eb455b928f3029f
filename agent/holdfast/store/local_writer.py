"""Durable files and names.

Bytes go in large blocks from memory straight to the device, where the file system has that. What is made, renamed
or removed in a directory is durable once that directory is synced.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import mmap
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.format.manifest import BLOCK_BYTES
from holdfast.store.base import Pace
from holdfast.system import io_pool
from holdfast.system.files import Files

DIRECT_BYTES = 1 << 20
"""Smaller files gain nothing from direct I/O."""
WRITE_BYTES = 8 << 20
SHARED_BYTES = 64 << 20
"""Smaller files are written by one thread."""
WRITERS = 2
"""Threads that write to one file: measured, 9 to 23 % faster than one, and four are no faster than two."""
NOT_DIRECTLY = (errno.EINVAL, errno.EFAULT)
"""How direct I/O is refused: not the device's alignment, or memory that it cannot take from."""


class Volume:
    """What the store has learnt of a file system while it wrote to it."""

    def __init__(self) -> None:
        self.direct = True
        """Until it refuses."""


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

    def run(self) -> None:
        size = padded(self._size) if self._direct else self._size
        if self._large:
            self._files.reserve(self._fd, size)
        io_pool.share(self._drain, WRITERS if self._direct and self._size >= SHARED_BYTES else 1)
        if size != self._size:
            self._files.truncate(self._fd, self._size)

    def _drain(self) -> None:
        """Write blocks until there are none left, on any thread; after one that fails no other is begun."""
        bounce, before = Bounce(), None
        try:
            while True:
                try:
                    block = self._blocks.popleft()
                except IndexError:
                    return
                if self._pace is not None:
                    self._pace(block.size_bytes)
                is_whole = block.straight or (len(block.views) == 1 and not self._direct)
                self._write_all(block.views[0] if is_whole else bounce.gather(block, pad=self._direct), block.at)
                if self._large and not self._direct:
                    self._write_out(block, before)
                    before = block
        except BaseException:  # the other threads have nothing left to do; it is raised again
            self._blocks.clear()
            raise

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
        self._files.set_direct(self._fd, False)
        self._direct = False  # only now: whoever reads this writes what is not aligned

    def _write_out(self, block: Block, before: Block | None) -> None:
        """Keep dirty pages from piling up: start on this block, have the one before it out of the cache."""
        self._files.start_writing(self._fd, block.at, block.size_bytes)
        if before is not None:
            self._files.wait_written(self._fd, before.at, before.size_bytes)
            self._files.forget(self._fd, before.at, before.size_bytes)


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of a file to be written at once."""

    at: int
    views: list[memoryview]
    straight: bool
    """One view of whole pages for whole blocks: it can go to the device as it is."""

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.views))


def cut(parts: Sequence[memoryview | bytes]) -> Iterator[Block]:
    """Blocks in the order of the file: straight where the memory allows, what lies between put together."""
    at, loose, loose_bytes = 0, list[memoryview](), 0
    for part in parts:
        rest = memoryview(part).cast("B")
        while len(rest):
            room = _room(at + loose_bytes)
            whole = _straight_bytes(at + loose_bytes, rest)
            if loose and (whole or room == WRITE_BYTES):
                yield Block(at, loose, straight=False)
                at, loose, loose_bytes = at + loose_bytes, [], 0
            taken = rest[: min(whole or len(rest), room)]
            if whole:
                yield Block(at, [taken], straight=True)
                at += len(taken)
            else:
                loose.append(taken)
                loose_bytes += len(taken)
            rest = rest[len(taken) :]
    if loose:
        yield Block(at, loose, straight=False)


def _room(at: int) -> int:
    """Up to where the block that holds `at` ends: at a multiple of its size. Devices keep larger blocks than they
    admit to: measured, writes that are all off by a page are 7 to 12 % slower."""
    return WRITE_BYTES - at % WRITE_BYTES


def _straight_bytes(at: int, view: memoryview) -> int:
    if at % BLOCK_BYTES or view.readonly or len(view) < BLOCK_BYTES or address(view) % BLOCK_BYTES:
        return 0
    return len(view) // BLOCK_BYTES * BLOCK_BYTES


def address(view: memoryview) -> int:
    """Of writable memory that is not empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def padded(size_bytes: int) -> int:
    """Up to the next whole block."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


class Bounce:
    """Pages for what does not lie in pages of its own; one thread's, and allocated when first needed."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def gather(self, block: Block, *, pad: bool) -> memoryview:
        """A block's bytes in one place; with whatever up to the next whole block if asked for."""
        size = block.size_bytes
        whole = padded(size)
        if len(self._memory) < whole:
            self._memory = _pages(whole)
        at = 0
        for view in block.views:
            _copy(self._memory[at : at + len(view)], view)
            at += len(view)
        return self._memory[: whole if pad else size]


def _pages(size_bytes: int) -> memoryview:
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # else touching them for the first time costs more than the copy
    return memoryview(memory)


def _copy(target: memoryview, source: memoryview) -> None:
    if source.readonly or not len(source):
        target[:] = source
    else:
        ctypes.memmove(address(target), address(source), len(source))  # which lets go of the interpreter lock


NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


def make_durably(files: Files, root: Path, directory: Path, *inside: str) -> None:
    """Make a directory below `root`, those above it that are missing, and those to be inside it.

    Their names are synced even if they were there: whoever made them may have died before that.
    """
    missing = [each for each in (directory, *directory.parents) if not each.is_dir()]
    for each in (*reversed(missing), *(directory / name for name in inside)):
        with contextlib.suppress(FileExistsError):
            files.make_directory(each)
    for each in sorted({each.parent for each in missing} | {root.parent, root, directory}):
        # above the store there may be directories that cannot be opened, and so cannot be synced
        ours = each.is_relative_to(root)
        with contextlib.nullcontext() if ours else contextlib.suppress(PermissionError):
            files.sync_directory(each)


def create_durably(files: Files, path: Path, data: bytes) -> None:
    """Create a small file that is there whole or not at all; FileExistsError when its name is taken."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        write_durably(files, temporary, [data], Volume())
        _publish(files, temporary, path)
    finally:
        with contextlib.suppress(OSError):
            files.unlink(temporary)
    files.sync_directory(path.parent)


def _publish(files: Files, temporary: Path, path: Path) -> None:
    try:
        files.link(temporary, path)  # unlike rename, refuses to replace
    except OSError as error:
        if path.exists():
            if path.samefile(temporary):
                return  # a network file system had done it, lost the answer and tried again
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        if error.errno not in NO_LINKS:
            raise
        files.rename(temporary, path)


def rename(files: Files, source: Path, target: Path) -> None:
    """Rename, taking the word of the directory rather than that of an error."""
    try:
        files.rename(source, target)
    except OSError:
        # a network file system that loses the answer to a rename tries again, and finds nothing to rename
        if os.path.lexists(source) or not os.path.lexists(target):
            raise


def discard(files: Files, directory: Path) -> None:
    """Remove a directory in which other processes may still be making files: they do not find it any more."""
    doomed = directory.with_name(f"{directory.name}-discarded")
    try:
        rename(files, directory, doomed)
    except OSError:  # it is gone, or cannot be renamed and perhaps removed
        doomed = directory
    remove(files, doomed)


def remove(files: Files, directory: Path) -> None:
    """Remove a directory with what is in it, as far as that can be done."""
    for place, _, names in os.walk(directory, topdown=False):
        for name in names:
            with contextlib.suppress(OSError):
                files.unlink(Path(place, name))
        with contextlib.suppress(OSError):
            files.remove_directory(Path(place))
