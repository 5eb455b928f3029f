"""Comparison of the ETTR formula with the simulator, which does not use it."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.pacing import PacingSettings, policies
from holdfast.pacing.interval_cost import effective_training_ratio, optimal_interval_seconds
from holdfast.simulation import PoissonFailures, SimulatedJob, simulate

MEAN_SECONDS = 11124.0
"""Mean time between failures, 3.09 h as for Llama 3; all other times are given in units of it."""
STANDARD_ERROR = 0.0006
DECK = 32
FEWEST_BATCHES, MOST_BATCHES = 4, 40
STRETCHES = 8_000
"""Approximate length of a batch in intervals."""


@dataclass(frozen=True, slots=True)
class AgreementPoint:
    """Times in units of the mean time between failures."""

    cost: float
    interval: float
    lag: float
    restart: float

    def seconds(self) -> dict[str, float]:
        times = {"cost_seconds": self.cost, "lag_seconds": self.lag, "restart_seconds": self.restart}
        return {name: share * MEAN_SECONDS for name, share in times.items()}

    def predicted(self) -> float:
        return effective_training_ratio(self.interval * MEAN_SECONDS, rate=1 / MEAN_SECONDS, **self.seconds())


def grid() -> list[AgreementPoint]:
    """Return 50 points: costs from a millionth to the whole MTBF; half, once and twice the best interval; lags and
    restarts of large jobs."""
    points = []
    for cost in (1e-6, 1e-5, 1e-4, 4.5e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 1.0):
        best = optimal_interval_seconds(1.0, cost)
        for factor, lag, restart in (
            (1.0, 0.0, 0.0),
            (0.5, 0.0, 0.03),
            (2.0, 0.0, 0.1),
            (1.0, min(best, 0.011), 0.027),
            (2.0, min(best, 0.02), 0.05),
        ):
            points.append(AgreementPoint(cost, factor * best, lag, restart))
    return points


def simulated(point: AgreementPoint, standard_error: float = STANDARD_ERROR) -> tuple[float, float]:
    """Return ETTR and its standard error, from as many batches as that takes."""
    ratios: list[float] = []
    error = math.inf
    while len(ratios) < FEWEST_BATCHES or (error > standard_error and len(ratios) < MOST_BATCHES):
        ratios.append(_batch(point, seed=len(ratios)))
        if len(ratios) >= FEWEST_BATCHES:
            error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    return statistics.fmean(ratios), error


def _batch(point: AgreementPoint, seed: int) -> float:
    """Simulate one batch, with one iteration per interval."""
    stretches_a_failure = 1 + 1 / (point.interval + point.cost)
    failures = DECK * max(1, round(STRETCHES / stretches_a_failure / DECK))
    job = SimulatedJob(total_iterations=10**12, iteration_seconds=point.interval * MEAN_SECONDS, **point.seconds())
    return simulate(
        job, policies["fixed"], PacingSettings(every=1, budget=1.0), replan_seconds=math.inf,
        failures=PoissonFailures(3600 / MEAN_SECONDS, draws=even_draws(seed)),
        until_seconds=failures * (1 + point.restart) * MEAN_SECONDS,
    ).ettr  # fmt: skip


def even_draws(seed: int, strata: int = DECK) -> Iterator[float]:
    """Yield stratified exponential variables of mean 1: each shuffled deck has one from every quantile range.

    Means converge to those of independent draws, only faster. For mean values only.
    """
    chance = random.Random(seed)
    while True:
        deck = [-math.log1p(-(place + chance.random()) / strata) for place in range(strata)]
        chance.shuffle(deck)
        yield from deck


def ettr_max_error() -> float:
    """Return the largest difference between formula and simulation."""
    return max(abs(simulated(point)[0] - point.predicted()) for point in grid())
