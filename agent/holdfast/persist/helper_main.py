"""The helper process: `python -m holdfast.persist.helper_main SOCKET OPENER URL`. Does not import torch.

Defines the messages between a trainer and its helper as well.
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

PARENT_POLL_SECONDS = 5.0
"""Interval at which an idle helper checks its parent: a process that inherited the socket may keep it open."""
LENGTH_BYTES = 8
MAX_FDS = 1
HEARTBEAT_INTERVAL_SECONDS = 1.0


class Write(msgspec.Struct, frozen=True, kw_only=True, tag="write"):
    task: Task
    size_bytes: int
    arena_bytes: int
    """Size of the memory file; its descriptor is sent along if it is new."""


class LiftRateLimit(msgspec.Struct, frozen=True, tag="lift_rate_limit"):
    """Write at full speed from now on."""


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The write makes progress."""


Request = Write | LiftRateLimit
Reply = Heartbeat | Written | Failed


class Channel:
    """Length-prefixed messages over a stream socket, optionally with a file descriptor."""

    def __init__(self, endpoint: socket.socket) -> None:
        self.socket = endpoint
        self._sending = threading.Lock()
        self._heartbeat_at = 0.0

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
        """Receive a message and its file descriptors; `None` when the peer is gone."""
        try:
            opening, fds, _, _ = socket.recv_fds(self.socket, LENGTH_BYTES, MAX_FDS)
            rest = self._exactly(LENGTH_BYTES - len(opening)) if opening else None
            data = None if rest is None else self._exactly(int.from_bytes(opening + rest, "little"))
        except ConnectionResetError:  # the peer exited with unread data
            return None
        return None if data is None else (data, list(fds))

    def poll(self, seconds: float) -> bool:
        """Wait for a message or the end of the peer; `False` on timeout."""
        poll = select.poll()  # select() does not support descriptors from 1,024 on
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def send_heartbeat(self) -> None:
        """Report progress, about once a second."""
        now = time.monotonic()
        if now - self._heartbeat_at >= HEARTBEAT_INTERVAL_SECONDS:
            self._heartbeat_at = now
            self.try_send(Heartbeat())

    def try_send(self, message: Request | Reply) -> None:
        """Send a message, ignoring that the peer is gone: the write continues without it."""
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
    """Writes checkpoints one after the other, from the arena of the trainer."""

    def __init__(self, store: Store, channel: Channel) -> None:
        self._store, self._channel = store, channel
        self._map: mmap.mmap | None = None
        self._memory = memoryview(b"")
        self._is_unthrottled = False

    def run(self) -> None:
        """Serve requests until the trainer is gone."""
        trainer = os.getppid()
        while True:
            if not self._channel.poll(PARENT_POLL_SECONDS):
                if os.getppid() != trainer:
                    return
                continue
            received = self._channel.receive()
            if received is None:
                return
            match _requests.decode(received[0]):
                case LiftRateLimit():
                    self._is_unthrottled = True
                case Write() as request:
                    self._channel.send_heartbeat()
                    self._channel.try_send(self._answer(request, received[1]))

    def _answer(self, request: Write, fds: list[int]) -> Written | Failed:
        try:
            if fds:
                self._map_arena(fds[0], request.arena_bytes)
            return self._write(request)
        except Exception as error:  # the trainer raises it; the next request may succeed
            return Failed.of(error)

    def _write(self, request: Write) -> Written:
        # during a write the trainer sends only LiftRateLimit, or exits: both end the wait of the limiter
        rate = None if self._is_unthrottled else request.task.origin.bytes_per_second
        limiter = RateLimiter(rate, self._channel.poll)

        def pace(size_bytes: int) -> None:
            self._channel.send_heartbeat()
            limiter(size_bytes)

        payload = self._memory[: request.size_bytes]
        return write_checkpoint(self._store, request.task, payload, pace=pace)

    def _map_arena(self, fd: int, size_bytes: int) -> None:
        self._memory = memoryview(b"")
        self._map = None  # unmap before mapping the new one: both may be large
        try:
            self._map = mmap.mmap(fd, size_bytes) if size_bytes else None
        finally:
            os.close(fd)
        self._memory = memoryview(self._map or b"")


def main(fd: str, opener: str, url: str) -> None:
    become_background_process()  # it ends when the socket closes, after the current write
    open_store: Callable[[str], Store] = pkgutil.resolve_name(opener)
    Worker(open_store(url), Channel(socket.socket(fileno=int(fd)))).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
