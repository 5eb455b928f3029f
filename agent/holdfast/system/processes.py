"""The processes under a supervisor, and the signals that it gets: no process may outlive the start that it is of.

A trainer's own process group is not all of it: torchrun starts each rank in a session of its own. On Linux
whatever loses its parent is handed to the supervisor, which so finds all of them below itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from holdfast.system.io_pool import lower_cpu_priority

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
RESCUE = "holdfast.supervisor.crash_commit"
HELPERS = (b"holdfast.persist.helper_main", RESCUE.encode())
"""Finish the checkpoint that they have in hand and end by themselves; a newer attempt fences them like a
trainer."""
GONE_SECONDS = 10.0
"""SIGKILL takes longer only for a process within a system call that does not end."""
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Passed on, and no new start after them."""
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
"""For the trainer alone: Slurm, for one, announces a preemption by SIGUSR1."""


MEANT_FOR_THE_TRAINER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that a terminal, systemd or a scheduler sends to every process of a job."""
OUT_OF_MEMORY_SCORE = 500
"""Of 1,000: where memory runs out, a helper dies and costs one checkpoint, before a trainer does."""


def become_background_process() -> None:
    """Ignore what is meant for the trainer, lower the CPU priority and raise the OOM score of this process."""
    for number in MEANT_FOR_THE_TRAINER:
        signal.signal(number, signal.SIG_IGN)
    lower_cpu_priority()
    raise_oom_score()


def raise_oom_score() -> None:
    """Let the kernel take this process before others when memory runs out."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OUT_OF_MEMORY_SCORE))


def adopt_orphans() -> None:
    """Become the parent of all processes below this one that lose theirs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Runs in the child: a supervisor that is itself killed must not leave a trainer that nobody watches."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def blocked(*signals: signal.Signals) -> Iterator[None]:
    """Block signals in this thread and in the processes that it starts, which inherit the mask: one that ignores
    them must not be killed before it has come so far."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(slots=True)
class Signals:
    """The signals that came in, and a socket that wakes the loop when one does."""

    wake: socket.socket
    waker: socket.socket
    stops: list[tuple[int, float]] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)
    """For the trainer, whatever it makes of them."""

    def handle(self, signum: int, frame: FrameType | None) -> None:
        if signum in STOPS:
            self.stops.append((signum, time.monotonic()))
        elif signum in PASSED_ON:
            self.messages.append(signum)

    def rouse(self) -> None:
        """Wake the loop from another thread."""
        with contextlib.suppress(BlockingIOError):
            self.waker.send(b"\0")

    def sleep(self, seconds: float | None) -> None:
        """Until a signal comes, or the time is up."""
        if select.select([self.wake], [], [], seconds)[0]:
            with contextlib.suppress(BlockingIOError):
                self.wake.recv(4096)


@contextlib.contextmanager
def caught_signals() -> Iterator[Signals]:
    wake, waker = socket.socketpair()
    with wake, waker:
        wake.setblocking(False)
        waker.setblocking(False)
        signals = Signals(wake, waker)
        # what was ignored from the start stays so: nohup ignores SIGHUP, and its caller means it
        caught = [each for each in (*STOPS, *PASSED_ON) if signal.getsignal(each) is not signal.SIG_IGN]
        before = {signum: signal.signal(signum, signals.handle) for signum in (*caught, signal.SIGCHLD)}
        before_fd = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        try:
            yield signals
        finally:
            signal.set_wakeup_fd(before_fd)
            for signum, handler in before.items():
                signal.signal(signum, handler)


def started_at(pid: int) -> float | None:
    """Return when a process started, in seconds since the epoch, or None where that is not known.

    It may be up to a second too early: the kernel gives the time of the boot in whole seconds.
    """
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        booted_at = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    except (OSError, StopIteration):
        return None
    return int(booted_at.split()[1]) + int(after_name[19]) / os.sysconf("SC_CLK_TCK")


def has_ended(pid: int) -> bool:
    """Of a child that is not reaped yet."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def reap_orphans(trainer: int) -> None:
    """Let go of the dead that were handed to this process; the trainer's own end is for whoever waits for it."""
    with contextlib.suppress(ChildProcessError):
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid == trainer:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def kill_group(group: int) -> None:
    # EPERM: macOS says so of a group in which only the dead leader is left.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def kill_below(trainer: int, spared: Collection[int] = ()) -> list[int]:
    """Kill a trainer's group and all else below this process, but for helpers and `spared`; which are still there.

    The trainer must not be reaped yet, so that its group's number cannot have gone to others.
    """
    kill_group(trainer)
    deadline = time.monotonic() + GONE_SECONDS
    while left := [pid for pid in below(os.getpid()) if pid not in spared and not _is_helper(pid)]:
        for pid in left:  # each time anew: one that was being started meanwhile is below this process as well
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        reap_orphans(trainer)
        if time.monotonic() > deadline:
            break
        time.sleep(0.005)
    return left


def below(ancestor: int) -> list[int]:
    """All that live below a process, however deep; nothing where there is no /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.name))
    found, ahead = [], [ancestor]
    while ahead:
        ahead.extend(below := children.get(ahead.pop(), []))
        found.extend(below)
    return found


def _is_helper(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(helper in words for helper in HELPERS)


def helpers() -> list[int]:
    """Those below this process that have a checkpoint in hand, or did just now."""
    return [pid for pid in below(os.getpid()) if _is_helper(pid)]
