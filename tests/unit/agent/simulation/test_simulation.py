"""A simulated job: its arithmetic by hand, its chances by seed."""

from __future__ import annotations

import math
import statistics
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings, strategies

from holdfast.pacing import FailureEstimate, FailureHistory, IntervalPlan, PacingSettings, Profile, policies
from holdfast.simulation import (
    FailureKnowledge,
    PoissonFailures,
    SimulatedJob,
    SimulationOutcome,
    certain,
    compare_policies,
    simulate,
)
from holdfast.simulation.run import _Simulation

SMALL = SimulatedJob(
    total_iterations=10, iteration_seconds=10.0, cost_seconds=1.0, lag_seconds=3.0, restart_seconds=5.0
)
LARGE = SimulatedJob(
    total_iterations=54 * 86400 // 5,
    iteration_seconds=5.0,
    cost_seconds=5.0,
    lag_seconds=120.0,
    restart_seconds=300.0,
)
AN_HOUR = 1 / 3.09
"""Failures of `LARGE`, as of 16,384 GPUs."""


class ListedFailures:
    """At given seconds of wall time."""

    def __init__(self, at_seconds: tuple[float, ...]) -> None:
        self._at = list(at_seconds)

    def seconds_left(self, now: float) -> float:
        return max(0.0, self._at[0] - now) if self._at else math.inf

    def ran(self, now: float, seconds: float) -> None:
        """Its times stand."""

    def failed(self, now: float) -> float:
        del self._at[0]
        return 0.0


def every(job: SimulatedJob, k: int, *failures: float, until: float = math.inf) -> SimulationOutcome:
    return simulate(
        job, policies["fixed"], PacingSettings(every=k), failures=ListedFailures(failures), until_seconds=until
    )


def parts(outcome: SimulationOutcome) -> float:
    return outcome.useful_seconds + outcome.stall_seconds + outcome.lost_seconds + outcome.restart_seconds


def test_without_failures_time_is_iterations_and_checkpoints():
    outcome = every(SMALL, 2)
    assert outcome.wall_seconds == 104.0
    assert (outcome.useful_seconds, outcome.stall_seconds, outcome.lost_seconds) == (100.0, 4.0, 0.0)
    assert (outcome.checkpoints, outcome.failures, outcome.iteration) == (4, 0, 10)
    assert outcome.ettr == 100 / 104


def test_a_job_that_takes_no_checkpoints_starts_over():
    outcome = every(SMALL, 100, 95.0)
    assert (outcome.wall_seconds, outcome.lost_seconds, outcome.checkpoints) == (200.0, 95.0, 0)


def test_two_failures_come_out_as_by_hand():
    """The first before a checkpoint is durable, the second while one is taken."""
    outcome = every(SMALL, 2, 43.0, 89.5)
    assert outcome.wall_seconds == 43.0 + 5.0 + 41.5 + 5.0 + 62.0
    assert outcome.useful_seconds == 100.0
    assert outcome.stall_seconds == 5.5
    assert outcome.lost_seconds == 41.0
    assert outcome.restart_seconds == 10.0
    assert (outcome.failures, outcome.checkpoints) == (2, 5)


@given(
    seed=strategies.integers(0, 10_000),
    interval=strategies.integers(1, 40),
    cost=strategies.floats(0, 30),
    lag=strategies.floats(0, 200),
    until=strategies.floats(1, 5000),
)
@settings(max_examples=200, deadline=None)
def test_the_parts_are_all_of_the_wall_time(seed, interval, cost, lag, until):
    job = SimulatedJob(
        total_iterations=100, iteration_seconds=7.0, cost_seconds=cost, lag_seconds=lag, restart_seconds=20.0
    )
    failures = PoissonFailures(8.0, seed=seed)
    outcome = simulate(
        job, policies["fixed"], PacingSettings(every=interval), failures=failures, until_seconds=until
    )
    assert parts(outcome) == pytest.approx(outcome.wall_seconds, rel=1e-9)
    assert outcome.wall_seconds <= until
    assert min(outcome.useful_seconds, outcome.lost_seconds) >= 0


def test_the_same_seed_is_the_same_run():
    def run(seed: int) -> SimulationOutcome:
        failures = PoissonFailures(AN_HOUR, seed=seed)
        return simulate(LARGE, policies["goodput"], failures=failures, until_seconds=86400.0)

    assert run(5) == run(5)
    assert run(5) != run(6)


def test_more_failures_leave_less_of_the_time():
    def ettr(per_hour: float) -> float:
        runs = (
            simulate(
                replace(LARGE, total_iterations=50_000),
                policies["fixed"],
                PacingSettings(every=60),
                failures=PoissonFailures(per_hour, seed=seed),
                replan_seconds=math.inf,
            )
            for seed in range(5)
        )
        return statistics.fmean(each.ettr for each in runs)

    ratios = [ettr(per_hour) for per_hour in (0.0, 0.1, 0.3, 1.0, 3.0)]
    assert ratios == sorted(ratios, reverse=True)
    assert len(set(ratios)) == 5


def test_a_checkpoint_that_is_due_waits_for_the_one_under_way():
    slow = replace(SMALL, cost_seconds=0.0, lag_seconds=25.0)
    assert every(slow, 1).checkpoints == 3  # after iterations 1, 4 and 7


