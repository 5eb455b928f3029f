"""The part of a rank that holds replicas of the snapshots of ranks on another host, in its supervisor's memory.

Each of those ranks has two slots: a replica that is being received never overwrites the newest complete one.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from holdfast.errors import HoldfastError
from holdfast.peers.connection import (
    CHUNK_BYTES,
    PeerConnection,
    PeerRefused,
    ReadBytes,
    ReadMarker,
    Reply,
    StoreReplica,
)
from holdfast.save.completion_marker import decode_marker, mapped, put_marker, read_marker, verify
from holdfast.save.shared_buffers import SharedBuffer
from holdfast.system.host_memory import available_bytes
from holdfast.system.io_pool import DaemonPool

logger = logging.getLogger("holdfast")

SLOTS_PER_RANK = 2
MOST_CONNECTIONS = 16
MOST_SHARE = 0.5
"""Share of the free memory that a replica may take."""


class ReplicaServer:
    """Receives replicas, and lets other ranks read the snapshots of this host, until it is closed.

    Args:
        slots: what this rank has claimed for the replicas of each sender, by its rank.
    """

    def __init__(
        self,
        folder: Path,
        job: str,
        listening: socket.socket,
        token: bytes,
        slots: Mapping[int, Sequence[SharedBuffer]],
    ) -> None:
        self._folder, self._job, self._token, self._listening = folder, job, token, listening
        self._slots = {rank: list(held) for rank, held in slots.items()}
        self._locks = {rank: threading.Lock() for rank in slots}
        """Held while a replica of the rank is received."""
        self._handlers = DaemonPool("holdfast-peers", MOST_CONNECTIONS, in_background=True)
        self._is_closed = False

    @property
    def slots(self) -> list[SharedBuffer]:
        return [slot for held in self._slots.values() for slot in held]

    @property
    def is_receiving(self) -> bool:
        return any(lock.locked() for lock in self._locks.values())

    def start(self) -> None:
        """Begin to accept connections. RuntimeError when no thread can be started."""
        threading.Thread(target=self._accept, name="holdfast-peers-accept", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections. The slots stay claimed."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._listening.close()
        self._handlers.close(1.0)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connected, _ = self._listening.accept()
            except OSError as error:
                if not self._is_closed:
                    logger.warning("no more snapshots of other hosts are received: %s", error)
                return
            self._handlers.submit(lambda connected=connected: self._serve(PeerConnection(connected)))  # type: ignore[misc]

    def _serve(self, connection: PeerConnection) -> None:
        with contextlib.closing(connection):
            try:
                if not connection.accepts(self._token):
                    return
                request: StoreReplica | ReadMarker | ReadBytes = connection.receive(
                    StoreReplica | ReadMarker | ReadBytes
                )
                try:
                    self._answer(connection, request)
                except (HoldfastError, ValueError) as error:
                    connection.send(Reply(reason=str(error)))
            except (OSError, HoldfastError) as error:  # the other rank is lost, or gave up
                logger.debug("a connection from another host ended: %s", error)

    def _answer(self, connection: PeerConnection, request: StoreReplica | ReadMarker | ReadBytes) -> None:
        if isinstance(request, StoreReplica):
            self._store(connection, request)
            return
        slot = SharedBuffer(self._folder, request.number)
        if isinstance(request, ReadMarker):
            connection.send(Reply(data=self._content(slot)))
            return
        with mapped(slot, max((end for _, end in request.ranges), default=0)) as memory:
            connection.send(Reply())
            for start, end in request.ranges:
                connection.send_bytes(memory[start:end])

    def _content(self, slot: SharedBuffer) -> bytes:
        try:
            return slot.marker.read_bytes()
        except OSError as error:
            raise PeerRefused(f"slot {slot.number} holds no snapshot") from error

    def _store(self, connection: PeerConnection, request: StoreReplica) -> None:
        marker = decode_marker(request.marker, -1)
        if marker is None or marker.draft.job != self._job or marker.draft.size_bytes != request.size_bytes:
            raise PeerRefused("its completion marker is damaged, or of another job")
        lock = self._locks.get(marker.draft.rank)
        if lock is None or not lock.acquire(blocking=False):
            raise PeerRefused(
                f"no slot here is for rank {marker.draft.rank}, or its last snapshot is still received"
            )
        try:
            slots = self._slots[marker.draft.rank]
            if any(self._holds(slot, request.marker) for slot in slots):
                connection.send(Reply(data=b"held"))
                return
            slot = self._oldest(slots)
            with self._reserved(slot, request.size_bytes) as memory:
                connection.send(Reply())
                for start in range(0, request.size_bytes, CHUNK_BYTES):
                    connection.receive_into(memory[start : start + CHUNK_BYTES])
                verify(marker, memory)
            put_marker(slot.marker, request.marker)
            connection.send(Reply())
        finally:
            lock.release()

    def _holds(self, slot: SharedBuffer, content: bytes) -> bool:
        with contextlib.suppress(OSError):
            return slot.marker.read_bytes() == content
        return False

    def _oldest(self, slots: Sequence[SharedBuffer]) -> SharedBuffer:
        """Return the slot to overwrite: one without a complete replica, else that of the older one."""

        def taken_at(slot: SharedBuffer) -> float:
            marker = read_marker(slot)
            return marker.draft.created_at if marker is not None else 0.0

        return min(slots, key=taken_at)

    @contextlib.contextmanager
    def _reserved(self, slot: SharedBuffer, size_bytes: int) -> Iterator[memoryview]:
        """Map a slot whose content may now change. PeerRefused: this host has too little memory."""
        slot.remove_marker()
        fd = slot.open()
        try:
            missing_bytes = max(0, size_bytes - os.fstat(fd).st_size)
            if missing_bytes > MOST_SHARE * available_bytes():
                raise PeerRefused(f"this host has too little memory for another {missing_bytes / 1e6:,.0f} MB")
            try:
                os.posix_fallocate(fd, 0, max(1, size_bytes))  # an error here, not a bus error later
            except OSError as error:
                raise PeerRefused(f"this host cannot hold {size_bytes / 1e6:,.0f} MB: {error.strerror}") from error
            memory = mmap.mmap(fd, max(1, size_bytes))
        finally:
            os.close(fd)
        yield memoryview(memory)[:size_bytes]
