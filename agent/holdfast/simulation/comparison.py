"""Several policies on the same job, with the same failures: what `holdfast plan --simulate` shows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from holdfast.pacing import History, Policy, Profile, Settings, policies
from holdfast.pacing.bounds import checkpoint_cost
from holdfast.pacing.policy import failures_of, known, usable_iteration
from holdfast.pacing.renewal import best_interval_seconds

from .failing import PoissonFailures
from .job import Job
from .knowledge import Knowledge, certain, foreseen
from .outcome import Outcome
from .run import simulate

SEEDS = range(100)
REPLANS = 200
"""A plan is made anew when it is older than so small a part of the job."""
FORESEEN_FAILURES = 30
"""How long a job is simulated where nobody says: so many times its mean time between failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A policy with what it is told."""

    name: str
    policy: Policy
    settings: Settings = field(default_factory=Settings)
    knowledge: Knowledge = field(default_factory=Knowledge)
    replan_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Spread:
    """Over runs: the median and the quartiles on either side of it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(middle, low, high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one policy came to over all seeds."""

    name: str
    outcomes: tuple[Outcome, ...]
    """In the order of the seeds: two rows' outcomes at one place met the same failures."""

    def spread(self, measure: str) -> Spread:
        """Of a field or property of `Outcome`, such as `ettr`, `wall_seconds` or `checkpoints`."""
        return Spread.of([float(getattr(each, measure)) for each in self.outcomes])

    def mean(self, measure: str) -> float:
        return statistics.fmean(float(getattr(each, measure)) for each in self.outcomes)


def compare(
    job: Job,
    ways: Sequence[Way] | None = None,
    *,
    per_worker_hour: float = 0.0,
    per_job_hour: float = 0.0,
    settings: Settings = Settings(),  # noqa: B008 - frozen
    seeds: Iterable[int] = SEEDS,
) -> list[Row]:
    """Each way of pacing `job`, run once for every seed; the same seed brings the same failures to all.

    Args:
        job: what is trained; with a loss curve, rows also say what failures cost in progress.
        ways: the policies to compare; all that are known, as `ways_of` tells them, where it is left out.
        per_worker_hour: failures of hardware, for each worker's hour.
        per_job_hour: failures of software, whatever the number of workers.
        settings: budget and number of checkpoints, where `ways` is left out.
        seeds: one run of each way for every one.
    """
    chosen = ways_of(job, per_worker_hour, per_job_hour, settings) if ways is None else ways
    return [
        Row(
            name=way.name,
            outcomes=tuple(
                simulate(
                    job,
                    way.policy,
                    way.settings,
                    failures=PoissonFailures(
                        per_worker_hour=per_worker_hour, per_job_hour=per_job_hour, seed=seed
                    ),
                    knowledge=way.knowledge,
                    replan_seconds=way.replan_seconds,
                )
                for seed in seeds
            ),
        )
        for way in chosen
    ]


def compare_planned(
    profile: Profile,
    settings: Settings,
    history: History,
    *,
    seeds: Iterable[int] = range(20),
) -> list[Row]:
    """Every policy on the job that a plan was asked for, `holdfast plan --simulate`: seconds, not minutes.

    The job runs for some thirty times its mean time between failures, as that is believed to be now.

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
        lag_seconds=max(0.0, known(profile.snapshot_seconds) + known(profile.persist_seconds) - cost),
        restart_seconds=history.restart_seconds,
        workers=history.failures.world_size,
    )
    return compare(job, per_job_hour=rate * 3600, settings=settings, seeds=seeds)


def ways_of(job: Job, per_worker_hour: float, per_job_hour: float, settings: Settings) -> list[Way]:
    """Every policy there is, told the true rate of failures and, where the job has one, its loss curve.

    Those that share out a number of checkpoints get as many as the best interval would take, unless `settings`
    says how many. `fixed` is in it only with an interval.
    """
    rate = (per_worker_hour * job.workers + per_job_hour) / 3600
    useful_seconds = job.total_iterations * job.iteration_seconds
    if settings.checkpoints is None and rate > 0 and job.cost_seconds > 0:
        count = max(1, round(useful_seconds / best_interval_seconds(rate, job.cost_seconds)))
        settings = replace(settings, checkpoints=count)
    knowledge = Knowledge(
        failures=certain(rate) if rate > 0 else Knowledge().failures,
        rate=(lambda now, workers: (per_worker_hour * workers + per_job_hour) / 3600) if rate > 0 else None,
        progress=foreseen(job.curve, job.total_iterations) if job.curve is not None else None,
    )
    return [
        Way(
            name=name,
            policy=policy,
            settings=replace(settings, policy=name),
            knowledge=knowledge,
            replan_seconds=useful_seconds / REPLANS,
        )
        for name, policy in sorted(policies.items())
        if name != "fixed" or settings.every is not None
    ]
