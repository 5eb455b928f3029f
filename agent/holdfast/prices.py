"""What each single checkpoint cost training, by what wrote it: rough, and enough to choose between backends."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Callable

BASELINE_ITERATIONS = 31
LEAST_IDLE = 3
"""Without so many idle iterations to compare with, nothing is said."""


class Prices:
    """Adds up how much longer than an idle iteration those took that a checkpoint overlapped."""

    def __init__(self, measured: Callable[[str, float, float], None]) -> None:
        self._measured = measured
        self._idle: collections.deque[float] = collections.deque(maxlen=BASELINE_ITERATIONS)
        self._excess_seconds = 0.0
        self._settled: list[tuple[str, float]] = []

    def settled(self, backend: str, persist_seconds: float) -> None:
        """A checkpoint became durable in the iteration that ends next."""
        self._settled.append((backend, persist_seconds))

    def iteration(self, seconds: float, *, in_flight: bool) -> None:
        """An iteration took so long, waits for data left out."""
        if not in_flight:
            self._idle.append(seconds)
            return
        if len(self._idle) < LEAST_IDLE:
            self._settled.clear()
            return
        self._excess_seconds += seconds - statistics.median(self._idle)
        settled, self._settled = self._settled, []
        for backend, persist_seconds in settled:
            self._measured(backend, self._excess_seconds / len(settled), persist_seconds)
        if settled:
            self._excess_seconds = 0.0
