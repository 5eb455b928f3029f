"""Admission control: bounds the memory of batches in flight, and refuses samples before events."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterator
from contextlib import contextmanager

from holdfast.protocol.wire import Lane
from holdfast_server.core.errors import RequestRefused
from holdfast_server.db import Database

LIMIT_BYTES = 64 * 2**20
"""Limit on the bytes of batches in flight; decoded, they take a few times as much memory."""
SAMPLES_SHARE = 0.8
"""Of all room. The rest is for the control lane alone, which is never thinned."""
RETRY_AFTER_SECONDS: dict[Lane, float] = {"samples": 2.0, "control": 1.0}


class Overloaded(RequestRefused):
    """There is no room for this batch now: the agent keeps it, and comes again."""

    def __init__(self, lane: Lane) -> None:
        super().__init__(
            "samples arrive faster than the server stores them: keep them, thin them if necessary, and retry later"
            if lane == "samples"
            else "reports arrive faster than the server stores them: keep them, and retry later"
        )
        self.status, self.code = (429, "too_many_samples") if lane == "samples" else (503, "unavailable")
        self.retry_seconds = RETRY_AFTER_SECONDS[lane]


class AdmissionControl:
    def __init__(self, db: Database, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self._db, self._limit_bytes = db, limit_bytes
        self._arriving_bytes = self._taken_bytes = 0

    async def read(self, parts: AsyncIterable[bytes]) -> bytes:
        """Read a request body, within the limit on all bodies that are being received.

        A body that arrives alone always has room; another layer limits its size.

        Raises:
            Overloaded: the bodies being received have reached the limit.
        """
        held: list[bytes] = []
        size_bytes = 0
        try:
            async for part in parts:
                others_bytes = self._arriving_bytes - size_bytes
                if others_bytes and self._arriving_bytes + len(part) > self._limit_bytes:
                    raise Overloaded("control")
                self._arriving_bytes += len(part)
                size_bytes += len(part)
                held.append(part)
        finally:
            self._arriving_bytes -= size_bytes
        return b"".join(held)

    @contextmanager
    def admitting(self, lane: Lane, size_bytes: int) -> Iterator[None]:
        """Reserve room for a batch until it is stored. Raises Overloaded: its lane has no room."""
        share = SAMPLES_SHARE if lane == "samples" else 1.0
        waiting = self._db.pressure
        if waiting >= share or self._taken_bytes + size_bytes > share * self._limit_bytes:
            raise Overloaded(lane)
        self._taken_bytes += size_bytes
        try:
            yield
        finally:
            self._taken_bytes -= size_bytes
