"""One run of a simulated job: from event to event, at whatever pace its policy asks for."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.pacing import Failures, History, Policy, Profile, Settings

CERTAIN_FAILURES = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Times in seconds. ValueError for one that could never be trained."""

    total_iterations: int
    iteration_seconds: float
    cost_seconds: float = 0.0
    """What one checkpoint costs training, interference included (δ)."""
    lag_seconds: float = 0.0
    """From the end of that cost until it is durable; training goes on meanwhile (L)."""
    restart_seconds: float = 0.0
    """From a failure until it trains again (R)."""

    def __post_init__(self) -> None:
        if self.total_iterations < 1 or not self.iteration_seconds > 0:
            raise ValueError("a job has at least one iteration, and an iteration takes more than 0 s")
        if min(self.cost_seconds, self.lag_seconds, self.restart_seconds) < 0:
            raise ValueError("the times of a job are 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Where a job's wall time went: useful, stalled, lost and restarting time are all of it."""

    wall_seconds: float
    useful_seconds: float
    """Iterations that were not taken back."""
    stall_seconds: float
    """What checkpoints cost, those taken back included."""
    lost_seconds: float
    """Iterations that a failure took back, and what it broke off."""
    restart_seconds: float
    failures: int
    checkpoints: int
    """Those that were finished, durable in time or not."""
    iteration: int
    """Where it stands at the end."""

    @property
    def ettr(self) -> float:
        """Effective training time ratio: useful time over all time."""
        return self.useful_seconds / self.wall_seconds if self.wall_seconds > 0 else 1.0


class FailureSource(Protocol):
    """Where failures come from. Asked before each stretch of running, and told what came of it."""

    def seconds_left(self, now: float) -> float:
        """How long the job can run from `now` on before the next failure."""
        ...

    def ran(self, now: float, seconds: float) -> None:
        """It ran from `now` for so long, and did not fail."""
        ...

    def failed(self) -> None: ...


class PoissonFailures:
    """So many failures an hour of running. The same seed gives every policy the same failures."""

    def __init__(self, per_hour: float, *, seed: int = 0, draws: Iterator[float] | None = None) -> None:
        """`draws`: exponential times of mean 1, in the place of those of `seed`."""
        if per_hour < 0:
            raise ValueError("rates of failures are 0 or more")
        self._rate = per_hour / 3600
        self._draws = draws if draws is not None else _exponential(seed)
        self._hazard_left = next(self._draws)

    def seconds_left(self, now: float) -> float:
        return self._hazard_left / self._rate if self._rate > 0 else math.inf

    def ran(self, now: float, seconds: float) -> None:
        self._hazard_left = max(0.0, self._hazard_left - self._rate * seconds)

    def failed(self) -> None:
        self._hazard_left = next(self._draws)


def _exponential(seed: int) -> Iterator[float]:
    chance = random.Random(seed)  # noqa: S311 - a simulation is repeated by its seed
    while True:
        yield chance.expovariate(1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """What the policy gets to know of failures: by default it learns them from the published rates on."""

    failures: Failures = field(default_factory=Failures)
    """What is plausible_number before the first second."""
    rate: Callable[[float], float] | None = None
    """The true rate at a wall time, failures a second; it takes the place of learning."""


def certain(rate: float) -> Failures:
    """A belief in exactly this rate, failures a second, that nothing will move."""
    return Failures(count=CERTAIN_FAILURES, exposure_seconds=CERTAIN_FAILURES / rate, mean_seconds=1 / rate)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    iteration: int
    durable_at: float
    useful_seconds: float
    """What of the run's time is useful if it goes on from here."""


def simulate(
    job: Job,
    policy: Policy,
    settings: Settings = Settings(),  # noqa: B008 - frozen
    *,
    failures: FailureSource,
    knowledge: Knowledge = Knowledge(),
    replan_seconds: float = 0.0,
    until_seconds: float = math.inf,
) -> Outcome:
    """What becomes of `job` when `policy` paces it and `failures` strike it.

    A checkpoint that is not durable when the job fails is gone, and so is one whose cost was not paid to the end.
    While one is on its way, one that is due waits for the first iteration boundary after that. What finishes the
    job is not counted as a checkpoint.

    Args:
        job: its iterations and costs.
        policy: asked at the start, after each checkpoint and after each failure.
        settings: handed to the policy.
        failures: used up by this run; make one for each.
        knowledge: what the policy gets to know of failures.
        replan_seconds: after a checkpoint the policy is asked again only when its plan is older than this.
        until_seconds: the wall time at which the job is killed for good.
    """
    return _Run(job, policy, settings, failures, knowledge, replan_seconds, until_seconds).to_end()


class _Run:
    def __init__(
        self,
        job: Job,
        policy: Policy,
        settings: Settings,
        failures: FailureSource,
        knowledge: Knowledge,
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
        self._durable = _Snapshot(0, 0.0, 0.0)
        self._pending: _Snapshot | None = None
        self._useful = self._stalled = self._lost = self._restarting = 0.0
        self._failures = self._checkpoints = 0
        self._due: float = math.inf
        self._interval: float = math.inf
        self._planned_at = -math.inf
        self._unseen_seconds = 0.0

    def to_end(self) -> Outcome:
        last = self._job.total_iterations
        self._replan()
        while self._iteration < last and self._clock < self._until:
            self._skip_quiet_intervals(last)
            if self._train_to(int(min(last, self._due))) and self._due <= self._iteration < last:
                self._checkpoint()
        return Outcome(
            wall_seconds=self._clock,
            useful_seconds=self._useful,
            stall_seconds=self._stalled,
            lost_seconds=self._lost,
            restart_seconds=self._restarting,
            failures=self._failures,
            checkpoints=self._checkpoints,
            iteration=self._iteration,
        )

    def _replan(self, *, failures: int = 0) -> None:
        self._believed = self._believed.after(self._unseen_seconds, failures=failures)
        self._unseen_seconds = 0.0
        self._planned_at = self._clock
        plausible_number = self._believed if self._rate is None else certain(self._rate(self._clock))
        history = History(failures=plausible_number, restart_seconds=self._job.restart_seconds)
        interval = self._policy(self._profile, self._settings, history).interval
        self._interval = math.inf if interval is None else max(1, interval)
        self._due = max(self._newest + self._interval, self._iteration)

    @property
    def _newest(self) -> int:
        return (self._pending or self._durable).iteration

    def _skip_quiet_intervals(self, stop: int) -> None:
        """Whole intervals at once, all but the last before something happens."""
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
        self._durable = _Snapshot(int(self._iteration - interval), self._clock - cycle + lag, self._useful - span)
        self._pending = _Snapshot(self._iteration, self._clock + lag, self._useful)
        self._due = self._iteration + interval

    def _train_to(self, stop: int) -> bool:
        """Whether it got there: else it failed or was killed on the way."""
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
        """For how long the job ran, and whether that was all: else it failed or was killed."""
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
        self._pending = _Snapshot(self._iteration, self._clock + self._job.lag_seconds, self._useful)
        if self._clock - self._planned_at >= self._replan_seconds:
            self._replan()
        else:
            self._due = self._iteration + self._interval

    def _settle(self) -> None:
        """What has become durable by now."""
        if self._pending is not None and self._pending.durable_at <= self._clock:
            self._durable, self._pending = self._pending, None

    def _fail(self, broken_seconds: float) -> None:
        self._settle()
        self._pending = None
        self._failures += 1
        self._lost += self._useful - self._durable.useful_seconds + broken_seconds
        self._iteration, self._useful = self._durable.iteration, self._durable.useful_seconds
        self._source.failed()
        took = min(self._job.restart_seconds, self._until - self._clock)
        self._restarting += took
        self._clock += took
        self._replan(failures=1)
