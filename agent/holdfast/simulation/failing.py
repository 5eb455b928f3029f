"""When a simulated job fails: by chance, or at given times."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Iterator, Sequence
from typing import Protocol


class Source(Protocol):
    """Where failures come from. Asked before each stretch of running, and told what came of it."""

    def seconds_left(self, now: float, workers: int) -> float:
        """How long the job can run from `now` on before the next failure."""
        ...

    def ran(self, now: float, seconds: float, workers: int) -> None:
        """It ran from `now` for so long, and did not fail."""
        ...

    def failed(self) -> None: ...

    def during_restart(self, now: float, seconds: float) -> float | None:
        """How far a restart that begins `now` gets before it fails too; None: to its end."""
        ...


def even_draws(seed: int, strata: int = 64) -> Iterator[float]:
    """Exponential times of mean 1 in shuffled decks, one from each of so many equally likely ranges.

    Each deck has nearly the mean of all: means over many failures tend to what those of independent draws do, and
    come close to it much sooner. For mean values only.
    """
    chance = random.Random(seed)  # noqa: S311 - a simulation is repeated by its seed
    while True:
        deck = [-math.log1p(-(place + chance.random()) / strata) for place in range(strata)]
        chance.shuffle(deck)
        yield from deck


class PoissonFailures:
    """So many failures a worker's hour, and so many a job's hour whatever its size; only while it runs.

    The same seed gives every policy the same failures: each comes after the same running time since the last.
    """

    def __init__(
        self,
        *,
        per_worker_hour: float = 0.0,
        per_job_hour: float = 0.0,
        seed: int = 0,
        changes: Sequence[tuple[float, float]] = (),
        draws: Iterator[float] | None = None,
    ) -> None:
        """`changes`: from so many seconds of wall time on, so many times the first rate; earliest first."""
        if min(per_worker_hour, per_job_hour) < 0 or any(factor < 0 for _, factor in changes):
            raise ValueError("rates of failures are 0 or more")
        self._per_worker, self._per_job = per_worker_hour / 3600, per_job_hour / 3600
        self._changes = list(changes)
        self._draws = draws if draws is not None else _exponential(seed)
        self._hazard_left = next(self._draws)

    def rate(self, now: float, workers: int) -> float:
        """Failures a second."""
        base = self._per_worker * workers + self._per_job
        if not self._changes:
            return base
        place = bisect.bisect_right(self._changes, (now, math.inf))
        return base * self._changes[place - 1][1] if place else base

    def seconds_left(self, now: float, workers: int) -> float:
        left, at = self._hazard_left, now
        if not self._changes:
            rate = self.rate(now, workers)
            return left / rate if rate > 0 else math.inf
        for start, _ in self._changes:
            if start <= at:
                continue
            rate = self.rate(at, workers)
            if rate * (start - at) >= left:
                return at - now + left / rate
            left -= rate * (start - at)
            at = start
        rate = self.rate(at, workers)
        return at - now + left / rate if rate > 0 else math.inf

    def ran(self, now: float, seconds: float, workers: int) -> None:
        at, end = now, now + seconds
        for start, _ in self._changes:
            if at < start < end:
                self._hazard_left -= self.rate(at, workers) * (start - at)
                at = start
        self._hazard_left = max(0.0, self._hazard_left - self.rate(at, workers) * (end - at))

    def failed(self) -> None:
        self._hazard_left = next(self._draws)

    def during_restart(self, now: float, seconds: float) -> float | None:
        return None


class ListedFailures:
    """At given seconds of wall time. One that falls into a restart makes it begin again."""

    def __init__(self, at_seconds: Sequence[float]) -> None:
        self._at = sorted(at_seconds)
        self._next = 0

    def seconds_left(self, now: float, workers: int) -> float:
        return max(0.0, self._at[self._next] - now) if self._next < len(self._at) else math.inf

    def ran(self, now: float, seconds: float, workers: int) -> None:
        """Its times stand."""

    def failed(self) -> None:
        self._next += 1

    def during_restart(self, now: float, seconds: float) -> float | None:
        left = self.seconds_left(now, 1)
        return left if left < seconds else None


def _exponential(seed: int) -> Iterator[float]:
    chance = random.Random(seed)  # noqa: S311 - a simulation is repeated by its seed
    while True:
        yield chance.expovariate(1.0)
