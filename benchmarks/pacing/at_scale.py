"""All policies on a simulated job: 54 days on 16,384 GPUs at the failure rate of Llama 3."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from holdfast.pacing import FailureEstimate, PacingSettings, Policy, policies
from holdfast.simulation import FailureKnowledge, PoissonFailures, SimulatedJob, SimulationOutcome, simulate

DAY = 86400.0
MTBF_SECONDS = 3.09 * 3600
WORKERS = 16_384
ITERATION_SECONDS = 5.0
REPLAN_SECONDS = 1800.0
JOB = SimulatedJob(
    total_iterations=round(54 * DAY / ITERATION_SECONDS),
    iteration_seconds=ITERATION_SECONDS,
    cost_seconds=5.0,
    lag_seconds=120.0,
    restart_seconds=300.0,
)
KNOWN = FailureKnowledge(rate=lambda now: 1 / MTBF_SECONDS)


def learning(wrong_by: float = 1.0) -> FailureKnowledge:
    """Return a prior with so many times the true MTBF, which observations correct."""
    return FailureKnowledge(failures=FailureEstimate(world_size=WORKERS, mean_seconds=wrong_by * MTBF_SECONDS))


class PolicyAtScale(NamedTuple):
    """ETTR over 54 days: median and quartiles over the seeds."""

    name: str
    median: float
    low: float
    high: float
    checkpoints: float


def at_scale(seeds: Sequence[int]) -> Iterator[PolicyAtScale]:
    half_hour = PacingSettings(every=round(1800 / ITERATION_SECONDS))
    asked: list[tuple[str, str, PacingSettings, FailureKnowledge]] = [
        ("goodput, rate known", "goodput", PacingSettings(), KNOWN),
        ("goodput, rate learned", "goodput", PacingSettings(), learning()),
        ("young-daly, rate learned", "young-daly", PacingSettings(), learning()),
        ("checkfreq, 3.5 %", "checkfreq", PacingSettings(), learning()),
        ("checkfreq, 10 %", "checkfreq", PacingSettings(budget=0.10), learning()),
        ("every half hour", "fixed", half_hour, learning()),
    ]
    for name, policy, settings, knowledge in asked:
        runs = [run(policies[policy], seed, settings=settings, knowledge=knowledge) for seed in seeds]
        low, middle, high = statistics.quantiles([each.ettr for each in runs], n=4, method="inclusive")
        yield PolicyAtScale(name, middle, low, high, statistics.median(each.checkpoints for each in runs))


class ChangingFailures(PoissonFailures):
    """Failures whose rate changes by a factor at a wall time."""

    def __init__(self, per_hour: float, *, seed: int, at_seconds: float, factor: float) -> None:
        super().__init__(per_hour, seed=seed)
        self._at, self._factor = at_seconds, factor

    def seconds_left(self, now: float) -> float:
        left = super().seconds_left(now)
        before = max(0.0, self._at - now)
        return left if left <= before else before + (left - before) / self._factor

    def ran(self, now: float, seconds: float) -> None:
        before = min(seconds, max(0.0, self._at - now))
        super().ran(now, before + (seconds - before) * self._factor)


def run(
    policy: Policy,
    seed: int,
    *,
    settings: PacingSettings = PacingSettings(),  # noqa: B008 - frozen
    knowledge: FailureKnowledge = KNOWN,
    days: float = 1000.0,
    failures: PoissonFailures | None = None,
) -> SimulationOutcome:
    """Simulate JOB for so many days of wall time."""
    failures = failures or PoissonFailures(3600 / MTBF_SECONDS, seed=seed)
    return simulate(
        JOB, policy, settings, failures=failures, knowledge=knowledge, replan_seconds=REPLAN_SECONDS,
        until_seconds=days * DAY,
    )  # fmt: skip


def regret_of_wrong_prior(wrong_by: float, seeds: Sequence[int], days: float = 3.0) -> float:
    """Return the mean ETTR lost in the first days to an MTBF so many times too long, against the known rate."""
    goodput = policies["goodput"]
    return statistics.fmean(
        run(goodput, seed, days=days).ettr - run(goodput, seed, knowledge=learning(wrong_by), days=days).ettr
        for seed in seeds
    )


def regret_of_change(factor: float, seeds: Sequence[int], *, at_day: float = 14.0, days: float = 28.0) -> float:
    """Return the mean ETTR lost in the days after an unknown change of the rate, against a known one."""
    when = at_day * DAY

    def true_rate(now: float) -> float:
        return (factor if now >= when else 1.0) / MTBF_SECONDS

    def after(knowledge: FailureKnowledge, seed: int) -> float:
        def until(end: float) -> SimulationOutcome:
            failures = ChangingFailures(3600 / MTBF_SECONDS, seed=seed, at_seconds=when, factor=factor)
            return run(policies["goodput"], seed, knowledge=knowledge, days=end, failures=failures)

        before, whole = until(at_day), until(at_day + days)
        return (whole.useful_seconds - before.useful_seconds) / (whole.wall_seconds - before.wall_seconds)

    return statistics.fmean(
        after(FailureKnowledge(rate=true_rate), seed) - after(learning(), seed) for seed in seeds
    )
