"""The helper process: `python -m holdfast.persist.helper_main SOCKET OPENER URL`. Imports no torch.

Also the messages between a trainer and its helper, which go over a socket.
"""

from __future__ import annotations

import mmap
import os
import pkgutil
import select
import socket
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from holdfast.distributed.error_transport import Failed
from holdfast.persist.task import Task, Written
from holdfast.persist.writer import RateLimiter, write_checkpoint
from holdfast.store import Store
from holdfast.system.processes import become_background_process

LOOK_SECONDS = 5.0
"""How often an idle helper looks whether its trainer is there: a socket that others inherited stays open."""
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


_requests = msgspec.msgpack.Decoder(Request)


class Worker:
    """Writes one checkpoint after the other, from the arena of its trainer."""

    def __init__(self, store: Store, channel: Channel) -> None:
        self._store, self._channel = store, channel
        self._map: mmap.mmap | None = None
        self._memory = memoryview(b"")
        self._hurried = False

    def run(self) -> None:
        """Until the trainer is gone."""
        trainer = os.getppid()
        while True:
            if not self._channel.poll(LOOK_SECONDS):
                if os.getppid() != trainer:
                    return
                continue
            received = self._channel.receive()
            if received is None:
                return
            match _requests.decode(received[0]):
                case Hurry():
                    self._hurried = True
                case Write() as request:
                    self._channel.beat()
                    self._channel.tell(self._answer(request, received[1]))

    def _answer(self, request: Write, fds: list[int]) -> Written | Failed:
        try:
            if fds:
                self._map_anew(fds[0], request.arena_bytes)
            return self._write(request)
        except Exception as error:  # the process's edge: it is told to the trainer, and the next one may do
            return Failed.of(error)

    def _write(self, request: Write) -> Written:
        # while a checkpoint is written the trainer says nothing but "hurry", or goes: either ends the waiting
        rate = None if self._hurried else request.task.origin.bytes_per_second
        limiter = RateLimiter(rate, self._channel.poll)

        def pace(size_bytes: int) -> None:
            self._channel.beat()
            limiter(size_bytes)

        payload = self._memory[: request.size_bytes]
        return write_checkpoint(self._store, request.task, payload, pace=pace)

    def _map_anew(self, fd: int, size_bytes: int) -> None:
        self._memory = memoryview(b"")
        self._map = None  # unmapped before the new one comes: it may have been large
        try:
            self._map = mmap.mmap(fd, size_bytes) if size_bytes else None
        finally:
            os.close(fd)
        self._memory = memoryview(self._map or b"")


def main(fd: str, opener: str, url: str) -> None:
    become_background_process()  # it ends with the socket, and so with the checkpoint in hand
    open_store: Callable[[str], Store] = pkgutil.resolve_name(opener)
    Worker(open_store(url), Channel(socket.socket(fileno=int(fd)))).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
