"""Writes in a forked child, which shares the arena's memory and has nothing to start or to map.

The child of a process with threads may use no lock that one of them could hold: it writes, digests and commits on
its only thread, with neither torch nor logging, says how that ended, and exits.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import warnings
from typing import TYPE_CHECKING, NoReturn

from holdfast.hostmemory import can_share
from holdfast.persist import memory
from holdfast.persist.backend import HUNG_SECONDS, Lost, Refused, await_reply, require_shared
from holdfast.persist.courtesy import be_nice, volunteer
from holdfast.persist.messages import Channel, Hurry, Reply
from holdfast.persist.pacer import Pacer
from holdfast.persist.task import Task, Written
from holdfast.persist.writing import write_checkpoint
from holdfast.remote import Failed
from holdfast.store import Store

if TYPE_CHECKING:
    from holdfast.snapshot import Snapshot

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Meant for the trainer; its handlers must not run in a child."""


def refusal(store: Store) -> str | None:
    """Why a forked child cannot write to such a store here."""
    if not (hasattr(os, "fork") and can_share()):
        return "this platform has no fork over shared memory"
    if not store.forkable:
        return f"store {store.url} has connections or threads that do not survive a fork"
    return None


class ForkBackend:
    """A child for each checkpoint."""

    name = "fork"

    def __init__(self, store: Store, *, hung_seconds: float = HUNG_SECONDS) -> None:
        self._store, self._hung_seconds = store, hung_seconds
        self._busy: set[Channel] = set()
        self._hurried = False
        self._lock = threading.Lock()
        memory.prepare()

    def write(self, task: Task, snapshot: Snapshot) -> Written:
        require_shared(snapshot)
        if snapshot.arena.pinned and _cuda_is_initialised():
            raise Refused("CUDA has pinned the arena's memory, which a child must not touch")
        channel, child = self._fork(task, snapshot)
        try:
            self._count(channel)
            return await_reply(channel, gone=child.gone, hung_seconds=self._hung_seconds)
        except EOFError:
            raise Lost(f"the child that wrote it {child.end()}") from None
        except TimeoutError:
            raise Lost("the child that wrote it hung and was killed") from None
        finally:
            with self._lock:
                self._busy.discard(channel)
            channel.close()
            child.end()

    def hurry(self) -> None:
        with self._lock:
            self._hurried = True
            for channel in self._busy:
                channel.tell(Hurry())

    def close(self) -> None: ...

    def _count(self, channel: Channel) -> None:
        with self._lock:
            self._busy.add(channel)
            if self._hurried:
                channel.tell(Hurry())

    def _fork(self, task: Task, snapshot: Snapshot) -> tuple[Channel, _Child]:
        ours, theirs = socket.socketpair()
        payload = snapshot.payload()
        # gradients come and go: held here, their memory is nothing else's by the time of the fork
        live = snapshot.live()
        with theirs:
            try:
                pid = _fork_quietly(sorted({(tensor.data_ptr(), tensor.nbytes) for tensor in live}))
            except OSError as error:
                ours.close()
                raise Lost(f"no child could be forked: {error.strerror}") from error
            if pid == 0:
                _write_and_exit(self._store, task, payload, theirs)
        ours.settimeout(self._hung_seconds)  # for a message that breaks off; until one comes it is polled for
        return Channel(ours), _Child(pid)


def _fork_quietly(live: list[tuple[int, int]]) -> int:
    """Fork with all signals held back: the child decides on them before the first one comes."""
    # Python 3.12 warns of every fork with threads; what it warns of is what this module is written around
    warnings.filterwarnings(
        "ignore", r".*multi-threaded.*fork", DeprecationWarning, module=r"holdfast\.persist\.memory"
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = -1
    try:
        pid = memory.fork_without(live)
        return pid
    finally:
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _write_and_exit(store: Store, task: Task, payload: memoryview, endpoint: socket.socket) -> NoReturn:
    """All that a child ever does."""
    try:
        gc.disable()  # or it would run finalizers of the trainer's objects
        channel = Channel(endpoint)
        _cut_loose(endpoint.fileno())
        channel.tell(_write(store, task, payload, channel))
    finally:
        os._exit(0)


def _write(store: Store, task: Task, payload: memoryview, channel: Channel) -> Reply:
    channel.beat()
    # the trainer says nothing but "hurry", or goes: either ends the waiting
    pacer = Pacer(task.origin.bytes_per_second, channel.poll)

    def pace(size_bytes: int) -> None:
        channel.beat()
        pacer(size_bytes)

    try:
        return write_checkpoint(store, task, payload, threads=False, pace=pace)
    except BaseException as error:  # the process's edge
        return Failed.of(error)


def _cut_loose(kept: int) -> None:
    """Share with the trainer neither terminal, signals nor descriptors: not its sockets, not its pipes."""
    os.setsid()
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    be_nice()
    volunteer()
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    for name in os.listdir("/proc/self/fd"):
        if (fd := int(name)) > 2 and fd != kept:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(fd)


class _Child:
    """A child's process id, until it has been waited for."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._ended: str | None = None

    def gone(self) -> bool:
        if self._ended is None:
            self._wait(os.WNOHANG)
        return self._ended is not None

    def end(self) -> str:
        """Nothing more is expected of it, so it may be killed wherever it is; how it ended."""
        if not self.gone():
            os.kill(self._pid, signal.SIGKILL)
            self._wait(0)
        return self._ended or ""

    def _wait(self, options: int) -> None:
        try:
            pid, status = os.waitpid(self._pid, options)
        except ChildProcessError:  # somebody else waits for all children
            self._ended = "is gone"
            return
        if pid:
            code = os.waitstatus_to_exitcode(status)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
            self._ended = how


def _cuda_is_initialised() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()
