"""Processes and signals of a supervisor: no process of a trainer may outlive its start.

A process group does not cover them all: torchrun starts each rank in a separate session. On Linux the supervisor
is a child subreaper, so that all of them stay its descendants.
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

_PR_SET_CHILD_SUBREAPER = 36
KILL_TIMEOUT_SECONDS = 10.0
"""How long to wait for killed processes; one in an uninterruptible system call may stay."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end the trainer; a terminal, systemd or a scheduler sends them to every process of a job."""
FORWARDED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
"""Signals that only the trainer handles; Slurm, for example, announces a preemption by SIGUSR1."""
HELPER_OOM_SCORE = 500
"""Of 1,000. If memory runs out, the kernel kills a helper, which costs one checkpoint, before a trainer."""


def become_background_process() -> None:
    """Ignore stop signals, lower the CPU priority and raise the OOM score of this process."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    lower_cpu_priority()
    raise_oom_score()


def raise_oom_score() -> None:
    """Let the kernel kill this process before others if memory runs out."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(HELPER_OOM_SCORE))


def adopt_orphans() -> None:
    """Become the parent of all descendants whose parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextlib.contextmanager
def blocked(*signals: signal.Signals) -> Iterator[None]:
    """Block signals in this thread and in processes that it starts, until those ignore or handle them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(slots=True)
class PendingSignals:
    """The signals received so far, and a socket that wakes the main loop."""

    wake: socket.socket
    waker: socket.socket
    stops: list[tuple[int, float]] = field(default_factory=list)
    """Stop signals, with the time of their arrival."""
    forwarded: list[int] = field(default_factory=list)
    """Signals to forward to the trainer."""

    @property
    def stop_name(self) -> str:
        """Name of the first stop signal."""
        return signal_name(self.stops[0][0])

    def handle(self, signum: int, frame: FrameType | None) -> None:
        if signum in STOP_SIGNALS:
            self.stops.append((signum, time.monotonic()))
        elif signum in FORWARDED_SIGNALS:
            self.forwarded.append(signum)

    def wake_up(self) -> None:
        """Wake the main loop from another thread."""
        with contextlib.suppress(BlockingIOError):
            self.waker.send(b"\0")

    def sleep(self, seconds: float | None, *sources: socket.socket) -> None:
        """Sleep until a signal arrives, one of the sockets can be read, or the time is up."""
        if self.wake in select.select([self.wake, *sources], [], [], seconds)[0]:
            with contextlib.suppress(BlockingIOError):
                self.wake.recv(4096)


@contextlib.contextmanager
def caught_signals() -> Iterator[PendingSignals]:
    wake, waker = socket.socketpair()
    with wake, waker:
        wake.setblocking(False)
        waker.setblocking(False)
        signals = PendingSignals(wake, waker)
        # ignored signals stay ignored: nohup ignores SIGHUP on purpose
        caught = [
            each for each in (*STOP_SIGNALS, *FORWARDED_SIGNALS) if signal.getsignal(each) is not signal.SIG_IGN
        ]
        before = {signum: signal.signal(signum, signals.handle) for signum in (*caught, signal.SIGCHLD)}
        before_fd = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        try:
            yield signals
        finally:
            signal.set_wakeup_fd(before_fd)
            for signum, handler in before.items():
                signal.signal(signum, handler)


def reap_orphans(trainer: int) -> None:
    """Reap ended children, but not the trainer, whose exit status is still needed."""
    with contextlib.suppress(ChildProcessError):
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid == trainer:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def kill_group(group: int) -> None:
    # macOS raises EPERM if only the dead leader is left in the group
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def kill_descendants(trainer: int, spared: Collection[int] = ()) -> list[int]:
    """Kill a trainer's group and all descendants except `spared`. Return those that are still alive.

    The trainer must not be reaped yet, so that its group id cannot have been reused.
    """
    kill_group(trainer)
    deadline = time.monotonic() + KILL_TIMEOUT_SECONDS
    while left := [pid for pid in descendants(os.getpid()) if pid not in spared]:
        for pid in left:  # again in each round: a process may have been started in between
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        reap_orphans(trainer)
        if time.monotonic() > deadline:
            break
        time.sleep(0.005)
    return left


def descendants(ancestor: int) -> list[int]:
    """Return all live descendants of a process; none without /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.name))
    found, ahead = [], [ancestor]
    while ahead:
        ahead.extend(direct := children.get(ahead.pop(), []))
        found.extend(direct)
    return found


def describe_exit(status: int) -> str:
    """Describe a return code of subprocess: `killed by SIGKILL` or `exit status 1`."""
    return f"killed by {signal_name(-status)}" if status < 0 else f"exit status {status}"


def shell_status(status: int) -> int:
    """Return what a shell reports for a return code of subprocess."""
    return 128 - status if status < 0 else status


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal
        return f"signal {signum}"
