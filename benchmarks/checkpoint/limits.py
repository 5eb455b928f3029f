"""The limits of this machine: bare writes, reads and copies of the same number of bytes."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from collections.abc import Callable
from pathlib import Path

from benchmarks import disk
from benchmarks.harness import seconds_of

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
        self._device, self._file = device, folder / "bytes"
        self._size = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory, self._copy = disk.memory(self._size), disk.memory(self._size)
        block = os.urandom(MIB)  # a disk may be faster with zeros
        for start in range(0, self._size, MIB):
            part = slice(start, min(start + MIB, self._size))
            self._memory[part] = self._copy[part] = block[: part.stop - start]

    def measure(self) -> dict[str, list[float]]:
        figures = {"memcpy": [seconds_of(lambda: disk.copy(self._copy, self._memory)) for _ in range(3)]}
        for flags, what, writers in ((os.O_DIRECT, "write_direct", WRITERS), (0, "write_buffered", WRITERS[:2])):
            for count, chunk in itertools.product(writers, CHUNKS_BYTES):
                if (seconds := self._write(count, chunk, flags)) is not None:
                    figures[f"{what} {count} x {chunk // MIB} MiB"] = [seconds]
        if self._device == "cuda":
            figures["device_copy"] = [self._device_copy()]
        # into unused memory, as in a new process: only reading touches it
        fresh = [disk.memory(self._size, huge=huge) for _, _, huge in READING]
        for memory, (how, count, huge) in zip(fresh, READING, strict=True):
            # written anew each time, like a checkpoint: devices cache what was read before
            self._write(WRITERS[1], CHUNKS_BYTES[1], os.O_DIRECT) or self._write(1, CHUNKS_BYTES[1], 0)
            (disk.fill_cache if how == "read_warm" else disk.forget_cached)(self._file)
            flags = os.O_DIRECT if how == "read_cold" else 0
            read = (self._file, memory, count, CHUNKS_BYTES[1], flags)
            if (seconds := _seconds_if_it_works(lambda: disk.read(*read))) is not None:  # noqa: B023
                figures[f"{how} {count}{', huge pages' if huge else ''}"] = [seconds]
        self._file.unlink()
        return figures

    def close(self) -> None: ...

    def _device_copy(self) -> float:
        """Time a copy from the GPU to pinned memory, 1 GB at a time to need little memory."""
        from .training import pinned_copy_seconds

        piece = min(self._size, 10**9)
        return min(pinned_copy_seconds(piece, "cuda")) * self._size / piece

    def _write(self, writers: int, chunk: int, flags: int) -> float | None:
        """Return seconds from creating the file to the end of its fsync; `None` without direct I/O."""
        return _seconds_if_it_works(lambda: disk.write(self._file, self._memory, writers, chunk, flags))


def _seconds_if_it_works(work: Callable[[], object]) -> float | None:
    with contextlib.suppress(OSError):
        return seconds_of(work)
    return None
