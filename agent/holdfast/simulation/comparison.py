"""Every policy on the same job, with the same failures: what `holdfast plan --simulate` shows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace

from holdfast.pacing import History, Profile, Settings, policies
from holdfast.pacing.interval_cost import checkpoint_cost, lag_seconds
from holdfast.pacing.policy import failures_of, usable_iteration

from .run import Job, Knowledge, Outcome, PoissonFailures, simulate

REPLANS = 200
"""A plan is made anew when it is older than so small a part of the job."""
FORESEEN_FAILURES = 30
"""How long a job is simulated: so many times its mean time between failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one policy came to over all seeds."""

    name: str
    outcomes: tuple[Outcome, ...]
    """In the order of the seeds: two rows' outcomes at one place met the same failures."""

    def quartiles(self, measure: str) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile of a field or property of `Outcome`, such as `ettr`."""
        values = [float(getattr(each, measure)) for each in self.outcomes]
        if len(values) == 1:
            return values[0], values[0], values[0]
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return low, middle, high


def compare_policies(
    profile: Profile, settings: Settings, history: History, *, seeds: Iterable[int] = range(20)
) -> list[Row]:
    """Every policy on the job that a plan was asked for, told the rate of failures: seconds, not minutes.

    The job runs for some thirty times its mean time between failures, as that is believed to be now. `fixed` takes
    part only with an interval.

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
        Row(
            name=name,
            outcomes=tuple(
                simulate(
                    job,
                    policy,
                    replace(settings, policy=name),
                    failures=PoissonFailures(rate * 3600, seed=seed),
                    knowledge=known,
                    replan_seconds=job.total_iterations * job.iteration_seconds / REPLANS,
                )
                for seed in seeds
            ),
        )
        for name, policy in sorted(policies.items())
        if name != "fixed" or settings.every is not None
    ]