def test_a_job_killed_for_good_ends_there():
    outcome = every(SMALL, 2, until=44.0)
    assert (outcome.wall_seconds, outcome.iteration) == (44.0, 4)
    assert parts(outcome) == outcome.wall_seconds


def test_a_policy_learns_of_failures():
    histories: list[FailureHistory] = []

    def policy(profile: Profile, wanted: PacingSettings, history: FailureHistory) -> IntervalPlan:
        histories.append(history)
        return IntervalPlan(interval=20)

    job = replace(SMALL, total_iterations=2000)
    knowledge = FailureKnowledge(failures=FailureEstimate(mean_seconds=1e5))
    simulate(job, policy, failures=ListedFailures((9000.0,)), knowledge=knowledge)
    assert histories[0].failures.rate == pytest.approx(1e-5)
    assert [each.failures.count > 0 for each in histories] == sorted(each.failures.count > 0 for each in histories)
    assert histories[-1].failures.count == pytest.approx(1, rel=0.02)
    assert histories[-1].restart_seconds == 5.0


def test_what_is_certain_is_not_moved_by_a_failure():
    assert certain(1e-4).after(3600.0, failures=50).rate == pytest.approx(1e-4, rel=1e-6)


def test_a_large_job_is_a_few_events_for_each_failure_and_each_plan():
    class Counting(PoissonFailures):
        asked = 0

        def seconds_left(self, now: float) -> float:
            self.asked += 1
            return super().seconds_left(now)

    failures = Counting(AN_HOUR, seed=2)
    knowledge = FailureKnowledge(failures=FailureEstimate(mean_seconds=3.09 * 3600))
    outcome = simulate(LARGE, policies["goodput"], failures=failures, knowledge=knowledge, replan_seconds=3600.0)
    assert outcome.failures > 350
    hours = outcome.wall_seconds / 3600
    assert failures.asked < 10 * (outcome.failures + hours) < outcome.checkpoints * 1.5


@given(
    seed=strategies.integers(0, 10_000),
    interval=strategies.integers(1, 40),
    lag=strategies.sampled_from([0.0, 5.0, 30.0, 300.0]),
    replan=strategies.sampled_from([0.0, 503.3, math.inf]),
    until=strategies.sampled_from([3000.0, 20_000.0, math.inf]),
)
@settings(max_examples=200, deadline=None)
def test_intervals_in_which_nothing_happens_may_be_skipped(seed, interval, lag, replan, until):
    job = SimulatedJob(
        total_iterations=1500, iteration_seconds=7.0, cost_seconds=1.5, lag_seconds=lag, restart_seconds=20.0
    )
    asked: list[list[FailureHistory]] = []

    def run() -> SimulationOutcome:
        asked.append([])

        def policy(profile: Profile, wanted: PacingSettings, history: FailureHistory) -> IntervalPlan:
            asked[-1].append(history)
            return IntervalPlan(interval=interval)

        failures = PoissonFailures(1.5, seed=seed)
        return simulate(job, policy, failures=failures, replan_seconds=replan, until_seconds=until)

    quick = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Simulation, "_skip_quiet_intervals", lambda run, stop: None)
        slow = run()
    for each in fields(SimulationOutcome):
        assert getattr(quick, each.name) == pytest.approx(getattr(slow, each.name)), each.name
    assert len(asked[0]) == len(asked[1])


def test_all_policies_meet_the_same_failures():
    profile = Profile(iteration_seconds=10.0, cost_seconds=1.0, persist_seconds=3.0)
    history = FailureHistory(failures=FailureEstimate(mean_seconds=7200.0))
    rows = compare_policies(profile, PacingSettings(), history, seeds=range(4))
    assert [row.policy for row in rows] == sorted(policies.keys() - {"fixed"})
    assert all(row.runs == 4 and row.ettr_low <= row.ettr <= row.ettr_high for row in rows)
    assert compare_policies(profile, PacingSettings(), history, seeds=range(4)) == rows
    [one, *_] = compare_policies(profile, PacingSettings(), history, seeds=[2])
    assert one.ettr_low == one.ettr == one.ettr_high


def test_a_planned_job_comes_out_as_its_plan_says():
    profile = Profile(iteration_seconds=5.0, cost_seconds=5.0, snapshot_seconds=5.0, persist_seconds=120.0)
    history = FailureHistory(
        failures=FailureEstimate(world_size=16_384, mean_seconds=3.09 * 3600), restart_seconds=300.0
    )
    found = {row.policy: row.ettr for row in compare_policies(profile, PacingSettings(), history, seeds=range(4))}
    for name in ("checkfreq", "goodput", "young-daly"):
        predicted = policies[name](profile, PacingSettings(), history).ettr
        assert found[name] == pytest.approx(predicted, abs=0.02)
    assert found["goodput"] > found["checkfreq"]


def test_nothing_is_simulated_without_the_time_of_an_iteration():
    with pytest.raises(ValueError, match="iteration time"):
        compare_policies(Profile(iteration_seconds=math.nan), PacingSettings(), FailureHistory())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"total_iterations": 0}, "at least one iteration"),
        ({"iteration_seconds": 0.0}, "more than 0 s"),
        ({"cost_seconds": -1.0}, "0 or more"),
    ],
)
def test_a_job_that_could_not_be_trained_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        replace(SMALL, **changes)
