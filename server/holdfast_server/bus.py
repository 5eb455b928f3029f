"""Who wants to know that a job changed: long polls and the streams of open pages."""

from __future__ import annotations

import asyncio
from types import TracebackType
from weakref import WeakSet


class Subscription:
    """Waits for changes of one job, or of any.

    However much changes before the reader comes back, it waits as one change: a slow reader costs no
    memory and misses nothing. Once the bus is closed there is nothing to wait for.
    """

    def __init__(self, bus: LocalBus, job: str | None) -> None:
        self._bus = bus
        self._job = job
        self._changed = False
        self._wake = asyncio.Event()

    async def wait(self, timeout_seconds: float) -> bool:
        """Whether something changed within that time; what had piled up counts as one change."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._wake.wait()
        except TimeoutError:
            return False
        changed, self._changed = self._changed, False
        if not self._bus.closed:
            self._wake.clear()
        return changed

    def close(self) -> None:
        self._bus._subscriptions.discard(self)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _publish(self, job: str) -> None:
        if self._job in (None, job):
            self._changed = True
            self._wake.set()


class LocalBus:
    """Changes within one process, which is all there is on SQLite."""

    def __init__(self) -> None:
        self._subscriptions: WeakSet[Subscription] = WeakSet()
        self.closed = False

    def subscribe(self, job: str | None = None) -> Subscription:
        """Listen to one job, or to all; what changes from this moment on is seen."""
        subscription = Subscription(self, job)
        if self.closed:
            subscription._wake.set()
        self._subscriptions.add(subscription)
        return subscription

    def publish(self, job: str) -> None:
        for subscription in list(self._subscriptions):
            subscription._publish(job)

    def close(self) -> None:
        """End every subscription, so that a server that stops need not wait for its open streams."""
        self.closed = True
        for subscription in list(self._subscriptions):
            subscription._wake.set()

    def __len__(self) -> int:
        return len(self._subscriptions)
