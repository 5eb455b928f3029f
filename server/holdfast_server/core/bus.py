"""Who wants to know that a job changed: long polls and the streams of open pages."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import TracebackType
from weakref import WeakSet


class Subscription:
    """Waits for changes of one job, or of any.

    However much changes before the reader comes back, it waits as one change: a slow reader costs no
    memory and misses nothing. Once the bus is closed there is nothing to wait for.
    """

    def __init__(self, bus: LocalBus, job: str | None, *, samples: bool) -> None:
        self._bus = bus
        self._job = job
        self.samples = samples
        """Whether samples are a change to it, too."""
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
        self._bus._forget(self)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _publish(self) -> None:
        self._changed = True
        self._wake.set()


class LocalBus:
    """Changes, told within one process. Where there are several, a relay tells each bus what the others heard."""

    def __init__(self) -> None:
        self._subscriptions: dict[str | None, WeakSet[Subscription]] = {}
        """By job: thousands of agents wait for theirs, and each of them reports every second."""
        self._told: Counter[str | None] = Counter()
        self.closed = False

    def told(self, job: str) -> int:
        """How often it was told that a job changed; the same number: nothing has, as far as is known here."""
        return self._told[job] + self._told[None]

    def subscribe(self, job: str | None = None, *, samples: bool = True) -> Subscription:
        """Listen to one job, or to all; what changes from this moment on is seen.

        `samples`: False where it changes nothing that more samples came, as for an agent, which sends them itself
        and would ask at each of its own reports whether there is anything for it.
        """
        subscription = Subscription(self, job, samples=samples)
        if self.closed:
            subscription._wake.set()
        self._subscriptions.setdefault(job, WeakSet()).add(subscription)
        return subscription

    def publish(self, job: str, *, samples_only: bool = False) -> None:
        self._told[job] += 1
        for listened in (job, None):
            for subscription in list(self._subscriptions.get(listened, ())):
                if subscription.samples or not samples_only:
                    subscription._publish()

    def publish_all(self, *, samples_only: bool = False) -> None:
        """Anything may have changed, or samples of any job may have come."""
        self._told[None] += 1
        for subscription in self._all():
            if subscription.samples or not samples_only:
                subscription._publish()

    def listened(self) -> set[str]:
        """The jobs that somebody listens to."""
        return {job for job in self._subscriptions if job is not None}

    def close(self) -> None:
        """End every subscription, so that a server that stops need not wait for its open streams."""
        self.closed = True
        for subscription in self._all():
            subscription._wake.set()

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> list[Subscription]:
        return [subscription for listeners in self._subscriptions.values() for subscription in listeners]

    def _forget(self, subscription: Subscription) -> None:
        listeners = self._subscriptions.get(subscription._job)
        if listeners is not None:
            listeners.discard(subscription)
            if not listeners:
                del self._subscriptions[subscription._job]
