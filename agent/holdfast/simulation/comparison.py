"""Every policy on the same job, with the same failures: what `holdfast plan --simulate` shows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from holdfast.pacing import History, Profile, Settings, policies
from holdfast.pacing.interval_cost import checkpoint_cost, lag_seconds
from holdfast.pacing.policy import failures_of, usable_iteration
from holdfast.simulation.run import Job, Knowledge, Outcome, PoissonFailures, simulate

RUNS = 20
REPLANS = 200
"""A plan is made anew when it is older than so small a part of the job."""
FORESEEN_FAILURES = 30
"""How long a job is simulated: so many times its mean time between failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What one policy came to, over all runs."""

    policy: str
    ettr: float
    """The median; the lower quartile is `ettr_low`."""
    ettr_low: float
    ettr_high: float
    checkpoints: float
    lost_hours_a_day: float
    """Of each GPU: stalls, work done twice, restarts."""
    runs: int

    @classmethod
    def of(cls, policy: str, outcomes: Sequence[Outcome]) -> Simulated:
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
    profile: Profile, settings: Settings, history: History, *, seeds: Iterable[int] = range(RUNS)
) -> list[Simulated]:
    """Run every policy on the job that a plan was asked for, with the same failures for all.

    Policies are told the rate of failures. The job runs for some thirty times its mean time between failures, as
    that is believed to be now. `fixed` takes part only with an interval.

    Raises:
        ValueError: the profile has no iteration time.
    """
    if not usable_iteration(profile):
        raise ValueError("the time of an iteration is not known: nothing can be simulated without it")
    rate, cost = failures_of(settings, history).rate, checkpoint_cost(profile)
    job = Job(
        total_iterations=max(1, round(FORESEEN_FAILURES / rate / profile.iteration_seconds)),
        iteration_seconds=profile.iteration_seconds,
        cost_seconds=cost,
        lag_seconds=max(0.0, lag_seconds(profile) - cost),
        restart_seconds=history.restart_seconds,
    )
    known = Knowledge(rate=lambda now: rate)
    return [
        Simulated.of(
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
