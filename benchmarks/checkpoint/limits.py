"""The limits of this machine: bare writes, reads and copies of the same number of bytes."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MIB = 1 << 20
WRITERS = (1, 2, 4)
CHUNKS_BYTES = (4 * MIB, 16 * MIB)
READING = (
    ("read_cold", 1, False),
    ("read_cold", 4, False),
    ("read_cold", 4, True),
    ("read_buffered", 1, False),
    ("read_warm", 1, False),
    ("read_warm", 4, False),
)
"""Read without the page cache, with a cold or a warm one; by so many threads; into huge pages."""


class MachineLimits:
    """The calls of a worker. Each way to do the same is measured, as `what way`."""

    def start(self, size_bytes: int, folder: Path, device: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._device = device
        self._file = folder / "bytes"
        self._size = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory, self._copy = _memory(self._size), _memory(self._size)
        _fill(self._memory)
        _fill(self._copy)
        self._pool = ThreadPoolExecutor(max(WRITERS))

    def measure(self) -> dict[str, list[float]]:
        figures = {"memcpy": [_seconds(self._memcpy) for _ in range(3)]}
        for flags, what, writers in ((os.O_DIRECT, "write_direct", WRITERS), (0, "write_buffered", WRITERS[:2])):
            for count, chunk in itertools.product(writers, CHUNKS_BYTES):
                if (seconds := self._write(count, chunk, flags)) is not None:
                    figures[f"{what} {count} x {chunk // MIB} MiB"] = [seconds]
        if self._device == "cuda":
            figures["device_copy"] = [self._device_copy()]
        # into unused memory, as in a new process: only reading touches it
        fresh = [_memory(self._size, huge=huge) for _, _, huge in READING]
        for memory, (how, count, huge) in zip(fresh, READING, strict=True):
            # written anew each time, like a checkpoint: devices cache what was read before
            self._write(WRITERS[1], CHUNKS_BYTES[1], os.O_DIRECT) or self._write(1, CHUNKS_BYTES[1], 0)
            (fill_cache if how == "read_warm" else forget_cached)(self._file)
            flags = os.O_DIRECT if how == "read_cold" else 0
            if (seconds := self._read(memory, count, flags)) is not None:
                figures[f"{how} {count}{', huge pages' if huge else ''}"] = [seconds]
        self._file.unlink()
        return figures

    def rest(self) -> None: ...

    def close(self) -> None:
        self._pool.shutdown()

    def _memcpy(self) -> None:
        ctypes.memmove(_address(self._copy), _address(self._memory), self._size)

    def _device_copy(self) -> float:
        """Time a copy from the GPU to pinned memory, 1 GB at a time to need little memory."""
        import torch

        piece = min(self._size, 10**9)
        there = torch.empty(piece, dtype=torch.uint8, device="cuda")
        here = torch.empty(piece, dtype=torch.uint8, pin_memory=True)

        def copy() -> None:
            here.copy_(there, non_blocking=True)
            torch.cuda.synchronize()

        copy()
        return min(_seconds(copy) for _ in range(3)) * self._size / piece

    def _write(self, writers: int, chunk: int, flags: int) -> float | None:
        """Return seconds from creating the file to the end of its fsync; `None` without direct I/O."""
        self._file.unlink(missing_ok=True)
        return _seconds_if_it_works(lambda: self._write_once(writers, chunk, flags))

    def _write_once(self, writers: int, chunk: int, flags: int) -> None:
        view = memoryview(self._memory)
        with _opened(self._file, os.O_WRONLY | os.O_CREAT | flags) as fd:
            os.posix_fallocate(fd, 0, self._size)
            self._spread(writers, chunk, lambda start, end: _pwrite_all(fd, view[start:end], start))
            os.fsync(fd)

    def _read(self, memory: mmap.mmap, readers: int, flags: int) -> float | None:
        return _seconds_if_it_works(lambda: self._read_once(memory, readers, flags))

    def _read_once(self, memory: mmap.mmap, readers: int, flags: int) -> None:
        view = memoryview(memory)
        with _opened(self._file, os.O_RDONLY | flags) as fd:
            self._spread(readers, max(CHUNKS_BYTES), lambda start, end: _pread_all(fd, view[start:end], start))

    def _spread(self, threads: int, chunk: int, work: Callable[[int, int], None]) -> None:
        """Run `work` on all chunks with several threads, interleaved."""

        def share(first: int) -> None:
            for start in range(first * chunk, self._size, threads * chunk):
                work(start, min(start + chunk, self._size))

        list(self._pool.map(share, range(threads)))


def forget_cached(path: Path) -> None:
    """Drop a file, or all files below a directory, from the page cache; they must be on disk."""
    for each in path.rglob("*") if path.is_dir() else [path]:
        if each.is_file():
            with _opened(each, os.O_RDONLY) as fd:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def fill_cache(path: Path) -> None:
    """Read a file, or all files below a directory, through the page cache."""
    for each in path.rglob("*") if path.is_dir() else [path]:
        if each.is_file():
            with each.open("rb") as file:
                while file.read(CHUNKS_BYTES[1]):
                    pass


def direct_io_works(folder: Path) -> bool:
    """Return whether direct I/O works in this directory."""
    path = folder / "direct-io"
    try:
        with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT) as fd:
            os.pwrite(fd, _memory(mmap.PAGESIZE), 0)
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _seconds_if_it_works(work: Callable[[], object]) -> float | None:
    try:
        return _seconds(work)
    except OSError:
        return None


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)


def _memory(size_bytes: int, *, huge: bool = True) -> mmap.mmap:
    """Allocate page-aligned memory for direct I/O, in huge pages if available."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge:
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _fill(memory: mmap.mmap) -> None:
    block = os.urandom(MIB)  # a disk may be faster with zeros
    for start in range(0, len(memory), MIB):
        end = min(start + MIB, len(memory))
        memory[start:end] = block[: end - start]


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _pwrite_all(fd: int, data: memoryview, at: int) -> None:
    while len(data):
        count = os.pwrite(fd, data, at)
        data, at = data[count:], at + count


def _pread_all(fd: int, into: memoryview, at: int) -> None:
    while len(into):
        count = os.preadv(fd, [into], at)
        if not count:
            raise EOFError(f"the file ends at {at}")
        into, at = into[count:], at + count
