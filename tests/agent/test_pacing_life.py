"""What a controller knows of its job, and how the interval follows it."""

import json
import math
import random
from itertools import pairwise

import pytest
from benchmarks.pacing.paced import Job

from holdfast.pacing import Controller, Settings
from holdfast.pacing.life import Life

HOUR = 3600.0


def job(policy, **settings):
    """Iterations of 10 s; a checkpoint costs 0.5 s."""
    controller = Controller(Settings(policy=policy, **settings), world_size=1)
    return Job(controller, compute_seconds=10.0, stall_seconds=0.5, interference=0.0)


def test_running_time_and_failures_go_on_from_attempt_to_attempt():
    life = Life(8)
    for iteration in range(1, 361):
        life.trained(iteration, 10.0)
    life.failed(2)
    life.durable()
    after = Life(8)
    after.load_state_dict(json.loads(json.dumps(life.state_dict())))
    assert after.failures.count == pytest.approx(2, rel=0.01)
    assert after.failures.exposure_seconds == pytest.approx(HOUR, rel=0.01)
    assert after.history.checkpoints == 2  # and the one that it goes on from
    after.failed(1)
    after.trained(361, HOUR)
    assert after.failures.count == pytest.approx(3, rel=0.01)
    assert after.failures.exposure_seconds == pytest.approx(2 * HOUR, rel=0.01)
    assert after.failures.rate > life.failures.rate * 0.9


@pytest.mark.parametrize(
    "state",
    [None, 3, [], {}, {"failures": "many", "exposure_seconds": 1}, {"failures": -1, "exposure_seconds": math.nan}],
)
def test_a_saved_life_that_makes_no_sense_is_ignored(state):
    life = Life()
    life.load_state_dict(state)
    assert life.failures == Life().failures


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_a_clock_that_jumps_is_no_running_time(seconds):
    life = Life()
    life.trained(1, seconds)
    assert life.failures.exposure_seconds == 0


def test_more_failures_make_checkpoints_more_frequent():
    simulated = job("goodput").run(300)
    before = simulated.interval
    simulated.controller.life.failed(100)
    simulated.run_intervals(2)
    assert simulated.interval < before / 2
    assert simulated.plans[-1].interval == simulated.interval


@pytest.mark.parametrize(
    ("losses", "told"), [([math.nan] * 20, "not numbers"), (range(200), "the loss is rising")]
)
def test_losses_that_say_nothing_are_named_in_the_reason(losses, told):
    controller = Controller(Settings(policy="convergence", checkpoints=50))
    controller.life.total_iterations = 10_000
    for iteration, loss in enumerate(losses, start=1):
        controller.life.progress.add(iteration, float(loss))
    simulated = Job(controller, compute_seconds=1.0, stall_seconds=0.01).run(300)
    assert simulated.interval > 100
    assert told in controller.plan.reason


def test_what_is_measured_is_known_with_its_spread():
    noise = random.Random(1)
    simulated = Job(Controller(Settings()), noise=lambda: noise.gauss(1, 0.1)).run(600)
    spread = simulated.controller.spread
    assert spread["iteration_seconds"] == pytest.approx(0.067, rel=0.5)  # of a normal distribution
    assert set(spread) == {"iteration_seconds", "update_seconds", "snapshot_seconds", "persist_seconds"}
    assert spread["update_seconds"] == spread["snapshot_seconds"] == 0


def test_years_without_a_failure_make_them_rarer():
    simulated = job("goodput").run(300)
    before = simulated.interval
    simulated.controller.life.trained(simulated.iteration, 30 * 86400.0)
    simulated.run_intervals(2)
    assert simulated.interval > before


def test_checkfreq_does_not_look_at_failures():
    simulated = job("checkfreq").run(300)
    before = simulated.interval
    simulated.controller.life.failed(100)
    simulated.run_intervals(4)
    assert simulated.interval == before


def test_a_stated_mtbf_counts_at_once():
    assert job("goodput", mtbf_seconds=2 * HOUR).run(300).interval < job("goodput").run(300).interval / 3


def test_the_budget_is_a_ceiling_for_every_policy():
    simulated = job("goodput", budget=0.01, mtbf_seconds=600.0).run(300)
    assert simulated.interval == 5  # 0.5 s in 50 s; W* would be 24 s
    assert simulated.overhead <= 0.01 + 1e-9


def test_saved_settings_of_an_older_version_are_taken_up():
    before = job("goodput").run(300).controller.state_dict()
    for key in ("mtbf_seconds", "checkpoints"):
        before["settings"].pop(key, None)
    del before["life"]
    after = Controller(Settings(policy="goodput"))
    after.load_state_dict(json.loads(json.dumps(before)))
    assert after.plan is not None
    assert after.plan.interval is not None


def test_several_under_way_where_writing_is_what_takes_long():
    controller = Controller(Settings(budget=0.1), slots=3)
    simulated = Job(controller, compute_seconds=1.0, persist_seconds=30.0, stall_seconds=0.01)
    simulated.run(900)
    assert controller.in_flight == 3
    assert simulated.interval == pytest.approx(31 / 3, abs=1)


def test_no_more_than_one_under_way_where_they_share_a_bandwidth():
    controller = Controller(Settings(budget=0.1), slots=3)
    simulated = Job(controller, compute_seconds=1.0, persist_seconds=30.0, stall_seconds=0.01, shared=True)
    simulated.run(1500)
    assert controller.in_flight == 1
    assert simulated.interval == pytest.approx(31, abs=2)


@pytest.mark.parametrize("slots", [1, 4])
def test_a_disk_that_recovers_has_its_interval_back_with_any_number_of_slots(slots):
    controller = Controller(Settings(budget=0.1), slots=slots)
    simulated = Job(controller, compute_seconds=1.0, persist_seconds=50.0, stall_seconds=0.01)
    simulated.run(900)
    slow = simulated.interval
    simulated.persist_seconds = 5.0
    simulated.run(900)
    assert simulated.interval <= 7 < slow
    assert controller.profile.persist_seconds == pytest.approx(5.0, abs=1)


def test_a_disk_that_is_slower_for_all_keeps_as_many_under_way():
    controller = Controller(Settings(budget=0.1), slots=4)
    simulated = Job(controller, compute_seconds=1.0, persist_seconds=50.0, stall_seconds=0.01)
    simulated.run(2000)
    simulated.persist_seconds = 200.0
    simulated.run(20_000)
    assert controller.in_flight >= 3
    assert simulated.interval <= 70


def placed(total, checkpoints):
    controller = Controller(Settings(policy="convergence", checkpoints=checkpoints))
    controller.life.total_iterations = total
    return Job(controller, compute_seconds=1.0, stall_seconds=0.01, persist_seconds=2.0).run(total).starts


@pytest.mark.parametrize(("total", "checkpoints"), [(1000, 5), (10_000, 10)])
def test_a_limited_number_is_spread_to_the_end_of_the_job(total, checkpoints):
    starts = placed(total, checkpoints)
    assert len(starts) == checkpoints
    gaps = [after - before for before, after in pairwise(starts)]
    assert max(gaps) - min(gaps) <= 2
    assert total - starts[-1] <= 1


def test_an_ordered_interval_may_have_as_many_under_way_as_there_are_slots():
    assert Controller(Settings(every=1), slots=4).in_flight == 4
