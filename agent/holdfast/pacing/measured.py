"""What iterations and checkpoints take, put together as the `Profile` that policies decide from."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from statistics import median

from .concurrency import Concurrency
from .estimate import deviation, has_dropped
from .ledger import Ledger
from .profile import Profile

RECENT_UPDATES = 31
RECENT_CHECKPOINTS = 3
"""Whose median counts: the first ones pay for memory and files that they are first to touch."""


class Measured:
    def __init__(self, ledger: Ledger, slots: int) -> None:
        self.concurrency = Concurrency(slots)
        self.cost_seconds: float | None = None
        """Of one checkpoint, as it was last accepted."""
        self.saved: Profile | None = None
        """What an attempt before knew."""
        self.checkpoints = 0
        """Measured so far, by this attempt."""
        self._ledger = ledger
        self._updates: deque[float] = deque(maxlen=RECENT_UPDATES)
        self._checkpoints: deque[Profile] = deque(maxlen=RECENT_CHECKPOINTS)
        self._persists: deque[float] = deque(maxlen=2 * RECENT_CHECKPOINTS)

    def update(self, seconds: float | None) -> None:
        """An optimizer's step took so long; what is no duration says nothing."""
        if seconds is not None and _is_duration(seconds):
            self._updates.append(seconds)

    def checkpoint(
        self,
        snapshot_seconds: float,
        persist_seconds: float,
        checkpoint_bytes: int,
        device_copy_seconds: float,
        memory_used_bytes: int,
        memory_total_bytes: int,
        in_flight: int,
    ) -> None:
        """One has become durable, with so many under way when it began; what is no duration says nothing."""
        if not (_is_duration(snapshot_seconds) and _is_duration(persist_seconds)):
            return
        self._checkpoints.append(
            Profile(
                iteration_seconds=math.nan,
                snapshot_seconds=snapshot_seconds,
                persist_seconds=persist_seconds,
                checkpoint_bytes=checkpoint_bytes,
                device_copy_seconds=device_copy_seconds if device_copy_seconds >= 0 else math.inf,
                memory_used_bytes=memory_used_bytes,
                memory_total_bytes=memory_total_bytes,
            )
        )
        self.concurrency.measured(in_flight, persist_seconds)
        self._persists.append(persist_seconds)
        self.checkpoints += 1

    @property
    def profile(self) -> Profile | None:
        """What was saved, until an iteration and a checkpoint were measured here."""
        seconds = self._ledger.iteration_seconds
        if not self._checkpoints or seconds is None:
            return self.saved
        newest = self._checkpoints[-1]
        return replace(
            newest,
            iteration_seconds=seconds,
            update_seconds=min(median(self._updates), seconds) if self._updates else 0.0,
            snapshot_seconds=median(each.snapshot_seconds for each in self._checkpoints),
            persist_seconds=self.concurrency.persist_seconds or newest.persist_seconds,
            in_flight=self.concurrency.in_flight,
            cost_seconds=self.cost_seconds,
        )

    @property
    def on_device(self) -> bool:
        """The state, or some of it, was in a device's memory at the last checkpoint."""
        return bool(self._checkpoints) and self._checkpoints[-1].memory_total_bytes > 0

    @property
    def spread(self) -> dict[str, float]:
        """By how much the figures of the profile scatter: the median deviation from the median, by field."""
        found = {
            "iteration_seconds": self._ledger.idle_seconds,
            "update_seconds": list(self._updates),
            "snapshot_seconds": [each.snapshot_seconds for each in self._checkpoints],
            "persist_seconds": list(self._persists),
        }
        return {name: deviation(values) for name, values in found.items() if len(values) > 1}

    @property
    def recovered(self) -> bool:
        """The last few checkpoints became durable much quicker than the few before."""
        return has_dropped(list(self._persists))


def _is_duration(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds >= 0
