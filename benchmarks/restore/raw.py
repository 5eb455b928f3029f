"""The limits of the machine: reading a file without the page cache, and copying it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

READERS = 8
"""Parallel reads, as in a restore of Holdfast."""
READ_BYTES = 8 << 20


def forget(path: Path) -> None:
    """Drop all files below a directory from the page cache."""
    for file in [path] if path.is_file() else filter(Path.is_file, path.rglob("*")):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def touched(size_bytes: int) -> mmap.mmap:
    """Allocate memory and touch its pages."""
    memory = mmap.mmap(-1, size_bytes)
    ctypes.memset(_address(memory), 1, size_bytes)
    return memory


def read(path: Path, target: mmap.mmap) -> float:
    """Return the seconds to read an uncached file into `target`, with direct I/O if available."""
    forget(path)
    size = path.stat().st_size
    blocks, lock = iter(range(0, size, READ_BYTES)), threading.Lock()
    fd = _open(path)

    def work() -> None:
        for start in _shared(blocks, lock):
            view = memoryview(target)[start : min(start + READ_BYTES, len(target))]
            while (count := os.preadv(fd, [view], start)) < len(view) and start + count < size:
                start, view = start + count, view[count:]

    try:
        began = time.perf_counter()
        crew = [threading.Thread(target=work) for _ in range(READERS)]
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join()
        return time.perf_counter() - began
    finally:
        os.close(fd)


def copy(source: mmap.mmap, target: mmap.mmap) -> float:
    """Return the seconds to copy it on one thread."""
    began = time.perf_counter()
    ctypes.memmove(_address(target), _address(source), len(source))
    return time.perf_counter() - began


def padded(size_bytes: int) -> int:
    return -(-size_bytes // READ_BYTES) * READ_BYTES


def _shared(blocks: Iterator[int], lock: threading.Lock) -> Iterator[int]:
    while True:
        with lock:
            start = next(blocks, None)
        if start is None:
            return
        yield start


def _open(path: Path) -> int:
    with contextlib.suppress(OSError):  # the file system has no direct I/O
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    return os.open(path, os.O_RDONLY)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
