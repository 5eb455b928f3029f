"""CPU time and memory of a process and its descendants, from /proc."""

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
    """Return the process and its live descendants."""
    found, at = [pid], 0
    while at < len(found):
        for task in _read(f"/proc/{found[at]}/task", listing=True).split():
            found += map(int, _read(f"/proc/{found[at]}/task/{task}/children").split())
        at += 1
    return found


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of the family, including children that ended."""
    return sum(_cpu_ticks(each) for each in family(pid)) / TICKS_A_SECOND


def memory_bytes(pid: int) -> int:
    """Return the memory of the family: private pages and its share of shared memory, without mapped files."""
    total = 0
    for each in family(pid):
        for line in _read(f"/proc/{each}/smaps_rollup").splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                total += int(line.split()[1]) * 1024
    return total


def give_memory_back() -> None:
    """Return unused memory of the allocator to the system, as at the start of a process."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


class PeakMemory:
    """Peak memory of a family, sampled while the `with` block runs."""

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
    return sum(map(int, fields[11:15]))  # user and system time of the process and of its ended children


def _read(path: str, *, listing: bool = False) -> str:
    try:
        return " ".join(os.listdir(path)) if listing else Path(path).read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return ""
