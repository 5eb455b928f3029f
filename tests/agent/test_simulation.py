"""A simulated job: its arithmetic by hand, its chances by seed."""

from __future__ import annotations

import math
import statistics
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings, strategies

from holdfast.pacing import Failures, History, Plan, Profile, Settings, policies
from holdfast.simulation import (
    Exponential,
    Job,
    Knowledge,
    ListedFailures,
    Outcome,
    PoissonFailures,
    PowerLaw,
    Round,
    certain,
    compare,
    compare_planned,
    even_draws,
    foreseen,
    simulate,
    ways_of,
)

SMALL = Job(total_iterations=10, iteration_seconds=10.0, cost_seconds=1.0, lag_seconds=3.0, restart_seconds=5.0)
LARGE = Job(
    total_iterations=54 * 86400 // 5,
    iteration_seconds=5.0,
    cost_seconds=5.0,
    lag_seconds=120.0,
    restart_seconds=300.0,
    workers=16_384,
)
A_FAILURE_EVERY_3_HOURS = 1 / (3.09 * 16_384)


def every(job: Job, k: int, *failures: float, until: float = math.inf) -> Outcome:
    return simulate(
        job, policies["fixed"], Settings(every=k), failures=ListedFailures(failures), until_seconds=until
    )


def parts(outcome: Outcome) -> float:
    return (
        outcome.useful_seconds
        + outcome.stall_seconds
        + outcome.lost_seconds
        + outcome.restart_seconds
        + outcome.down_seconds
    )


def test_without_failures_time_is_iterations_and_checkpoints():
    outcome = every(SMALL, 2)
    assert outcome.wall_seconds == 104.0
    assert (outcome.useful_seconds, outcome.stall_seconds, outcome.lost_seconds) == (100.0, 4.0, 0.0)
    assert (outcome.checkpoints, outcome.failures, outcome.iteration) == (4, 0, 10)
    assert outcome.ettr == 100 / 104


def test_a_job_that_takes_no_checkpoints_starts_over():
    outcome = every(SMALL, 100, 95.0)
    assert (outcome.wall_seconds, outcome.lost_seconds, outcome.checkpoints) == (200.0, 95.0, 0)


def test_three_failures_come_out_as_by_hand():
    """The first before a checkpoint is durable, the second while one is taken, the third while restarting."""
    outcome = every(SMALL, 2, 43.0, 89.5, 92.0)
    assert outcome.wall_seconds == 159.0
    assert outcome.useful_seconds == 100.0
    assert outcome.stall_seconds == 5.5
    assert outcome.lost_seconds == 41.0
    assert outcome.restart_seconds == 12.5
    assert (outcome.failures, outcome.checkpoints) == (3, 5)


def test_a_machine_has_to_be_there_before_a_restart():
    outcome = every(replace(SMALL, down_seconds=7.0), 2, 43.0)
    assert (outcome.down_seconds, outcome.restart_seconds) == (7.0, 5.0)
    assert parts(outcome) == outcome.wall_seconds


@given(
    seed=strategies.integers(0, 10_000),
    interval=strategies.integers(1, 40),
    cost=strategies.floats(0, 30),
    lag=strategies.floats(0, 200),
    until=strategies.floats(1, 5000),
)
@settings(max_examples=200, deadline=None)
def test_the_parts_are_all_of_the_wall_time(seed, interval, cost, lag, until):
    job = Job(
        total_iterations=100,
        iteration_seconds=7.0,
        cost_seconds=cost,
        lag_seconds=lag,
        restart_seconds=20.0,
        down_seconds=11.0,
        rounds=(Round(until_iteration=30, workers=4, speed=3.0, cost_factor=2.0),),
        curve=Exponential(rate=0.03),
    )
    failures = PoissonFailures(per_worker_hour=2.0, per_job_hour=4.0, seed=seed)
    outcome = simulate(job, policies["fixed"], Settings(every=interval), failures=failures, until_seconds=until)
    assert parts(outcome) == pytest.approx(outcome.wall_seconds, rel=1e-9)
    assert outcome.wall_seconds <= until
    assert outcome.durable_iteration <= outcome.iteration
    assert min(outcome.useful_seconds, outcome.lost_seconds, outcome.loss_lost, outcome.loss_delayed) >= 0


def test_the_same_seed_is_the_same_run():
    def run(seed: int) -> Outcome:
        failures = PoissonFailures(per_worker_hour=A_FAILURE_EVERY_3_HOURS, seed=seed)
        return simulate(LARGE, policies["goodput"], failures=failures, until_seconds=86400.0)

    assert run(5) == run(5)
    assert run(5) != run(6)


