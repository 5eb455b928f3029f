"""The helper process: `python -m holdfast.persist.worker SOCKET OPENER URL`. Imports no torch."""

from __future__ import annotations

import mmap
import os
import pkgutil
import signal
import socket
import sys
from collections.abc import Callable

import msgspec

from holdfast.persist.courtesy import be_nice, volunteer
from holdfast.persist.messages import Channel, Hurry, Request, Write
from holdfast.persist.pacer import Pacer
from holdfast.persist.task import Written
from holdfast.persist.writing import write_checkpoint
from holdfast.remote import Failed
from holdfast.store import Store

LOOK_SECONDS = 5.0
"""How often an idle helper looks whether its trainer is there: a socket that others inherited stays open."""
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Meant for the trainer. The helper ends with the socket, and so with the checkpoint in hand."""

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
        pacer = Pacer(rate, self._channel.poll)

        def pace(size_bytes: int) -> None:
            self._channel.beat()
            pacer(size_bytes)

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
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    be_nice()
    volunteer()
    open_store: Callable[[str], Store] = pkgutil.resolve_name(opener)
    Worker(open_store(url), Channel(socket.socket(fileno=int(fd)))).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
