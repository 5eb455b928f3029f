"""Writes in helper processes, which share neither the interpreter lock nor the fate of training.

A helper maps the arena's memory file and writes from there. It outlives its trainer: when the socket to it
closes, it finishes and commits what it has in hand, then ends. A newer attempt fences it as it would the trainer.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import IO, TYPE_CHECKING

import msgspec

from holdfast.distributed.error_transport import Failed
from holdfast.persist.helper_main import Beat, Channel, Hurry, Reply, Write
from holdfast.persist.task import Task, Written
from holdfast.store import Store
from holdfast.system.host_memory import can_share
from holdfast.system.processes import MEANT_FOR_THE_TRAINER, blocked

if TYPE_CHECKING:
    from holdfast.snapshot.host_buffers import Arena

HUNG_SECONDS = 600.0
"""A process that has written nothing for so long is given up. One fsync of a slow disk may take minutes."""
START_SECONDS = 60.0
"""One that has not even begun by then never will: it may hold a lock that nobody is left to open."""
LOOK_SECONDS = 1.0


class Lost(Exception):
    """The process that wrote died, hung or did not start: no fault of the store's. This checkpoint is lost."""


END_SECONDS = 5.0
"""What a helper without work may take to end."""


def refusal(store: Store) -> str | None:
    """Why no other process can write to such a store here."""
    if not can_share():
        return "this platform has no memory that another process can map"
    if opener(store) is None:
        return f"store {store.url} cannot be opened by another process"
    return None


def opener(store: Store) -> str | None:
    """`module:function` that opens the store by its URL in another process; a store may name one of its own."""
    return getattr(store, "opener", "holdfast.store:open_store")


def environment() -> dict[str, str]:
    """In which another Python finds what the trainer finds."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}


class ProcessBackend:
    """A helper for each arena, started with its first snapshot and kept for the next ones."""

    def __init__(self, store: Store, *, hung_seconds: float = HUNG_SECONDS) -> None:
        self._store, self._hung_seconds = store, hung_seconds
        self._helpers: dict[int, Helper] = {}
        self._busy: set[Helper] = set()
        self._lock = threading.Lock()
        self._hurried = self._closed = False

    def write(self, task: Task, arena: Arena, size_bytes: int) -> Written:
        """Write from shared memory, on a helper. Returns when the checkpoint is durable.

        Raises:
            Fenced, OSError, MemoryError: as they happened over there.
            Lost: the helper is gone.
        """
        helper = self._take(arena)
        try:
            return helper.write(task, size_bytes)
        finally:
            self._put_back(helper)

    def hurry(self) -> None:
        with self._lock:
            self._hurried = True
            for helper in self._busy:
                helper.hurry()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle = list(self._helpers.values())
            self._helpers.clear()
        for helper in idle:
            helper.end()

    def _take(self, arena: Arena) -> Helper:
        with self._lock:
            helper = self._helpers.pop(id(arena), None)
        helper = helper or Helper(self._store, arena, self._hung_seconds)
        with self._lock:
            self._busy.add(helper)
            if self._hurried:
                helper.hurry()
        return helper

    def _put_back(self, helper: Helper) -> None:
        with self._lock:
            self._busy.discard(helper)
            if keep := helper.alive and not self._closed:
                self._helpers[id(helper.arena)] = helper
        if not keep:
            helper.end()


class Helper:
    """A helper process as its trainer sees it: writes what is in one arena, for one thread at a time."""

    def __init__(self, store: Store, arena: Arena, hung_seconds: float) -> None:
        self.arena = arena
        self._mapped: int | None = None
        self._hung_seconds = hung_seconds
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the process
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = _start(store, theirs.fileno(), self._errors)
            except OSError as error:
                ours.close()
                self._errors.close()
                raise Lost(f"a process to write with could not be started: {error}") from error
        ours.settimeout(hung_seconds)  # for a message that breaks off; until one comes it is polled for
        self._channel = Channel(ours)
        self.alive = True

    def write(self, task: Task, size_bytes: int) -> Written:
        """Raises what went wrong over there, or Lost."""
        try:
            self._ask(task, size_bytes)
            return await_reply(self._channel, gone=self._gone, hung_seconds=self._hung_seconds)
        except EOFError:
            self._kill()
            raise Lost(f"the process that wrote it {self._ended()}") from None
        except TimeoutError:
            self._kill()
            raise Lost("the process that wrote it hung and was killed") from None

    def hurry(self) -> None:
        self._channel.tell(Hurry())

    def end(self) -> None:
        """It ends when the socket does."""
        self.alive = False
        self._channel.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
        self._errors.close()

    def _ask(self, task: Task, size_bytes: int) -> None:
        arena = self.arena
        fds = () if self._mapped == arena.generation else (arena.fd,)
        try:
            self._channel.send(Write(task=task, size_bytes=size_bytes, arena_bytes=arena.size_bytes), *fds)
        except TimeoutError:
            raise
        except OSError as error:  # it is gone
            raise EOFError from error
        self._mapped = arena.generation

    def _gone(self) -> bool:
        return self._process.poll() is not None

    def _kill(self) -> None:
        self.alive = False
        self._process.kill()
        self._process.wait()

    def _ended(self) -> str:
        code = self._process.returncode
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        return f"ended with exit status {code}" + "".join(f": {line}" for line in last)


def _start(store: Store, fd: int, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    with blocked(*MEANT_FOR_THE_TRAINER):
        return subprocess.Popen(  # noqa: S603  this interpreter, and nothing that a user typed
            [sys.executable, "-P", "-m", "holdfast.persist.helper_main", str(fd), str(opener(store)), store.url],
            env=environment(),
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # a pipe of the trainer's must end with the trainer
            stderr=errors,
            start_new_session=True,  # Ctrl-C is for the trainer, which waits for the last checkpoint
        )


_replies = msgspec.msgpack.Decoder(Reply)


def await_reply(channel: Channel, *, gone: Callable[[], bool], hung_seconds: float) -> Written:
    """Wait for the end of a write in another process.

    Raises:
        EOFError: it is gone, as the socket says, or `gone`: a socket that somebody else has inherited stays open.
        TimeoutError: it has not begun in time, or shown no progress for `hung_seconds`.
    """
    silent_since, patience_seconds = time.monotonic(), min(START_SECONDS, hung_seconds)
    while True:
        if not channel.poll(min(LOOK_SECONDS, patience_seconds)):
            if gone() and not channel.poll(0):
                raise EOFError
            if time.monotonic() - silent_since >= patience_seconds:
                raise TimeoutError
            continue
        received = channel.receive()
        if received is None:
            raise EOFError
        match _replies.decode(received[0]):
            case Beat():
                silent_since, patience_seconds = time.monotonic(), hung_seconds
            case Written() as written:
                return written
            case Failed() as failed:
                raise failed.error()
