"""Write in helper processes, which do not share the interpreter lock with training and survive its crash.

A helper maps the arena's memory file and writes from it. When the trainer ends, which closes their socket, the
helper finishes and commits its current checkpoint, then ends. A newer attempt fences it like the trainer.
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
from holdfast.persist.helper_main import Channel, Heartbeat, LiftRateLimit, Reply, Write
from holdfast.persist.task import Task, Written
from holdfast.store import Store
from holdfast.system.host_memory import can_share
from holdfast.system.processes import STOP_SIGNALS, blocked

if TYPE_CHECKING:
    from holdfast.snapshot.host_buffers import Arena

HUNG_SECONDS = 600.0
"""Progress timeout of a helper. One fsync on a slow disk may take minutes."""
START_SECONDS = 60.0
"""Start timeout of a helper: a child forked while another thread held a lock may deadlock."""
EXIT_POLL_SECONDS = 1.0


class HelperLost(Exception):
    """The helper process died, hung or did not start; its checkpoint is lost."""


END_SECONDS = 5.0
"""Exit timeout of an idle helper."""


def refusal(store: Store) -> str | None:
    """Return why a helper process cannot write to this store; `None` if it can."""
    if not can_share():
        return "this platform has no memory that another process can map"
    if opener(store) is None:
        return f"store {store.url} cannot be opened by another process"
    return None


def opener(store: Store) -> str | None:
    """Return the `module:function` that opens the store by its URL in another process."""
    return getattr(store, "opener", "holdfast.store:open_store")


def environment() -> dict[str, str]:
    """Return an environment with the module search path of the trainer."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}


class ProcessBackend:
    """One helper process for each arena, started with its first snapshot and kept."""

    def __init__(self, store: Store, *, hung_seconds: float = HUNG_SECONDS) -> None:
        self._store, self._hung_seconds = store, hung_seconds
        self._helpers: dict[int, Helper] = {}
        self._busy: set[Helper] = set()
        self._lock = threading.Lock()
        self._is_unthrottled = self._closed = False

    def write(self, task: Task, arena: Arena, size_bytes: int) -> Written:
        """Write from shared memory in a helper process. Returns when the checkpoint is durable.

        Raises:
            Fenced, OSError, MemoryError: raised in the helper.
            HelperLost: the helper is gone.
        """
        helper = self._take(arena)
        try:
            return helper.write(task, size_bytes)
        finally:
            self._put_back(helper)

    def lift_rate_limit(self) -> None:
        with self._lock:
            self._is_unthrottled = True
            for helper in self._busy:
                helper.lift_rate_limit()

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
            if self._is_unthrottled:
                helper.lift_rate_limit()
        return helper

    def _put_back(self, helper: Helper) -> None:
        with self._lock:
            self._busy.discard(helper)
            if keep := helper.alive and not self._closed:
                self._helpers[id(helper.arena)] = helper
        if not keep:
            helper.end()


class Helper:
    """Client of a helper process, which writes from one arena, for one thread at a time."""

    def __init__(self, store: Store, arena: Arena, hung_seconds: float) -> None:
        self.arena = arena
        self._mapped: int | None = None
        self._hung_seconds = hung_seconds
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the process
        parent_end, child_end = socket.socketpair()
        with child_end:
            try:
                self._process = _start(store, child_end.fileno(), self._errors)
            except OSError as error:
                parent_end.close()
                self._errors.close()
                raise HelperLost(f"the helper process could not be started: {error}") from error
        parent_end.settimeout(hung_seconds)  # for the rest of a message; `await_reply` polls for its start
        self._channel = Channel(parent_end)
        self.alive = True

    def write(self, task: Task, size_bytes: int) -> Written:
        """Write in the helper, and raise its error or HelperLost."""
        try:
            self._send_request(task, size_bytes)
            return await_reply(self._channel, is_gone=self._is_gone, hung_seconds=self._hung_seconds)
        except EOFError:
            self._kill()
            raise HelperLost(f"the helper process {self._exit_description()}") from None
        except TimeoutError:
            self._kill()
            raise HelperLost("the helper process hung and was killed") from None

    def lift_rate_limit(self) -> None:
        self._channel.try_send(LiftRateLimit())

    def end(self) -> None:
        """Close the socket, which ends the helper."""
        self.alive = False
        self._channel.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
        self._errors.close()

    def _send_request(self, task: Task, size_bytes: int) -> None:
        arena = self.arena
        fds = () if self._mapped == arena.generation else (arena.fd,)
        try:
            self._channel.send(Write(task=task, size_bytes=size_bytes, arena_bytes=arena.size_bytes), *fds)
        except TimeoutError:
            raise
        except OSError as error:  # the helper is gone
            raise EOFError from error
        self._mapped = arena.generation

    def _is_gone(self) -> bool:
        return self._process.poll() is not None

    def _kill(self) -> None:
        self.alive = False
        self._process.kill()
        self._process.wait()

    def _exit_description(self) -> str:
        code = self._process.returncode
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        return f"ended with exit status {code}" + "".join(f": {line}" for line in last)


def _start(store: Store, fd: int, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    with blocked(*STOP_SIGNALS):
        return subprocess.Popen(  # noqa: S603  this interpreter, and no user input
            [sys.executable, "-P", "-m", "holdfast.persist.helper_main", str(fd), str(opener(store)), store.url],
            env=environment(),
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # must not keep a pipe of the trainer open
            stderr=errors,
            start_new_session=True,  # Ctrl-C goes to the trainer, which waits for the final checkpoint
        )


_replies = msgspec.msgpack.Decoder(Reply)


def await_reply(channel: Channel, *, is_gone: Callable[[], bool], hung_seconds: float) -> Written:
    """Wait for the end of a write in another process.

    Raises:
        EOFError: the process has ended: its socket closed, or `is_gone` returns True (another process may have
            inherited the socket).
        TimeoutError: it did not start in time, or made no progress for `hung_seconds`.
    """
    silent_since, patience_seconds = time.monotonic(), min(START_SECONDS, hung_seconds)
    while True:
        if not channel.poll(min(EXIT_POLL_SECONDS, patience_seconds)):
            if is_gone() and not channel.poll(0):
                raise EOFError
            if time.monotonic() - silent_since >= patience_seconds:
                raise TimeoutError
            continue
        received = channel.receive()
        if received is None:
            raise EOFError
        match _replies.decode(received[0]):
            case Heartbeat():
                silent_since, patience_seconds = time.monotonic(), hung_seconds
            case Written() as written:
                return written
            case Failed() as failed:
                raise failed.error()