def test_more_failures_leave_less_of_the_time():
    def ettr(per_hour: float) -> float:
        runs = (
            simulate(
                replace(LARGE, total_iterations=50_000),
                policies["fixed"],
                Settings(every=60),
                failures=PoissonFailures(per_job_hour=per_hour, seed=seed),
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
    assert every(replace(slow, in_flight=2), 1).checkpoints == 6  # and after 2, 5 and 8
    assert every(replace(slow, in_flight=2), 1, 64.0).lost_seconds == 44.0  # iteration 2 was durable, 4 not yet


def test_workers_that_join_and_leave_change_speed_cost_and_failures():
    job = Job(
        total_iterations=30,
        iteration_seconds=10.0,
        cost_seconds=1.0,
        rounds=(
            Round(until_iteration=10, workers=4, speed=2.5, cost_factor=4.0),
            Round(until_iteration=20, workers=2, speed=2.0, cost_factor=2.0),
        ),
    )
    outcome = every(job, 5)
    assert outcome.useful_seconds == 40 + 50 + 100
    assert outcome.stall_seconds == 2 * 4.0 + 2 * 2.0 + 1.0
    source = PoissonFailures(per_worker_hour=3.0, per_job_hour=1.0)
    assert source.rate(0.0, 4) * 3600 == pytest.approx(13.0)
    assert source.seconds_left(0.0, 4) == pytest.approx(source.seconds_left(0.0, 1) * 4 / 13)


def test_a_change_of_the_rate_is_counted_from_its_moment_on():
    steady = PoissonFailures(per_job_hour=1.0, seed=3).seconds_left(0.0, 1)
    source = PoissonFailures(per_job_hour=1.0, seed=3, changes=((steady / 2, 4.0),))
    assert source.seconds_left(0.0, 1) == pytest.approx(steady * (1 / 2 + 1 / 8))
    source.ran(0.0, steady * 0.55, 1)
    assert source.seconds_left(steady * 0.55, 1) == pytest.approx(steady * 0.075)


def test_even_draws_have_the_mean_of_a_deck_within_a_few_parts_in_a_thousand():
    draws = even_draws(seed=1)
    assert statistics.fmean(next(draws) for _ in range(64 * 50)) == pytest.approx(1.0, abs=0.005)


def test_losses_are_reached_lost_and_delayed_along_the_curve():
    curve = Exponential(rate=0.1)
    job = replace(SMALL, curve=curve, targets=(curve.loss_at(3), curve.loss_at(4.55), curve.loss_at(30)))
    outcome = every(job, 2, 46.0)
    # it 3 ends at 31 s; 4.4 is reached at 46 s, where the job fails back to 4, durable since 45 s, and is there
    # again 5.5 s of training after the restart
    assert outcome.reached_seconds == (pytest.approx(31.0), pytest.approx(51.0 + 5.5), None)
    assert outcome.loss_lost == pytest.approx(curve.loss_at(4) - curve.loss_at(4.4))
    delayed = sum(curve.loss_at(taken) - curve.loss_at(taken + 0.1) for taken in (2, 4, 6, 8))
    assert outcome.loss_delayed == pytest.approx(delayed)


@pytest.mark.parametrize("curve", [Exponential(rate=0.02, floor=0.3), PowerLaw(exponent=0.5, scale=20, start=8)])
def test_a_curve_knows_where_its_losses_are(curve):
    for iteration in (0, 1, 50, 400):
        assert curve.iteration_of(curve.loss_at(iteration)) == pytest.approx(iteration, abs=1e-6)
    assert curve.iteration_of(curve.floor) == math.inf


def test_a_job_that_is_ended_early_does_not_tell_its_policy():
    seen: set[int | None] = set()

    def policy(profile: Profile, wanted: Settings, history: History) -> Plan:
        seen.add(history.total_iterations)
        return Plan(interval=2)

    outcome = simulate(replace(SMALL, stop_iteration=5), policy, failures=ListedFailures([]))
    assert (outcome.iteration, outcome.wall_seconds, seen) == (5, 52.0, {10})


def test_a_job_killed_for_good_keeps_its_newest_durable_checkpoint():
    outcome = every(SMALL, 2, until=44.0)
    assert (outcome.wall_seconds, outcome.iteration, outcome.durable_iteration) == (44.0, 4, 2)
    assert every(SMALL, 2, until=45.0).durable_iteration == 4
    assert parts(outcome) == outcome.wall_seconds


def test_a_policy_learns_of_failures_durable_checkpoints_and_losses():
    histories: list[History] = []

    def policy(profile: Profile, wanted: Settings, history: History) -> Plan:
        histories.append(history)
        return Plan(interval=20)

    job = replace(SMALL, total_iterations=2000, curve=Exponential(rate=0.002, floor=0.5))
    knowledge = Knowledge(failures=Failures(mean_seconds=1e5), fits=True, noise=0.005)
    simulate(job, policy, failures=ListedFailures([9000.0]), knowledge=knowledge)
    assert histories[0].failures.rate == pytest.approx(1e-5)
    assert [each.failures.count > 0 for each in histories] == sorted(each.failures.count > 0 for each in histories)
    assert histories[-1].failures.count == pytest.approx(1, rel=0.02)
    assert histories[-1].checkpoints == 98  # the 99th is not durable yet when the policy is asked about it
    assert histories[0].progress is None
    assert histories[-1].progress is not None
    assert histories[-1].progress.decay == pytest.approx(0.002, rel=0.2)


def test_what_is_certain_is_not_moved_by_a_failure():
    assert certain(1e-4).after(3600.0, failures=50).rate == pytest.approx(1e-4, rel=1e-6)


def test_a_large_job_is_a_few_events_for_each_failure_and_each_plan():
    class Counting(PoissonFailures):
        asked = 0

        def seconds_left(self, now: float, workers: int) -> float:
            self.asked += 1
            return super().seconds_left(now, workers)

    failures = Counting(per_worker_hour=A_FAILURE_EVERY_3_HOURS, seed=2)
    outcome = simulate(LARGE, policies["goodput"], failures=failures, replan_seconds=3600.0)
    assert outcome.failures > 350
    hours = outcome.wall_seconds / 3600
    assert failures.asked < 10 * (outcome.failures + hours) < outcome.checkpoints * 1.5


@given(
    seed=strategies.integers(0, 10_000),
    interval=strategies.integers(1, 40),
    lag=strategies.sampled_from([0.0, 5.0, 30.0, 300.0]),
    in_flight=strategies.integers(1, 3),
    replan=strategies.sampled_from([0.0, 503.3, math.inf]),
    until=strategies.sampled_from([3000.0, 20_000.0, math.inf]),
)
@settings(max_examples=200, deadline=None)
def test_intervals_in_which_nothing_happens_may_be_skipped(seed, interval, lag, in_flight, replan, until):
    """A job whose losses are followed skips none: all else is the same."""
    job = Job(
        total_iterations=1500,
        iteration_seconds=7.0,
        cost_seconds=1.5,
        lag_seconds=lag,
        restart_seconds=20.0,
        in_flight=in_flight,
        rounds=(Round(until_iteration=700, workers=4, speed=3.5, cost_factor=2.0),),
    )
    asked: list[list[History]] = []

    def run(one: Job) -> Outcome:
        asked.append([])

        def policy(profile: Profile, wanted: Settings, history: History) -> Plan:
            asked[-1].append(history)
            return Plan(interval=interval + history.iterations // 400)

        failures = PoissonFailures(per_worker_hour=0.5, per_job_hour=1.0, seed=seed)
        return simulate(one, policy, failures=failures, replan_seconds=replan, until_seconds=until)

    quick, slow = run(job), run(replace(job, curve=Exponential(rate=0.001)))
    for each in fields(Outcome):
        if not each.name.startswith("loss_"):
            assert getattr(quick, each.name) == pytest.approx(getattr(slow, each.name)), each.name
    assert [each.iterations for each in asked[0]] == [each.iterations for each in asked[1]]
    assert [each.checkpoints for each in asked[0]] == [each.checkpoints for each in asked[1]]


def test_all_policies_meet_the_same_failures():
    job = replace(SMALL, total_iterations=2000, curve=Exponential(rate=0.003))
    rows = compare(job, per_job_hour=0.5, seeds=range(4))
    assert [row.name for row in rows] == sorted(policies.keys() - {"fixed"})
    assert all(len(row.outcomes) == 4 for row in rows)
    again = compare(job, ways_of(job, 0.0, 0.5, Settings())[:1], per_job_hour=0.5, seeds=[2])
    assert again[0].outcomes[0] == rows[0].outcomes[2]
    spread = rows[0].spread("ettr")
    assert spread.low <= spread.median <= spread.high


def test_a_planned_job_comes_out_as_its_plan_says():
    profile = Profile(iteration_seconds=5.0, cost_seconds=5.0, snapshot_seconds=5.0, persist_seconds=120.0)
    history = History(failures=Failures(world_size=16_384, mean_seconds=3.09 * 3600), restart_seconds=300.0)
    rows = {row.name: row for row in compare_planned(profile, Settings(), history, seeds=range(4))}
    for name in ("checkfreq", "goodput", "young-daly"):
        predicted = policies[name](profile, Settings(), history).effective
        assert rows[name].mean("ettr") == pytest.approx(predicted, abs=0.02)
    assert rows["goodput"].mean("ettr") > rows["checkfreq"].mean("ettr")


def test_nothing_is_simulated_without_the_time_of_an_iteration():
    with pytest.raises(ValueError, match="time of an iteration"):
        compare_planned(Profile(iteration_seconds=math.nan), Settings(), History())


def test_a_power_law_is_foreseen_as_far_as_an_exponential_is_like_it():
    curve = foreseen(PowerLaw(exponent=0.5, scale=50.0), 5000)
    assert curve is not None
    assert curve.rate(2500) > curve.rate(5000) > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"total_iterations": 0}, "at least one iteration"),
        ({"iteration_seconds": 0.0}, "more than 0 s"),
        ({"cost_seconds": -1.0}, "0 or more"),
        ({"in_flight": 0}, "at least one"),
        ({"targets": (0.5,)}, "loss curve"),
        ({"rounds": (Round(until_iteration=5), Round(until_iteration=5))}, "one after the other"),
        ({"rounds": (Round(until_iteration=5, speed=0.0),)}, "speed above 0"),
    ],
)
def test_a_job_that_could_not_be_trained_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        replace(SMALL, **changes)
