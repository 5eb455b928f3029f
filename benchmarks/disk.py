"""Bare reads, writes and copies, which are the limits of the machine, and the page cache."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.harness import seconds_of

READERS, READ_BYTES = 8, 8 << 20
"""Parallel reads, as in a restore of Holdfast."""


def memory(size_bytes: int, *, huge: bool = True) -> mmap.mmap:
    """Allocate page-aligned memory for direct I/O, in huge pages if available."""
    made = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        with contextlib.suppress(OSError, AttributeError):
            made.madvise(mmap.MADV_HUGEPAGE)
    return made


def touched(size_bytes: int) -> mmap.mmap:
    """Allocate memory for a file that is read in blocks, and touch its pages."""
    made = mmap.mmap(-1, -(-size_bytes // READ_BYTES) * READ_BYTES)
    ctypes.memset(_address(made), 1, len(made))
    return made


def copy(target: mmap.mmap, source: mmap.mmap) -> None:
    """Copy on one thread."""
    ctypes.memmove(_address(target), _address(source), len(source))


def files_of(path: Path) -> Iterator[Path]:
    """Yield a file, or all files below a directory."""
    return filter(Path.is_file, path.rglob("*") if path.is_dir() else [path])


def space_bytes(root: Path) -> int:
    """Return the space of all files below a directory; linked ones count once."""
    found = map(Path.stat, files_of(root))
    return sum({(each.st_dev, each.st_ino): each.st_blocks * 512 for each in found}.values())


def forget_cached(path: Path) -> None:
    """Drop a file, or all files below a directory, from the page cache, once they are on disk."""
    for each in files_of(path):
        with opened(each, os.O_RDONLY) as fd:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def fill_cache(path: Path) -> None:
    """Read a file, or all files below a directory, through the page cache."""
    buffer = bytearray(READ_BYTES)
    for each in files_of(path):
        with each.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)


def write(path: Path, data: mmap.mmap, threads: int, chunk: int, flags: int) -> None:
    """Create a file, write it by several threads, and sync it."""
    view = memoryview(data)

    def block(start: int) -> None:
        at, left = start, view[start : start + chunk]
        while left:
            count = os.pwrite(fd, left, at)
            at, left = at + count, left[count:]

    path.unlink(missing_ok=True)
    with opened(path, os.O_WRONLY | os.O_CREAT | flags) as fd:
        os.posix_fallocate(fd, 0, len(data))
        _spread(threads, block, range(0, len(data), chunk))
        os.fsync(fd)


def read(path: Path, target: mmap.mmap, threads: int, chunk: int, flags: int) -> None:
    """Read a file by several threads into memory that is as large, or a multiple of the chunk."""
    view, size = memoryview(target), path.stat().st_size

    def block(start: int) -> None:
        at, left = start, view[start : start + chunk]
        while left and at < size:
            count = os.preadv(fd, [left], at)
            at, left = at + count, left[count:]

    with opened(path, os.O_RDONLY | flags) as fd:
        _spread(threads, block, range(0, size, chunk))


def read_uncached(path: Path, target: mmap.mmap) -> float:
    """Return the seconds to read an uncached file into `target`, with direct I/O if available."""
    forget_cached(path)
    flags = os.O_DIRECT if direct_io_works(path.parent) else 0
    return seconds_of(lambda: read(path, target, READERS, READ_BYTES, flags))


def direct_io_works(folder: Path) -> bool:
    """Return whether direct I/O works in this directory."""
    path = folder / "direct-io"
    try:
        with opened(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT) as fd:
            os.pwrite(fd, memory(mmap.PAGESIZE), 0)
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def _spread(threads: int, work: Callable[[int], None], starts: range) -> None:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, starts))


def _address(made: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(made))
