"""Notification of changed jobs, for long polls and the event streams of open pages."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from threading import Lock, get_ident
from weakref import WeakSet


class Subscription:
    """A reader's wait for changes of one job, or of any.

    Changes that happen between two waits count as one, so a slow reader costs no memory and misses nothing. Once
    the bus is closed, waiting returns at once.
    """

    def __init__(self, bus: ChangeBus, job: str | None, *, samples: bool) -> None:
        self._bus = bus
        self._job = job
        self.samples = samples
        """Whether new samples count as a change."""
        self._changed = False
        self._wake = asyncio.Event()
        self._loop, self._thread = asyncio.get_running_loop(), get_ident()
        self._is_woken = False

    async def wait(self, timeout_seconds: float) -> bool:
        """Wait for a change; return whether there was one within the time or since the last wait."""
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

    def __exit__(self, *error: object) -> None:
        self.close()

    def _publish(self) -> None:
        """Tell the reader's event loop, once for all changes until it has seen them."""
        if self._changed or self._is_woken:
            return
        if get_ident() == self._thread:
            self._note()
            return
        self._is_woken = True
        with suppress(RuntimeError):  # the loop has ended, and nobody waits
            self._loop.call_soon_threadsafe(self._note)

    def _note(self) -> None:
        self._is_woken = False
        self._changed = True
        self._wake.set()


class ChangeBus:
    """Publishes changes within one process; `db.relay` connects the buses of several server instances.

    Any thread publishes, and the event loop subscribes and waits.
    """

    def __init__(self) -> None:
        self._subscriptions: dict[str | None, WeakSet[Subscription]] = {}
        """Subscriptions by job: thousands of agents each wait for one job, and each reports every second."""
        self._counts: Counter[str | None] = Counter()
        self._lock = Lock()
        """Held while subscriptions or counts change."""
        self.closed = False

    def count(self, job: str) -> int:
        """Return how many changes of a job were published here; an equal number means that it has not changed."""
        return self._counts[job] + self._counts[None]

    def subscribe(self, job: str | None = None, *, samples: bool = True) -> Subscription:
        """Subscribe to changes of one job, or of all jobs.

        `samples`: whether new samples count as a change. False for agents, which send the samples themselves and
        would poll after each of their own reports.
        """
        subscription = Subscription(self, job, samples=samples)
        if self.closed:
            subscription._wake.set()
        with self._lock:
            self._subscriptions.setdefault(job, WeakSet()).add(subscription)
        return subscription

    def publish(self, job: str, *, samples_only: bool = False) -> None:
        with self._lock:
            self._counts[job] += 1
            heard = [one for listened in (job, None) for one in self._subscriptions.get(listened, ())]
        _notify(heard, samples_only=samples_only)

    def publish_all(self, *, samples_only: bool = False) -> None:
        """Publish that any job, or with `samples_only` the samples of any job, may have changed."""
        with self._lock:
            self._counts[None] += 1
        _notify(self._all(), samples_only=samples_only)

    def listened(self) -> set[str]:
        """Return the jobs with a subscription."""
        with self._lock:
            return {job for job in self._subscriptions if job is not None}

    def close(self) -> None:
        """End all subscriptions, so that a stopping server does not wait for open streams."""
        self.closed = True
        for subscription in self._all():
            with suppress(RuntimeError):  # its loop has ended
                subscription._loop.call_soon_threadsafe(subscription._wake.set)

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> list[Subscription]:
        with self._lock:
            return [subscription for listeners in self._subscriptions.values() for subscription in listeners]

    def _forget(self, subscription: Subscription) -> None:
        with self._lock:
            listeners = self._subscriptions.get(subscription._job)
            if listeners is not None:
                listeners.discard(subscription)
                if not listeners:
                    del self._subscriptions[subscription._job]


def _notify(subscriptions: list[Subscription], *, samples_only: bool) -> None:
    for subscription in subscriptions:
        if subscription.samples or not samples_only:
            subscription._publish()
