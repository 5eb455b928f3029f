"""How many checkpoints are written at the same time: as many as shorten the interval, by measurement.

With N under way the next one starts after 1/N of the time that one takes, so that N Ti k >= Tc + Ts(N): the rule
of F. Strati, M. Friedman, A. Klimovic, "PCcheck: Persistent Concurrent Checkpointing for ML", ASPLOS'25, with the
interval as the unknown. What Ts(N) is nobody can say beforehand: where the disk's bandwidth is the limit, N writes
at once take N times as long and nothing is won; where waiting for answers is, they take no longer. So another
number is tried, and the one before it, measured just then, is what it is compared with: a disk that has become
slow is slow for both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

REMEMBERED = 3
"""Checkpoints whose median is Ts, and that a trial lasts."""
PATIENCE = 4 * REMEMBERED
"""A trial in which so many never came to be under way together is over."""
WORTH_IT = 0.1
"""By which share the interval must come out shorter for one more in flight: each holds memory of a whole state."""
TRIED_AGAIN_CHECKPOINTS = 200
"""After a trial; by then the disk may be another."""


@dataclass(slots=True)
class _Trial:
    before: int
    interval_seconds: float
    """That the number before came to, when the trial began."""
    seconds: list[float] = field(default_factory=list)
    """Of checkpoints with as many under way as are tried."""
    seen: int = 0


class Concurrency:
    def __init__(self, limit: int = 1) -> None:
        self.limit = max(1, limit)
        self.in_flight = 1
        """How many there may be at a time now."""
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)
        self._trial: _Trial | None = None
        self._rest = 0
        """For so many checkpoints nothing is tried."""
        self._went_down = False
        """The last trial has shown that fewer do as well."""

    @property
    def persist_seconds(self) -> float | None:
        """Ts, as it was lately; while a number is on trial, before that. None before the first checkpoint."""
        return median(self._seconds) if self._seconds else None

    def measured(self, in_flight: int, seconds: float) -> None:
        """One was written in so many seconds, beside in_flight - 1 others when it began."""
        trial, self._rest = self._trial, max(0, self._rest - 1)
        if trial is None:
            self._seconds.append(seconds)
            return
        trial.seen += 1
        is_more = self.in_flight > trial.before
        if in_flight >= self.in_flight if is_more else in_flight <= self.in_flight:
            trial.seconds.append(seconds)

    def choose(self, snapshot_seconds: float, floor_seconds: float) -> bool:
        """Go up or down by one where that pays; whether the number has changed.

        Args:
            snapshot_seconds: Tc.
            floor_seconds: the interval that the budget or the policy asks for anyway; a shorter one wins nothing.
        """

        def interval_seconds(n: int) -> float:
            return max((snapshot_seconds + median(self._seconds)) / n, floor_seconds)

        before = self.in_flight
        if self._trial is not None:
            self._conclude(self._trial, interval_seconds)
        elif self._seconds:
            self._consider(interval_seconds, floor_seconds)
        return self.in_flight != before

    def _consider(self, interval_seconds: Callable[[int], float], floor_seconds: float) -> None:
        n, now = self.in_flight, interval_seconds(self.in_flight)
        if n > 1 and interval_seconds(n - 1) <= floor_seconds:
            self.in_flight = n - 1  # with fewer each takes no longer than now
        elif self._rest:
            return
        elif n < self.limit and now > floor_seconds * (1 + WORTH_IT) and not (self._went_down and n > 1):
            self._try(n + 1, now)
        elif n > 1:
            self._try(n - 1, now)

    def _try(self, n: int, interval_seconds: float) -> None:
        self._trial = _Trial(self.in_flight, interval_seconds)
        self.in_flight = n

    def _conclude(self, trial: _Trial, interval_seconds: Callable[[int], float]) -> None:
        is_more = self.in_flight > trial.before
        if len(trial.seconds) >= REMEMBERED:
            self._seconds.extend(trial.seconds)
            now = interval_seconds(self.in_flight)
            more, fewer = (now, trial.interval_seconds) if is_more else (trial.interval_seconds, now)
            pays = more <= fewer * (1 - WORTH_IT)
        elif trial.seen >= PATIENCE:
            pays = False  # so many are never under way together
        else:
            return
        self._trial = None
        self._went_down = not is_more and not pays
        self.in_flight = max(self.in_flight, trial.before) if pays else min(self.in_flight, trial.before)
        if not (is_more and pays):
            self._rest = TRIED_AGAIN_CHECKPOINTS
