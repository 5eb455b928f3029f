"""When a process started and whether it lives, and a process that ends with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Make the kernel send this signal when the thread that started this process ends. Linux only."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def started_at(pid: int) -> float | None:
    """Return when a process started, in seconds since the epoch, or `None` if that is not known.

    It may be up to a second too early: the kernel reports the boot time in whole seconds.
    """
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        booted_at = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    except (OSError, StopIteration):
        return None
    return int(booted_at.split()[1]) + int(after_name[19]) / os.sysconf("SC_CLK_TCK")


def has_run_since(pid: int, moment: float) -> bool:
    """Return whether a process runs that started before a moment; `False` where that cannot be determined."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    started = started_at(pid)
    return state not in "ZX" and started is not None and started <= moment


def has_ended(pid: int) -> bool:
    """Return whether a child has ended, without reaping it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
