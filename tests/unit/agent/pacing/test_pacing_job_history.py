"""What a controller knows of its job, and how the interval follows it."""

import json
import math
import random

import pytest

from benchmarks.pacing.paced import PacedJob
from holdfast.pacing import Controller, Observation, PacingSettings
from holdfast.pacing.failures import JobHistory
from tests.support.pacing_profiles import CheckfreqSettings

HOUR = 3600.0


def job(policy, **settings):
    """Iterations of 10 s; a checkpoint costs 0.5 s."""
    controller = Controller(PacingSettings(policy=policy, **settings), world_size=1)
    return PacedJob(controller, compute_seconds=10.0, stall_seconds=0.5, interference=0.0)


def test_running_time_and_failures_go_on_from_attempt_to_attempt():
    life = JobHistory(8)
    for _ in range(360):
        life.trained(1, 10.0)
    life.failed(2)
    after = JobHistory(8)
    after.load_state_dict(json.loads(json.dumps(life.state_dict())))
    assert after.history.failures.count == pytest.approx(2, rel=0.01)
    assert after.history.failures.exposure_seconds == pytest.approx(HOUR, rel=0.01)
    after.failed(1)
    after.trained(1, HOUR)
    assert after.history.failures.count == pytest.approx(3, rel=0.01)
    assert after.history.failures.exposure_seconds == pytest.approx(2 * HOUR, rel=0.01)
    assert after.history.failures.rate > life.history.failures.rate * 0.9


@pytest.mark.parametrize(
    "state",
    [None, 3, [], {}, {"failures": "many", "exposure_seconds": 1}, {"failures": -1, "exposure_seconds": math.nan}],
)
def test_a_saved_life_that_makes_no_sense_is_ignored(state):
    life = JobHistory()
    life.load_state_dict(state)
    assert life.history == JobHistory().history


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_a_clock_that_jumps_is_no_running_time(seconds):
    controller = Controller(PacingSettings())
    controller.observe(Observation(iteration=1, seconds=seconds))
    assert controller.job_history.history.failures.exposure_seconds == 0


def test_more_failures_make_checkpoints_more_frequent():
    simulated = job("goodput").run(300)
    before = simulated.interval
    simulated.controller.job_history.failed(100)
    simulated.run_intervals(2)
    assert simulated.interval < before / 2
    assert simulated.plans[-1].interval == simulated.interval


def test_what_is_measured_is_known_with_its_spread():
    noise = random.Random(1)
    simulated = PacedJob(Controller(CheckfreqSettings()), noise=lambda: noise.gauss(1, 0.1)).run(600)
    spread = simulated.controller.spread
    assert spread["iteration_seconds"] == pytest.approx(0.067, rel=0.5)  # of a normal distribution
    assert set(spread) == {"iteration_seconds", "update_seconds", "snapshot_seconds", "persist_seconds"}
    assert spread["update_seconds"] == spread["snapshot_seconds"] == 0


def test_years_without_a_failure_make_them_rarer():
    simulated = job("goodput", max_unsaved_seconds=1e9).run(300)
    before = simulated.interval
    simulated.controller.job_history.trained(1, 30 * 86400.0)
    simulated.run_intervals(2)
    assert simulated.interval > before


def test_checkfreq_does_not_look_at_failures():
    simulated = job("checkfreq").run(300)
    before = simulated.interval
    simulated.controller.job_history.failed(100)
    simulated.run_intervals(4)
    assert simulated.interval == before


def test_a_stated_mtbf_counts_at_once():
    assert job("goodput", mtbf_seconds=2 * HOUR).run(300).interval < job("goodput").run(300).interval / 3


def test_the_budget_is_a_ceiling_for_every_policy():
    simulated = job("goodput", budget=0.01, mtbf_seconds=600.0).run(300)
    assert simulated.interval == 5  # 0.5 s in 50 s; W* would be 24 s
    assert simulated.overhead <= 0.01 + 1e-9


def test_as_many_under_way_as_there_are_slots() -> None:
    controller = Controller(CheckfreqSettings(budget=0.1), max_in_flight=3)
    simulated = PacedJob(controller, compute_seconds=1.0, persist_seconds=30.0, stall_seconds=0.01)
    simulated.run(900)
    assert controller.max_in_flight == 3
    assert simulated.interval == pytest.approx(31 / 3, abs=1)


@pytest.mark.parametrize("slots", [1, 4])
def test_a_disk_that_recovers_has_its_interval_back_with_any_number_of_slots(slots: int) -> None:
    controller = Controller(CheckfreqSettings(budget=0.1), max_in_flight=slots)
    simulated = PacedJob(controller, compute_seconds=1.0, persist_seconds=50.0, stall_seconds=0.01)
    simulated.run(900)
    slow = simulated.interval
    simulated.persist_seconds = 5.0
    simulated.run(900)
    assert simulated.interval <= 7 < slow
    assert controller.profile is not None
    assert controller.profile.persist_seconds == pytest.approx(5.0, abs=1)
