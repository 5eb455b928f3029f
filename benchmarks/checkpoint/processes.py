"""What a process and all its descendants use, read from /proc."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    """The process and its descendants, as far as they live."""
    found, at = [pid], 0
    while at < len(found):
        for task in _read(f"/proc/{found[at]}/task", listing=True).split():
            found += map(int, _read(f"/proc/{found[at]}/task/{task}/children").split())
        at += 1
    return found


def cpu_seconds(pid: int) -> float:
    """Of the family, with the children it has buried."""
    return sum(_cpu_ticks(each) for each in family(pid)) / TICKS_A_SECOND


def memory_bytes(pid: int) -> int:
    """Of the family: its own pages and its part of shared memory, without mapped files such as libraries."""
    total = 0
    for each in family(pid):
        for line in _read(f"/proc/{each}/smaps_rollup").splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                total += int(line.split()[1]) * 1024
    return total


def give_memory_back() -> None:
    """What this process's allocator keeps for reuse: what comes next meets memory as at a process's start."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


class Peak:
    """The most memory that a family held at once, sampled while the `with` block runs."""

    def __init__(self, pid: int, every_seconds: float = 0.01) -> None:
        self.bytes = 0
        self._pid, self._every_seconds = pid, every_seconds
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._enough.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            self.bytes = max(self.bytes, memory_bytes(self._pid))
            if self._enough.wait(self._every_seconds):
                return


def _cpu_ticks(pid: int) -> int:
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:15]))  # its own time and that of its buried children, in user and in system


def _read(path: str, *, listing: bool = False) -> str:
    try:
        return " ".join(os.listdir(path)) if listing else Path(path).read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has ended since
        return ""
