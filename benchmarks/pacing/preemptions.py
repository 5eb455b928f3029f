"""`python -m benchmarks.pacing.preemptions`: whether a policy should count preemptions as failures.

Preemptions of spot machines come in bursts: gaps with a coefficient of variation of 2 and 3. If the grace period
works, a preempted job saves at once and loses only its restart, which no interval changes: crashes alone decide.
If it does not, each preemption loses what a crash does.
"""

from __future__ import annotations

import itertools
import random
import statistics

from benchmarks.harness import run
from holdfast.pacing import PacingSettings, policies
from holdfast.simulation import FailureKnowledge, SimulatedJob, simulate

JOB = SimulatedJob(
    total_iterations=10**12, iteration_seconds=1.0, cost_seconds=5.0, lag_seconds=60.0, restart_seconds=300.0
)
HOUR = 3600.0
CRASH_SECONDS = 200 * HOUR
PREEMPTION_SECONDS = (HOUR, 4 * HOUR)
VARIATIONS = (2.0, 3.0)
SEEDS = range(8)
JOB_SECONDS = 400 * HOUR


class SpotFailures:
    """Crashes at a constant rate and, unless they save at once, preemptions in bursts."""

    def __init__(self, preemption_seconds: float, variation: float, seed: int, *, saves: bool) -> None:
        self._chance, self._mean, self._shape = random.Random(seed), preemption_seconds, variation**-2
        self._saves = saves
        self._crash_at = self._chance.expovariate(1 / CRASH_SECONDS)
        self._preempted_at = self._gap()

    def _gap(self) -> float:
        return self._chance.gammavariate(self._shape, self._mean / self._shape)

    def seconds_left(self, now: float) -> float:
        return max(0.0, (self._crash_at if self._saves else min(self._crash_at, self._preempted_at)) - now)

    def ran(self, now: float, seconds: float) -> None:
        """Nothing to do: the times are fixed."""

    def failed(self, now: float) -> float:
        if self._crash_at <= now:
            self._crash_at = now + self._chance.expovariate(1 / CRASH_SECONDS)
        while self._preempted_at <= now:
            self._preempted_at += self._gap()
        return 0.0


def ettr(preemption_seconds: float, variation: float, *, saves: bool, counted: bool) -> float:
    """Return the mean ETTR of the default policy, without the restarts after preemptions that save."""
    rate = 1 / CRASH_SECONDS + (1 / preemption_seconds if counted else 0.0)
    return statistics.fmean(
        simulate(
            JOB,
            policies[PacingSettings().policy],
            failures=SpotFailures(preemption_seconds, variation, seed, saves=saves),
            knowledge=FailureKnowledge(rate=lambda now: rate),
            replan_seconds=HOUR,
            until_seconds=JOB_SECONDS,
        ).ettr
        for seed in SEEDS
    )


def main() -> dict[str, float]:
    figures: dict[str, float] = {}
    print("ETTR with preemptions counted as failures, less that without, in points:")
    for saves, seconds, variation in itertools.product((True, False), PREEMPTION_SECONDS, VARIATIONS):
        counted, left_out = (ettr(seconds, variation, saves=saves, counted=each) for each in (True, False))
        points = round(100 * (counted - left_out), 2)
        grace = "grace" if saves else "no_grace"
        figures[f"counted_points_{grace}_{seconds / HOUR:.0f}h_cv_{variation:.0f}"] = points
        print(
            f"  {'saved at once' if saves else 'nothing saved'}, one in {seconds / HOUR:.0f} h, "
            f"coefficient of variation {variation:g}: {points:+.2f} ({counted:.2%}, {left_out:.2%})",
            flush=True,
        )
    return figures


if __name__ == "__main__":
    run(main)
