"""What a trainer and the process that writes for it say to each other, over a socket."""

from __future__ import annotations

import select
import socket
import threading
import time

import msgspec

from holdfast.persist.task import Task, Written
from holdfast.remote import Failed

LENGTH_BYTES = 8
MOST_FDS = 1
BEAT_SECONDS = 1.0


class Write(msgspec.Struct, frozen=True, kw_only=True, tag="write"):
    task: Task
    size_bytes: int
    arena_bytes: int
    """Of the memory, whose file comes along unless it is the one before."""


class Hurry(msgspec.Struct, frozen=True, tag="hurry"):
    """Hold back no longer."""


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Still at it."""


Request = Write | Hurry
Reply = Beat | Written | Failed


class Channel:
    """Messages over a stream socket, each behind its length; a file may travel along."""

    def __init__(self, endpoint: socket.socket) -> None:
        self.socket = endpoint
        self._sending = threading.Lock()
        self._beat_at = 0.0

    def send(self, message: Request | Reply, *fds: int) -> None:
        data = msgspec.msgpack.encode(message)
        with self._sending:
            opening = len(data).to_bytes(LENGTH_BYTES, "little")
            if fds:
                socket.send_fds(self.socket, [opening], fds)
            else:
                self.socket.sendall(opening)
            self.socket.sendall(data)

    def receive(self) -> tuple[bytes, list[int]] | None:
        """A message and the files that came with it; None when the other side is gone."""
        try:
            opening, fds, _, _ = socket.recv_fds(self.socket, LENGTH_BYTES, MOST_FDS)
            rest = self._exactly(LENGTH_BYTES - len(opening)) if opening else None
            data = None if rest is None else self._exactly(int.from_bytes(opening + rest, "little"))
        except ConnectionResetError:  # it went without hearing our last word
            return None
        return None if data is None else (data, list(fds))

    def poll(self, seconds: float) -> bool:
        """Whether the other side says something, or goes, within so many seconds."""
        poll = select.poll()  # select() knows no descriptors from 1,024 on
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def beat(self) -> None:
        """Say about once a second that there is progress."""
        now = time.monotonic()
        if now - self._beat_at >= BEAT_SECONDS:
            self._beat_at = now
            self.tell(Beat())

    def tell(self, message: Request | Reply) -> None:
        """Send to whoever is still there; the work is worth doing without."""
        try:
            self.send(message)
        except OSError:
            return

    def close(self) -> None:
        self.socket.close()

    def _exactly(self, size_bytes: int) -> bytes | None:
        data = bytearray(size_bytes)
        view = memoryview(data)
        while len(view):
            count = self.socket.recv_into(view)
            if not count:
                return None
            view = view[count:]
        return bytes(data)
