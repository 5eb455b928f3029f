"""System calls that Python has no name for. Elsewhere than on Linux they do nothing: all of them only help."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from typing import Any

ON_LINUX = sys.platform == "linux"
START_WRITING = 2
WAIT_WRITTEN = 1 | 2 | 4

_libc = ctypes.CDLL(None, use_errno=True)
if ON_LINUX:
    _offset = ctypes.c_int64
    _libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, _offset, _offset]
    _libc.sync_file_range.argtypes = [ctypes.c_int, _offset, _offset, ctypes.c_uint]
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, _offset]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]

_MAP_FAILED = ctypes.c_void_p(-1).value


def allocate(fd: int, size_bytes: int) -> None:
    """Reserve a file's blocks. OSError when there is no room, or where the file system cannot reserve.

    Not `os.posix_fallocate`: where the file system cannot reserve, that writes a byte to every block instead,
    which over NFS takes longer than the checkpoint.
    """
    if ON_LINUX:
        _checked(_libc.fallocate(fd, 0, 0, size_bytes))


def start_writing(fd: int, start: int, size_bytes: int) -> None:
    """Have dirty pages written to the device from now on."""
    if ON_LINUX:
        _checked(_libc.sync_file_range(fd, start, size_bytes, START_WRITING))


def wait_written(fd: int, start: int, size_bytes: int) -> None:
    """Wait for that. No promise of durability, but an error that it reports is not reported again by fsync."""
    if ON_LINUX:
        _checked(_libc.sync_file_range(fd, start, size_bytes, WAIT_WRITTEN))


def forget(fd: int, start: int, size_bytes: int) -> None:
    """Drop clean pages from the page cache."""
    if ON_LINUX:
        os.posix_fadvise(fd, start, size_bytes, os.POSIX_FADV_DONTNEED)


def is_cached(fd: int, start: int, size_bytes: int) -> bool:
    """Whether most of a stretch of a file is in the page cache; True where that cannot be known.

    A read with RWF_NOWAIT would tell as well, but starts reading ahead into the page cache: measured, direct
    reads behind such probes take twice as long.
    """
    first = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    length = start + size_bytes - first
    pages = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
    if not ON_LINUX or (at := _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, first)) == _MAP_FAILED:
        return True
    try:
        known = _libc.mincore(at, length, pages) == 0
    finally:
        _libc.munmap(at, length)
    return not known or pages.raw.count(0) * 2 < len(pages)


def _checked(result: Any) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
