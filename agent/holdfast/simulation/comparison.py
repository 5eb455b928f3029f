"""Comparison of all policies on one simulated job with the same failures, for `holdfast plan --simulate`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from holdfast.pacing import FailureHistory, PacingSettings, Profile, policies
from holdfast.pacing.interval_cost import checkpoint_cost, lag_seconds
from holdfast.pacing.policy import estimate_failures, has_iteration_time
from holdfast.simulation.run import FailureKnowledge, PoissonFailures, SimulatedJob, SimulationOutcome, simulate

RUNS = 20
REPLANS = 200
"""Number of times that a policy plans anew during a job."""
FORESEEN_FAILURES = 30
"""Length of a simulated job in mean times between failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPolicy:
    """The results of one policy over all runs."""

    policy: str
    ettr: float
    """Median; `ettr_low` and `ettr_high` are the quartiles."""
    ettr_low: float
    ettr_high: float
    checkpoints: float
    lost_hours_a_day: float
    """Time per GPU in stalls, repeated work and restarts."""
    runs: int

    @classmethod
    def of(cls, policy: str, outcomes: Sequence[SimulationOutcome]) -> SimulatedPolicy:
        low, median, high = _quartiles([each.ettr for each in outcomes])
        return cls(
            policy=policy,
            ettr=median,
            ettr_low=low,
            ettr_high=high,
            checkpoints=statistics.median(each.checkpoints for each in outcomes),
            lost_hours_a_day=24 * (1 - median),
            runs=len(outcomes),
        )


def _quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def compare_policies(
    profile: Profile, settings: PacingSettings, history: FailureHistory, *, seeds: Iterable[int] = range(RUNS)
) -> list[SimulatedPolicy]:
    """Simulate every policy with the same failures.

    Policies know the failure rate. The job lasts for FORESEEN_FAILURES mean times between failures. `fixed` takes
    part only with an interval.

    Raises:
        ValueError: the profile has no iteration time.
    """
    if not has_iteration_time(profile):
        raise ValueError("the iteration time is unknown, and a simulation needs it")
    rate, cost = estimate_failures(settings, history).rate, checkpoint_cost(profile)
    job = SimulatedJob(
        total_iterations=max(1, round(FORESEEN_FAILURES / rate / profile.iteration_seconds)),
        iteration_seconds=profile.iteration_seconds,
        cost_seconds=cost,
        lag_seconds=max(0.0, lag_seconds(profile) - cost),
        restart_seconds=history.restart_seconds,
    )
    known = FailureKnowledge(rate=lambda now: rate)
    return [
        SimulatedPolicy.of(
            name,
            [
                simulate(
                    job,
                    policy,
                    replace(settings, policy=name),
                    failures=PoissonFailures(rate * 3600, seed=seed),
                    knowledge=known,
                    replan_seconds=job.total_iterations * job.iteration_seconds / REPLANS,
                )
                for seed in seeds
            ],
        )
        for name, policy in sorted(policies.items())
        if name != "fixed" or settings.every is not None
    ]
