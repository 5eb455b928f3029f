"""The policy that gets a job farthest, and its classical approximation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given

from holdfast.pacing import (
    MAX_INTERVAL,
    FailureEstimate,
    FailureHistory,
    IntervalPlan,
    PacingSettings,
    Profile,
    plan,
)
from holdfast.pacing.interval_cost import binding_limit, budget_interval, forecast, pipeline_interval
from tests.support.pacing_profiles import MEASURED, budgets, means, profiles

LLAMA_3_SECONDS = 3.09 * 3600
LARGE = Profile(iteration_seconds=5.0, snapshot_seconds=20.0, persist_seconds=100.0, cost_seconds=5.0)


def goodput(profile: Profile, history: FailureHistory | None = None, **settings: object) -> IntervalPlan:
    return plan(
        profile, PacingSettings(policy="goodput", max_unsaved_seconds=1e9, **settings), history or FailureHistory()
    )  # type: ignore[arg-type]


def young_daly(profile: Profile, history: FailureHistory | None = None, **settings: object) -> IntervalPlan:
    return plan(
        profile,
        PacingSettings(policy="young-daly", max_unsaved_seconds=1e9, **settings),
        history or FailureHistory(),
    )  # type: ignore[arg-type]


def test_a_large_job_has_the_published_optimum_in_whole_iterations() -> None:
    made = goodput(LARGE, FailureHistory(restart_seconds=300.0), mtbf_seconds=LLAMA_3_SECONDS)
    assert (made.interval, made.policy) == (66, "goodput")
    assert made.ettr == pytest.approx(0.935, abs=0.0005)
    assert made.reason == (
        "for the most progress per unit of time: best every 66 iterations (5 min 30 s), as a checkpoint costs "
        "5 s (measured) and a failure is expected every 3 h 5 min (as set); 93.5 % of the time moves training "
        "forward"
    )


def test_where_the_budget_asks_for_less_it_decides_and_says_so() -> None:
    made = goodput(LARGE, mtbf_seconds=LLAMA_3_SECONDS, budget=0.01)
    assert made.interval == 100
    assert "best every 66 iterations" in made.reason
    assert "the budget of 1 % allows one every 100 iterations at most" in made.reason


WRITTEN = replace(LARGE, checkpoint_bytes=10**9, written_bytes=5e11)
"""Sends 500 GB with each checkpoint, which 2 TB a day allow every 6 hours."""


def test_where_the_write_budget_asks_for_less_it_decides_and_says_so() -> None:
    made = goodput(WRITTEN, mtbf_seconds=LLAMA_3_SECONDS)
    assert made.interval == 6 * 3600 / 5
    assert "the write budget of 2 TB/day allows one every 4,320 iterations at most" in made.reason
    hour = goodput(WRITTEN, mtbf_seconds=LLAMA_3_SECONDS, write_bytes_per_second=5e11 / 3600)
    assert hour.interval == 720


def test_a_state_may_be_written_two_thousand_times_a_day() -> None:
    fast = replace(LARGE, snapshot_seconds=0.1, persist_seconds=0.1, cost_seconds=0.01)
    large = replace(fast, checkpoint_bytes=10**9, state_bytes=1e12)
    assert plan(large, PacingSettings(policy="checkfreq")).interval == math.ceil(43.2 / 5)
    assert plan(replace(large, written_bytes=1e10), PacingSettings(policy="checkfreq")).interval == 1


def test_no_more_work_is_unsaved_than_is_accepted_where_the_ceilings_allow_it() -> None:
    patient = PacingSettings(policy="goodput", mtbf_seconds=1e8)
    made = plan(LARGE, patient)
    assert made.interval is not None
    assert made.interval * 5 + 120 <= 600 < (made.interval + 1) * 5 + 120
    assert "at most 10 min of unsaved work" in made.reason
    assert plan(LARGE, replace(patient, budget=0.005)).interval == 200, "the budget comes first"
    assert "the budget of 0.5 %" in plan(LARGE, replace(patient, budget=0.005)).reason


@pytest.mark.parametrize(
    ("profile", "settings", "limit"),
    [
        (LARGE, PacingSettings(mtbf_seconds=1e8), "unsaved"),
        (LARGE, PacingSettings(mtbf_seconds=LLAMA_3_SECONDS), None),
        (LARGE, PacingSettings(mtbf_seconds=LLAMA_3_SECONDS, budget=0.005), "overhead"),
        (WRITTEN, PacingSettings(mtbf_seconds=LLAMA_3_SECONDS), "written"),
        (LARGE, PacingSettings(mtbf_seconds=100.0, budget=1.0), "pipeline"),
    ],
)
def test_the_limit_that_decides_is_named(profile: Profile, settings: PacingSettings, limit: str | None) -> None:
    interval = plan(profile, settings).interval
    assert interval is not None
    assert binding_limit(profile, settings, interval) == limit


def test_a_budget_is_a_ceiling_and_no_target() -> None:
    made = goodput(LARGE, mtbf_seconds=LLAMA_3_SECONDS, budget=0.5)
    assert made.interval == 66
    assert made.overhead == pytest.approx(5 / 330)


def test_where_writing_takes_longer_it_decides_and_says_so() -> None:
    made = goodput(replace(LARGE, persist_seconds=600.0), mtbf_seconds=LLAMA_3_SECONDS)
    assert made.interval == 123
    assert "one takes 10 min 20 s to become durable and the next waits for it: every 123 iterations" in made.reason


def test_the_plan_says_what_it_knows_of_failures() -> None:
    seen = FailureEstimate(count=2.0, exposure_seconds=7 * 3600.0, world_size=16_384)
    assert "every 3 h 20 min (2 seen in 7 h)" in goodput(LARGE, FailureHistory(failures=seen)).reason
    quiet = FailureEstimate(exposure_seconds=7 * 3600.0, world_size=16_384)
    reason = goodput(LARGE, FailureHistory(failures=quiet)).reason
    assert "every 10 h (published rate for 16,384 GPUs, none seen in 7 h)" in reason
    assert "every 8 d 7 h (published rate for one GPU)" in goodput(LARGE).reason


def test_failures_make_checkpoints_more_frequent() -> None:
    calm, bad = (
        goodput(LARGE, FailureHistory(failures=FailureEstimate(count=count, exposure_seconds=86400.0))).interval
        for count in (0, 20)
    )
    assert calm is not None
    assert bad is not None
    assert bad < calm / 3


def test_free_checkpoints_are_taken_as_often_as_they_can_be_written() -> None:
    assert goodput(replace(LARGE, cost_seconds=0.0)).interval == 24
    assert young_daly(replace(LARGE, cost_seconds=0.0)).interval == 24


@given(profiles, budgets, means)
def test_no_neighbour_that_is_allowed_gets_the_job_farther(profile: Profile, budget: float, mean: float) -> None:
    settings, history = (
        PacingSettings(policy="goodput", budget=budget, mtbf_seconds=mean, max_unsaved_seconds=1e9),
        FailureHistory(),
    )
    made = plan(profile, settings, history)
    assert made.interval is not None
    assume(made.interval < MAX_INTERVAL)
    shortest = max(1, budget_interval(profile, budget) or 1, pipeline_interval(profile))
    worth = made.ettr
    assert worth is not None
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        for neighbour in {round(made.interval * factor), made.interval - 1, made.interval + 1}:
            if shortest <= neighbour <= MAX_INTERVAL:
                other = forecast(profile, settings, history, neighbour, policy="", reason="").ettr
                assert other is not None
                assert other <= worth * (1 + 1e-9)


def test_the_approximation_is_near_where_stalls_are_short() -> None:
    for mean in (1800.0, LLAMA_3_SECONDS, 1e6):
        exact = goodput(MEASURED, mtbf_seconds=mean, budget=1.0).interval
        approximate = young_daly(MEASURED, mtbf_seconds=mean, budget=1.0).interval
        assert exact is not None
        assert approximate == pytest.approx(exact, rel=0.02, abs=1)


def test_the_approximation_keeps_to_budget_and_pipeline_as_well() -> None:
    made = young_daly(LARGE, mtbf_seconds=LLAMA_3_SECONDS)
    assert (made.interval, made.policy) == (66, "young-daly")
    assert made.reason.startswith("for the least time lost to checkpoints and failures, by Young's and Daly's")
    poor = young_daly(LARGE, mtbf_seconds=LLAMA_3_SECONDS, budget=0.01)
    assert poor.interval == 100
    assert "the budget of 1 % allows" in poor.reason
    assert young_daly(replace(LARGE, persist_seconds=600.0), mtbf_seconds=LLAMA_3_SECONDS).interval == 123
