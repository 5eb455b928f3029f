"""How much the server takes on at a time: samples give way to what happened, and both to its memory."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterator
from contextlib import contextmanager

from holdfast.protocol.messages import Lane
from holdfast_server.db import Database

LIMIT_BYTES = 64 * 2**20
"""Of batches that are being stored; unpacked, they take a few times as much."""
SAMPLES_SHARE = 0.8
"""Of all room. The rest is for the control lane alone, which is never thinned."""
RETRY_AFTER_SECONDS = {"samples": 2, "control": 1}


class TooMuch(RuntimeError):
    """There is no room for this batch now: the agent keeps it, and comes again."""

    def __init__(self, lane: Lane) -> None:
        super().__init__(
            "samples come faster than they are stored: keep them, thin them if need be, and send them later"
            if lane == "samples"
            else "reports come faster than they are stored: keep them, and send them later"
        )
        self.lane = lane


class Intake:
    def __init__(self, db: Database, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self._db, self._limit_bytes = db, limit_bytes
        self._arriving_bytes = self._taken_bytes = 0

    async def read(self, parts: AsyncIterable[bytes]) -> bytes:
        """A body, as it arrives: what many send at once is held in memory before anybody knows what it is.

        One that comes alone always has room; how large it may be is seen to elsewhere.

        Raises:
            TooMuch: there is no room for more of it beside the others.
        """
        held: list[bytes] = []
        size_bytes = 0
        try:
            async for part in parts:
                others_bytes = self._arriving_bytes - size_bytes
                if others_bytes and self._arriving_bytes + len(part) > self._limit_bytes:
                    raise TooMuch("control")
                self._arriving_bytes += len(part)
                size_bytes += len(part)
                held.append(part)
        finally:
            self._arriving_bytes -= size_bytes
        return b"".join(held)

    @contextmanager
    def taking(self, lane: Lane, size_bytes: int) -> Iterator[None]:
        """Room for a batch until it is stored.

        Raises:
            TooMuch: there is none in its lane.
        """
        share = SAMPLES_SHARE if lane == "samples" else 1.0
        waiting = self._db.pressure
        if waiting >= share or self._taken_bytes + size_bytes > share * self._limit_bytes:
            raise TooMuch(lane)
        self._taken_bytes += size_bytes
        try:
            yield
        finally:
            self._taken_bytes -= size_bytes
