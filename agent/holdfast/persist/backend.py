"""The seam between deciding that a snapshot be written and the thread or process that writes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from holdfast.persist.messages import Beat, Channel, Reply
from holdfast.persist.task import Task, Written
from holdfast.remote import Failed

if TYPE_CHECKING:
    from holdfast.snapshot import Snapshot

HUNG_SECONDS = 600.0
"""A process that has written nothing for so long is given up. One fsync of a slow disk may take minutes."""
START_SECONDS = 60.0
"""One that has not even begun by then never will: it may hold a lock that nobody is left to open."""
LOOK_SECONDS = 1.0


class Lost(Exception):
    """The process that wrote died, hung or did not start: no fault of the store's. This checkpoint is lost."""


class Refused(Exception):
    """This backend cannot write such a snapshot here; another can."""


class Backend(Protocol):
    """Writes snapshots, several at a time when called from several threads.

    It stops at one blocking call: queues, order and what becomes of errors are the same for all backends and
    belong to the `Persister`.
    """

    name: str

    def write(self, task: Task, snapshot: Snapshot) -> Written:
        """Returns when the checkpoint is durable.

        Raises:
            Fenced, OSError, MemoryError: as they happened, wherever that was.
            Lost: the writing process is gone.
            Refused: nothing was tried.
        """
        ...

    def hurry(self) -> None:
        """Hold nothing back any more: somebody waits for the end."""
        ...

    def close(self) -> None:
        """Let go of everything that is not in use; what is goes with the end of its `write`."""
        ...


def require_shared(snapshot: Snapshot) -> None:
    """Refused for one that lies in this process's private memory."""
    if snapshot.arena.fd < 0:
        raise Refused("the snapshot is in memory that no other process can read")


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
