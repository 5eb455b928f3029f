"""Simulated jobs: one run from event to event, and the comparison of all policies."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from holdfast.pacing import FailureEstimate, FailureHistory, PacingSettings, Policy, Profile, policies
from holdfast.pacing.interval_cost import checkpoint_cost, lag_seconds
from holdfast.pacing.policy import estimate_failures, has_iteration_time
from holdfast.simulation.trace import TraceFailures

CERTAIN_FAILURES = 1e9
RUNS = 20
REPLANS = 200
"""Number of times that a policy plans anew during a job."""
FORESEEN_FAILURES = 30
"""Length of a simulated job in mean times between failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedJob:
    """The iterations and costs of a job."""

    total_iterations: int
    iteration_seconds: float
    cost_seconds: float = 0.0
    """Training time that one checkpoint costs, interference included (δ)."""
    lag_seconds: float = 0.0
    """Time from the end of that cost until the checkpoint is durable, while training continues (L)."""
    restart_seconds: float = 0.0
    """Time from a failure until training continues (R)."""

    def __post_init__(self) -> None:
        if self.total_iterations < 1 or not self.iteration_seconds > 0:
            raise ValueError("a job has at least one iteration, and an iteration takes more than 0 s")
        if min(self.cost_seconds, self.lag_seconds, self.restart_seconds) < 0:
            raise ValueError("the times of a job are 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOutcome:
    """The wall time of a job as the sum of useful, stall, lost, restart and waiting time."""

    wall_seconds: float
    useful_seconds: float
    """Time of iterations that no failure undid."""
    stall_seconds: float
    """Cost of all checkpoints, lost ones included."""
    lost_seconds: float
    """Time of iterations that a failure undid or interrupted."""
    restart_seconds: float
    waiting_seconds: float = 0.0
    """Time without enough healthy nodes."""
    failures: int
    checkpoints: int
    """Completed checkpoints, durable or not."""
    iteration: int
    """The last iteration reached."""

    @property
    def ettr(self) -> float:
        """Effective training time ratio: useful time / wall time."""
        return self.useful_seconds / self.wall_seconds if self.wall_seconds > 0 else 1.0


class Failures(Protocol):
    """When a job fails."""

    def seconds_left(self, now: float) -> float:
        """Return how long the job can run from `now` until the next failure."""

    def ran(self, now: float, seconds: float) -> None:
        """Advance: the job ran from `now` for `seconds` without a failure."""

    def failed(self, now: float) -> float:
        """Advance past the failure at `now`; return how long the job waits for nodes before it restarts."""


class PoissonFailures:
    """Failures at a constant rate; the same seed gives every policy the same failures."""

    def __init__(self, per_hour: float, *, seed: int = 0, draws: Iterator[float] | None = None) -> None:
        """`draws`: exponential variables of mean 1 that replace those of `seed`."""
        if per_hour < 0:
            raise ValueError("a failure rate must not be negative")
        self._rate = per_hour / 3600
        self._draws = draws if draws is not None else _exponential(seed)
        self._hazard_left = next(self._draws)

    def seconds_left(self, now: float) -> float:
        return self._hazard_left / self._rate if self._rate > 0 else math.inf

    def ran(self, now: float, seconds: float) -> None:
        self._hazard_left = max(0.0, self._hazard_left - self._rate * seconds)

    def failed(self, now: float) -> float:
        self._hazard_left = next(self._draws)
        return 0.0


def _exponential(seed: int) -> Iterator[float]:
    chance = random.Random(seed)  # noqa: S311 - a simulation is repeated by its seed
    while True:
        yield chance.expovariate(1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureKnowledge:
    """What the policy knows of failures; by default it starts with the published rate and learns."""

    failures: FailureEstimate = field(default_factory=FailureEstimate)
    """The prior estimate."""
    rate: Callable[[float], float] | None = None
    """The true rate in failures per second at a wall time; replaces learning."""


def certain(rate: float) -> FailureEstimate:
    """Return an estimate of exactly this rate, in failures per second, that no observation changes."""
    return FailureEstimate(count=CERTAIN_FAILURES, exposure_seconds=CERTAIN_FAILURES / rate, mean_seconds=1 / rate)


@dataclass(frozen=True, slots=True)
class _SimulatedCheckpoint:
    iteration: int
    durable_at: float
    useful_seconds: float
    """Useful time of the run up to this checkpoint."""


def simulate(
    job: SimulatedJob,
    policy: Policy,
    settings: PacingSettings = PacingSettings(),  # noqa: B008 - frozen
    *,
    failures: Failures,
    knowledge: FailureKnowledge = FailureKnowledge(),
    replan_seconds: float = 0.0,
    until_seconds: float = math.inf,
) -> SimulationOutcome:
    """Simulate `job` with `policy` and `failures`.

    A failure loses a checkpoint that is not durable or not completed. A checkpoint that is due while another is in
    flight waits for the first iteration boundary after that one is durable. The end of the job counts no
    checkpoint.

    Args:
        policy: called at the start, after each checkpoint and after each failure.
        failures: consumed by this run.
        knowledge: what the policy knows of failures.
        replan_seconds: minimum age of a plan before the policy is called again after a checkpoint.
    """
    return _Simulation(job, policy, settings, failures, knowledge, replan_seconds, until_seconds).to_end()


class _Simulation:
    def __init__(
        self,
        job: SimulatedJob,
        policy: Policy,
        settings: PacingSettings,
        failures: Failures,
        knowledge: FailureKnowledge,
        replan_seconds: float,
        until_seconds: float,
    ) -> None:
        self._job, self._policy, self._settings, self._source = job, policy, settings, failures
        self._rate, self._believed = knowledge.rate, knowledge.failures
        self._replan_seconds, self._until = replan_seconds, until_seconds
        self._profile = Profile(
            iteration_seconds=job.iteration_seconds,
            snapshot_seconds=job.cost_seconds,
            persist_seconds=job.lag_seconds,
            cost_seconds=job.cost_seconds,
        )
        self._clock = 0.0
        self._iteration = 0
        self._durable = _SimulatedCheckpoint(0, 0.0, 0.0)
        self._pending: _SimulatedCheckpoint | None = None
        self._useful = self._stalled = self._lost = self._restarting = self._waiting = 0.0
        self._failures = self._checkpoints = 0
        self._due: float = math.inf
        self._interval: float = math.inf
        self._planned_at = -math.inf
        self._unseen_seconds = 0.0

    def to_end(self) -> SimulationOutcome:
        last = self._job.total_iterations
        self._replan()
        while self._iteration < last and self._clock < self._until:
            self._skip_quiet_intervals(last)
            if self._train_to(int(min(last, self._due))) and self._due <= self._iteration < last:
                self._checkpoint()
        return SimulationOutcome(
            wall_seconds=self._clock,
            useful_seconds=self._useful,
            stall_seconds=self._stalled,
            lost_seconds=self._lost,
            restart_seconds=self._restarting,
            waiting_seconds=self._waiting,
            failures=self._failures,
            checkpoints=self._checkpoints,
            iteration=self._iteration,
        )

    def _replan(self, *, failures: int = 0) -> None:
        self._believed = self._believed.after(self._unseen_seconds, failures=failures)
        self._unseen_seconds = 0.0
        self._planned_at = self._clock
        believed = self._believed if self._rate is None else certain(self._rate(self._clock))
        history = FailureHistory(failures=believed, restart_seconds=self._job.restart_seconds)
        interval = self._policy(self._profile, self._settings, history).interval
        self._interval = math.inf if interval is None else max(1, interval)
        self._due = max(self._newest + self._interval, self._iteration)

    @property
    def _newest(self) -> int:
        return (self._pending or self._durable).iteration

    def _skip_quiet_intervals(self, stop: int) -> None:
        """Advance by whole intervals, up to the last one before the next event."""
        interval, span = self._interval, self._interval * self._job.iteration_seconds
        if interval == math.inf or self._job.lag_seconds > span or self._iteration != self._newest:
            return
        cycle = span + self._job.cost_seconds
        left = min(self._source.seconds_left(self._clock), self._until - self._clock)
        plan_left = self._planned_at + self._replan_seconds - self._clock
        count = int(min(left / cycle - 1, plan_left / cycle - 1, (stop - 1 - self._iteration) // interval))
        if count < 2:
            return
        self._source.ran(self._clock, count * cycle)
        self._unseen_seconds += count * cycle
        self._clock += count * cycle
        self._stalled += count * self._job.cost_seconds
        self._checkpoints += count
        self._useful += count * span
        self._iteration += int(count * interval)
        lag = self._job.lag_seconds
        self._durable = _SimulatedCheckpoint(
            int(self._iteration - interval), self._clock - cycle + lag, self._useful - span
        )
        self._pending = _SimulatedCheckpoint(self._iteration, self._clock + lag, self._useful)
        self._due = self._iteration + interval

    def _train_to(self, stop: int) -> bool:
        """Train to iteration `stop`; return whether it was reached."""
        seconds = (stop - self._iteration) * self._job.iteration_seconds
        ran, whole = self._run_for(seconds)
        if whole:
            self._useful += seconds
            self._iteration = stop
        elif self._clock >= self._until:
            finished = int(ran / self._job.iteration_seconds)
            self._iteration += finished
            self._useful += finished * self._job.iteration_seconds
            self._lost += ran - finished * self._job.iteration_seconds
        else:
            self._fail(broken_seconds=ran)
        return whole

    def _run_for(self, seconds: float) -> tuple[float, bool]:
        """Run for up to `seconds`; return the time that the job ran, and whether that was all."""
        left = min(self._source.seconds_left(self._clock), self._until - self._clock)
        whole = seconds <= left
        ran = seconds if whole else left
        killed = not whole and self._clock + ran >= self._until
        if whole or killed:
            self._source.ran(self._clock, ran)
        self._clock = self._until if killed else self._clock + ran
        self._unseen_seconds += ran
        return ran, whole

    def _checkpoint(self) -> None:
        self._settle()
        if self._pending is not None:
            wait = self._pending.durable_at - self._clock
            self._due = self._iteration + max(1, math.ceil(wait / self._job.iteration_seconds - 1e-9))
            return
        ran, whole = self._run_for(self._job.cost_seconds)
        self._stalled += ran
        if not whole:
            if self._clock < self._until:
                self._fail(broken_seconds=0.0)
            return
        self._checkpoints += 1
        self._pending = _SimulatedCheckpoint(self._iteration, self._clock + self._job.lag_seconds, self._useful)
        if self._clock - self._planned_at >= self._replan_seconds:
            self._replan()
        else:
            self._due = self._iteration + self._interval

    def _settle(self) -> None:
        """Make the pending checkpoint durable if its time has come."""
        if self._pending is not None and self._pending.durable_at <= self._clock:
            self._durable, self._pending = self._pending, None

    def _fail(self, broken_seconds: float) -> None:
        self._settle()
        self._pending = None
        self._failures += 1
        self._lost += self._useful - self._durable.useful_seconds + broken_seconds
        self._iteration, self._useful = self._durable.iteration, self._durable.useful_seconds
        waits = min(self._source.failed(self._clock), self._until - self._clock)
        took = min(self._job.restart_seconds, self._until - self._clock - waits)
        self._waiting += waits
        self._restarting += took
        self._clock += waits + took
        self._replan(failures=1)


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
    """Time per GPU in stalls, repeated work, restarts and waits for nodes."""
    stall_share: float
    """Mean share of the wall time in checkpoints; the shares below are means, too."""
    lost_share: float
    """Work that failures undid."""
    restart_share: float
    waiting_share: float
    """Without enough healthy nodes."""
    failures: float
    runs: int

    @classmethod
    def of(cls, policy: str, outcomes: Sequence[SimulationOutcome]) -> SimulatedPolicy:
        low, median, high = _quartiles([outcome.ettr for outcome in outcomes])
        wall = sum(outcome.wall_seconds for outcome in outcomes) or 1.0
        return cls(
            policy=policy,
            ettr=median,
            ettr_low=low,
            ettr_high=high,
            checkpoints=statistics.median(outcome.checkpoints for outcome in outcomes),
            lost_hours_a_day=24 * (1 - median),
            stall_share=sum(outcome.stall_seconds for outcome in outcomes) / wall,
            lost_share=sum(outcome.lost_seconds for outcome in outcomes) / wall,
            restart_share=sum(outcome.restart_seconds for outcome in outcomes) / wall,
            waiting_share=sum(outcome.waiting_seconds for outcome in outcomes) / wall,
            failures=statistics.median(outcome.failures for outcome in outcomes),
            runs=len(outcomes),
        )


def _quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def compare_policies(
    profile: Profile,
    settings: PacingSettings,
    history: FailureHistory,
    *,
    seeds: Iterable[int] = range(RUNS),
    trace: Callable[[int], TraceFailures] | None = None,
) -> list[SimulatedPolicy]:
    """Simulate every policy with the same failures. `fixed` takes part only with an interval.

    Args:
        trace: failures of a run, by its seed. The job then lasts as long as the trace, and policies learn the
            failure rate from `history` on. Without it, failures have a constant rate, which the policies know, and
            the job lasts for FORESEEN_FAILURES mean times between failures.

    Raises:
        ValueError: the profile has no iteration time.
    """
    if not has_iteration_time(profile):
        raise ValueError("the iteration time is unknown, and a simulation needs it")
    failures, cost = estimate_failures(settings, history), checkpoint_cost(profile)
    seeds = list(seeds)
    seconds = FORESEEN_FAILURES / failures.rate if trace is None else trace(seeds[0]).seconds
    job = SimulatedJob(
        total_iterations=max(1, round(seconds / profile.iteration_seconds)),
        iteration_seconds=profile.iteration_seconds,
        cost_seconds=cost,
        lag_seconds=max(0.0, lag_seconds(profile) - cost),
        restart_seconds=history.restart_seconds,
    )
    knowledge = FailureKnowledge(failures=failures, rate=None if trace else lambda now: failures.rate)

    def run(name: str, policy: Policy, seed: int) -> SimulationOutcome:
        return simulate(
            job,
            policy,
            replace(settings, policy=name),
            failures=trace(seed) if trace else PoissonFailures(failures.rate * 3600, seed=seed),
            knowledge=knowledge,
            replan_seconds=seconds / REPLANS,
            until_seconds=seconds if trace else math.inf,
        )

    return [
        SimulatedPolicy.of(name, [run(name, policy, seed) for seed in seeds])
        for name, policy in sorted(policies.items())
        if name != "fixed" or settings.every is not None
    ]
