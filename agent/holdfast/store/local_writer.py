"""Durable files and names.

Bytes go in large blocks from memory directly to the device, where the file system supports it. What is created,
renamed or removed in a directory is durable once that directory is synced.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import mmap
import os
import secrets
import stat
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
PACED_BYTES = 1 << 20
"""Bytes of each write at a limited rate, so that they are spread evenly."""
SHARED_BYTES = 64 << 20
"""Smaller files are written by one thread."""
WRITERS = 2
"""Threads that write to one file: two are 9 to 23 % faster than one, and four are no faster than two."""
NOT_DIRECTLY = (errno.EINVAL, errno.EFAULT)
"""Errors by which direct I/O is refused: wrong alignment for the device, or memory that it cannot read."""


class Volume:
    """What is known of a file system from writing to it."""

    def __init__(self) -> None:
        self.direct = True
        """Whether it supports direct I/O; False once it has refused."""


def write_durably(
    files: Files,
    path: Path,
    parts: Sequence[memoryview | bytes],
    volume: Volume,
    *,
    pace: Pace | None = None,
) -> None:
    """Create a file and make its bytes durable, but not yet its name.

    After an OSError the file is unusable and must not be synced again: the kernel reports a failed write once, and
    then considers the pages clean.
    """
    with naming(path):
        fd = files.create(path)
        try:
            _DurableWrite(files, fd, parts, volume, pace).run()
            files.sync(fd)
        except BaseException:  # raise the first error, not that of closing the file
            with contextlib.suppress(OSError):
                files.close(fd)
            raise
        files.close(fd)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to an OSError of a call on an open file, which has none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


class _DurableWrite:
    """One call of `write_durably`: the blocks that are left to write, shared by its threads."""

    def __init__(
        self, files: Files, fd: int, parts: Sequence[memoryview | bytes], volume: Volume, pace: Pace | None
    ) -> None:
        self._files, self._fd, self._volume, self._pace = files, fd, volume, pace
        self._blocks = collections.deque(
            cut(parts, WRITE_BYTES if pace is None else min(WRITE_BYTES, PACED_BYTES))
        )
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
        """Write blocks until none are left; after a failure no thread begins another."""
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
        except BaseException:  # stop the other threads
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
                raise OSError(errno.EIO, "the file system accepts no more bytes and reports no error")
            data, at = data[count:], at + count
            if direct and len(data) and count % BLOCK_BYTES:
                self._go_through_cache()  # a short write within a block: the rest is not aligned

    def _go_through_cache(self) -> None:
        self._files.set_direct(self._fd, False)
        self._direct = False  # last: threads that read it write unaligned blocks

    def _write_out(self, block: Block, before: Block | None) -> None:
        """Start to write this block to the device, and drop the previous one from the page cache."""
        self._files.start_writing(self._fd, block.at, block.size_bytes)
        if before is not None:
            self._files.wait_written(self._fd, before.at, before.size_bytes)
            self._files.forget(self._fd, before.at, before.size_bytes)


@dataclass(frozen=True, slots=True)
class Block:
    """A range of a file that is written at once."""

    at: int
    views: list[memoryview]
    straight: bool
    """One page-aligned view of whole blocks, which can be written directly."""

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.views))


def cut(parts: Sequence[memoryview | bytes], block_bytes: int | None = None) -> Iterator[Block]:
    """Yield blocks in file order: straight ones where the memory allows, and the rest gathered between them."""
    block_bytes = block_bytes or WRITE_BYTES
    at, loose, loose_bytes = 0, list[memoryview](), 0
    for part in parts:
        rest = memoryview(part).cast("B")
        while len(rest):
            # devices have larger blocks than they report: writes that are all off by a page are 7 to 12 % slower
            room = block_bytes - (at + loose_bytes) % block_bytes
            whole = _straight_bytes(at + loose_bytes, rest)
            if loose and (whole or room == block_bytes):
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


def _straight_bytes(at: int, view: memoryview) -> int:
    if at % BLOCK_BYTES or view.readonly or len(view) < BLOCK_BYTES or address(view) % BLOCK_BYTES:
        return 0
    return len(view) // BLOCK_BYTES * BLOCK_BYTES


def address(view: memoryview) -> int:
    """Return the address of writable memory that is not empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def padded(size_bytes: int) -> int:
    """Round up to whole blocks."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


class Bounce:
    """Aligned memory of one thread for unaligned blocks, allocated when first needed."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def gather(self, block: Block, *, pad: bool) -> memoryview:
        """Copy the bytes of a block into one place, padded to a whole block on request."""
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
        memory.madvise(mmap.MADV_HUGEPAGE)  # otherwise page faults cost more than the copy
    return memoryview(memory)


def _copy(target: memoryview, source: memoryview) -> None:
    if source.readonly or not len(source):
        target[:] = source
    else:
        ctypes.memmove(address(target), address(source), len(source))  # which releases the interpreter lock


NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


def make_durably(files: Files, root: Path, directory: Path, *inside: str) -> None:
    """Create a directory below `root`, with missing parents and the directories `inside` it.

    Their names are synced even if they exist: the process that created them may have died before it synced them.
    """
    missing = [each for each in (directory, *directory.parents) if files.stat(each) is None]
    for each in (*reversed(missing), *(directory / name for name in inside)):
        with contextlib.suppress(FileExistsError):
            files.make_directory(each)
    for each in sorted({each.parent for each in missing} | {root.parent, root, directory}):
        # directories above the store may not be readable, and then cannot be synced
        ours = each.is_relative_to(root)
        with contextlib.nullcontext() if ours else contextlib.suppress(PermissionError):
            files.sync_directory(each)


def create_durably(files: Files, path: Path, data: bytes) -> None:
    """Create a small file atomically; FileExistsError when its name is taken."""
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
        files.link(temporary, path)  # unlike rename, does not replace
    except OSError as error:
        if (there := files.stat(path)) is not None:
            written = files.stat(temporary)
            if written is not None and os.path.samestat(there, written):
                return  # a network file system lost the response and retried
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        if error.errno not in NO_LINKS:
            raise
        files.rename(temporary, path)


def rename(files: Files, source: Path, target: Path) -> None:
    """Rename, and ignore an error where the directory shows that it succeeded."""
    try:
        files.rename(source, target)
    except OSError:
        # a network file system that loses the response to a rename retries, and finds nothing to rename
        if files.stat(source) is not None or files.stat(target) is None:
            raise


def discard(files: Files, directory: Path) -> None:
    """Remove a directory in which other processes may create files; renaming it first stops them."""
    doomed = directory.with_name(f"{directory.name}-discarded")
    try:
        rename(files, directory, doomed)
    except OSError:  # it is gone, or cannot be renamed but perhaps removed
        doomed = directory
    remove(files, doomed)


def remove(files: Files, path: Path) -> None:
    """Remove what is at a path, with its contents, as far as possible; of a link, the link itself."""
    for each, found in files.tree(path):
        with contextlib.suppress(OSError):
            (files.remove_directory if stat.S_ISDIR(found.st_mode) else files.unlink)(each)
