"""One run of a job: from event to event, at whatever pace its policy asks for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.pacing import Policy, Profile, Settings

from .failing import Source
from .job import Job, Round
from .knowledge import Knowledge, Observer
from .outcome import Outcome


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
    failures: Source,
    knowledge: Knowledge = Knowledge(),  # noqa: B008 - frozen
    replan_seconds: float = 0.0,
    until_seconds: float = math.inf,
) -> Outcome:
    """What becomes of `job` when `policy` paces it and `failures` strike it.

    A checkpoint that is not durable when the job fails is gone, and so is one whose cost was not paid to the end.
    While as many as the job allows are on their way, one that is due waits for the first iteration boundary after
    that. What finishes the job is not counted as a checkpoint.

    Args:
        job: its iterations, costs, workers and loss curve.
        policy: asked at the start, after each checkpoint and failure, and where workers join or leave.
        settings: handed to the policy.
        failures: used up by this run; make one for each.
        knowledge: what the policy gets to know of failures and losses.
        replan_seconds: after a checkpoint the policy is asked again only when its plan is older than this.
        until_seconds: the wall time at which somebody kills it for good.
    """
    return _Run(job, policy, settings, failures, knowledge, replan_seconds, until_seconds).to_end()


class _Run:
    def __init__(
        self,
        job: Job,
        policy: Policy,
        settings: Settings,
        failures: Source,
        knowledge: Knowledge,
        replan_seconds: float,
        until_seconds: float,
    ) -> None:
        self._job, self._policy, self._settings, self._source = job, policy, settings, failures
        self._observer = Observer(knowledge, job.curve)
        self._replan_seconds, self._until = replan_seconds, until_seconds
        self._clock = 0.0
        self._iteration = 0
        self._durable = _Snapshot(0, 0.0, 0.0)
        self._pending: list[_Snapshot] = []
        self._useful = self._stalled = self._lost = self._restarting = self._down = 0.0
        self._failures = self._checkpoints = self._durable_checkpoints = 0
        self._loss_lost = self._loss_delayed = 0.0
        self._targets = [job.curve.iteration_of(loss) for loss in job.targets] if job.curve else []
        self._reached: list[float | None] = [None] * len(self._targets)
        self._unreached = 0
        self._due: float = math.inf
        self._interval: float = math.inf
        self._planned_at = -math.inf
        self._unseen_seconds = 0.0
        self._enter(job.round_at(0))

    def to_end(self) -> Outcome:
        last = self._job.last_iteration
        self._replan()
        while self._iteration < last and self._clock < self._until:
            self._skip_quiet_intervals(min(last, self._round.until_iteration))
            stop = min(last, self._round.until_iteration, self._due)
            if not self._train_to(int(stop)):
                continue
            if self._iteration >= self._due and self._iteration < last:
                self._checkpoint()
            if self._iteration >= self._round.until_iteration:
                self._enter(self._job.round_at(self._iteration))
                self._replan()
        self._settle()
        return self._outcome()

    def _enter(self, entered: Round) -> None:
        self._round = entered
        self._iteration_seconds = self._job.iteration_seconds / entered.speed
        self._cost_seconds = self._job.cost_seconds * entered.cost_factor
        self._profile = Profile(
            iteration_seconds=self._iteration_seconds,
            snapshot_seconds=self._cost_seconds,
            persist_seconds=self._job.lag_seconds,
            cost_seconds=self._cost_seconds,
        )

    def _replan(self) -> None:
        self._observer.ran(self._unseen_seconds)
        self._unseen_seconds = 0.0
        self._planned_at = self._clock
        history = self._observer.history(
            iteration=self._iteration,
            total=self._job.total_iterations,
            now=self._clock,
            workers=self._round.workers,
            checkpoints=self._durable_checkpoints,
            restart_seconds=self._job.restart_seconds + self._job.down_seconds,
        )
        interval = self._policy(self._profile, self._settings, history).interval
        self._interval = math.inf if interval is None else max(1, interval)
        self._due = max(self._newest() + self._interval, self._iteration)

    def _newest(self) -> int:
        return self._pending[-1].iteration if self._pending else self._durable.iteration

    def _skip_quiet_intervals(self, stop: int) -> None:
        """Whole intervals at once, all but the last before something happens; where a curve is followed, none."""
        interval, span = self._interval, self._interval * self._iteration_seconds
        waits = self._job.lag_seconds > span or self._iteration != self._newest()
        if self._job.curve is not None or waits or interval == math.inf:
            return
        cycle = span + self._cost_seconds
        left = min(self._source.seconds_left(self._clock, self._round.workers), self._until - self._clock)
        plan_left = self._planned_at + self._replan_seconds - self._clock
        count = int(min(left / cycle - 1, plan_left / cycle - 1, (stop - 1 - self._iteration) // interval))
        if count < 2:
            return
        self._source.ran(self._clock, count * cycle, self._round.workers)
        self._unseen_seconds += count * cycle
        self._clock += count * cycle
        self._stalled += count * self._cost_seconds
        self._checkpoints += count
        self._durable_checkpoints += len(self._pending) + count - 1
        self._useful += count * span
        self._iteration += int(count * interval)
        before = int(self._iteration - interval)
        self._durable = _Snapshot(before, self._clock - cycle + self._job.lag_seconds, self._useful - span)
        self._pending = [_Snapshot(self._iteration, self._clock + self._job.lag_seconds, self._useful)]
        self._settle()
        self._due = self._iteration + interval

    def _train_to(self, stop: int) -> bool:
        """Whether it got there: else it failed or was killed on the way."""
        seconds = (stop - self._iteration) * self._iteration_seconds
        ran, whole = self._run_for(seconds)
        self._see_targets(ran)
        if whole:
            self._observer.trained(self._iteration, stop)
            self._useful += seconds
            self._iteration = stop
        elif self._clock >= self._until:
            finished = int(ran / self._iteration_seconds)
            self._iteration += finished
            self._useful += finished * self._iteration_seconds
            self._lost += ran - finished * self._iteration_seconds
        else:
            self._fail(broken_seconds=ran)
        return whole

    def _run_for(self, seconds: float) -> tuple[float, bool]:
        """For how long the job ran, and whether that was all: else it failed or was killed."""
        workers = self._round.workers
        left = min(self._source.seconds_left(self._clock, workers), self._until - self._clock)
        whole = seconds <= left
        ran = seconds if whole else left
        killed = not whole and self._clock + ran >= self._until
        if whole or killed:
            self._source.ran(self._clock, ran, workers)
        self._clock = self._until if killed else self._clock + ran
        self._unseen_seconds += ran
        return ran, whole

    def _see_targets(self, ran: float) -> None:
        at = self._iteration + ran / self._iteration_seconds
        while self._unreached < len(self._targets) and self._targets[self._unreached] <= at:
            ahead = max(0.0, self._targets[self._unreached] - self._iteration) * self._iteration_seconds
            self._reached[self._unreached] = self._clock - ran + ahead
            self._unreached += 1

    def _checkpoint(self) -> None:
        self._settle()
        if len(self._pending) >= self._job.in_flight:
            wait = self._pending[-self._job.in_flight].durable_at - self._clock
            self._due = self._iteration + max(1, math.ceil(wait / self._iteration_seconds - 1e-9))
            return
        ran, whole = self._run_for(self._cost_seconds)
        self._stalled += ran
        if not whole:
            if self._clock < self._until:
                self._fail(broken_seconds=0.0)
            return
        self._checkpoints += 1
        if self._job.curve is not None:
            ahead = self._iteration + self._cost_seconds / self._iteration_seconds
            self._loss_delayed += self._job.curve.loss_at(self._iteration) - self._job.curve.loss_at(ahead)
        self._pending.append(_Snapshot(self._iteration, self._clock + self._job.lag_seconds, self._useful))
        self._settle()
        if self._clock - self._planned_at >= self._replan_seconds:
            self._replan()
        else:
            self._due = self._iteration + self._interval

    def _settle(self) -> None:
        """What has become durable by now."""
        while self._pending and self._pending[0].durable_at <= self._clock:
            self._durable = self._pending.pop(0)
            self._durable_checkpoints += 1

    def _fail(self, broken_seconds: float) -> None:
        self._settle()
        self._pending.clear()
        self._failures += 1
        self._lost += self._useful - self._durable.useful_seconds + broken_seconds
        if self._job.curve is not None:
            reached = self._iteration + broken_seconds / self._iteration_seconds
            self._loss_lost += self._job.curve.loss_at(self._durable.iteration) - self._job.curve.loss_at(reached)
        self._iteration, self._useful = self._durable.iteration, self._durable.useful_seconds
        self._observer.ran(self._unseen_seconds, failures=1)
        self._unseen_seconds = 0.0
        self._source.failed()
        self._restart()
        self._enter(self._job.round_at(self._iteration))
        self._replan()

    def _restart(self) -> None:
        """Down and starting again, from the beginning as often as that fails too."""
        down, whole = self._job.down_seconds, self._job.down_seconds + self._job.restart_seconds
        while True:
            struck = self._source.during_restart(self._clock, whole)
            took = min(whole if struck is None else struck, self._until - self._clock)
            self._down += min(took, down)
            self._restarting += max(0.0, took - down)
            self._clock = self._until if took >= self._until - self._clock else self._clock + took
            if struck is None or self._clock >= self._until:
                return
            self._failures += 1
            self._observer.ran(0.0, failures=1)
            self._source.failed()

    def _outcome(self) -> Outcome:
        return Outcome(
            wall_seconds=self._clock,
            useful_seconds=self._useful,
            stall_seconds=self._stalled,
            lost_seconds=self._lost,
            restart_seconds=self._restarting,
            down_seconds=self._down,
            failures=self._failures,
            checkpoints=self._checkpoints,
            iteration=self._iteration,
            durable_iteration=self._durable.iteration,
            loss_lost=self._loss_lost,
            loss_delayed=self._loss_delayed,
            reached_seconds=tuple(self._reached),
        )
