"""The policy that gets a job farthest, and its classical approximation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given

from holdfast.pacing import MAX_INTERVAL, Failures, History, Plan, Profile, Settings, plan
from holdfast.pacing.interval_cost import budget_interval, expect, pipeline_interval
from tests.support.pacing_profiles import MEASURED, budgets, means, profiles

LLAMA_3_SECONDS = 3.09 * 3600
LARGE = Profile(iteration_seconds=5.0, snapshot_seconds=20.0, persist_seconds=100.0, cost_seconds=5.0)


def goodput(profile: Profile, history: History | None = None, **settings: object) -> Plan:
    return plan(profile, Settings(policy="goodput", **settings), history or History())  # type: ignore[arg-type]


def young_daly(profile: Profile, history: History | None = None, **settings: object) -> Plan:
    return plan(profile, Settings(policy="young-daly", **settings), history or History())  # type: ignore[arg-type]


def test_a_large_job_has_the_published_optimum_in_whole_iterations() -> None:
    made = goodput(LARGE, History(restart_seconds=300.0), mtbf_seconds=LLAMA_3_SECONDS)
    assert (made.interval, made.policy) == (66, "goodput")
    assert made.effective == pytest.approx(0.935, abs=0.0005)
    assert made.reason == (
        "for the most progress in the time there is: best every 66 iterations (5.5 min), as a checkpoint costs 5 "
        "s (measured) and a failure is to be expected every 3.09 h (as stated); 93.5% of the time moves training "
        "forward"
    )


def test_where_the_budget_asks_for_less_it_decides_and_says_so() -> None:
    made = goodput(LARGE, mtbf_seconds=LLAMA_3_SECONDS, budget=0.01)
    assert made.interval == 100
    assert "best every 66 iterations" in made.reason
    assert "the budget of 1% allows one every 100 iterations at most" in made.reason


def test_a_budget_is_a_ceiling_and_no_target() -> None:
    made = goodput(LARGE, mtbf_seconds=LLAMA_3_SECONDS, budget=0.5)
    assert made.interval == 66
    assert made.overhead == pytest.approx(5 / 330)


def test_where_writing_takes_longer_it_decides_and_says_so() -> None:
    made = goodput(replace(LARGE, persist_seconds=600.0), mtbf_seconds=LLAMA_3_SECONDS)
    assert made.interval == 123
    assert "one takes 10.3 min to become durable and the next waits for it: every 123 iterations" in made.reason


def test_the_plan_says_what_it_knows_of_failures() -> None:
    seen = Failures(count=2.0, exposure_seconds=7 * 3600.0, world_size=16_384)
    assert "every 3.34 h (2 seen in 7 h)" in goodput(LARGE, History(failures=seen)).reason
    quiet = Failures(exposure_seconds=7 * 3600.0, world_size=16_384)
    reason = goodput(LARGE, History(failures=quiet)).reason
    assert "every 10 h (as published for 16,384 GPUs, none seen in 7 h)" in reason
    assert "every 199 h (as published for one GPU)" in goodput(LARGE).reason


def test_failures_make_checkpoints_more_frequent() -> None:
    calm, bad = (
        goodput(LARGE, History(failures=Failures(count=count, exposure_seconds=86400.0))).interval
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
    settings, history = Settings(policy="goodput", budget=budget, mtbf_seconds=mean), History()
    made = plan(profile, settings, history)
    assert made.interval is not None
    assume(made.interval < MAX_INTERVAL)
    shortest = max(1, budget_interval(profile, budget) or 1, pipeline_interval(profile))
    worth = made.effective
    assert worth is not None
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        for neighbour in {round(made.interval * factor), made.interval - 1, made.interval + 1}:
            if shortest <= neighbour <= MAX_INTERVAL:
                other = expect(profile, settings, history, neighbour, policy="", reason="").effective
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
    assert "the budget of 1% allows" in poor.reason
    assert young_daly(replace(LARGE, persist_seconds=600.0), mtbf_seconds=LLAMA_3_SECONDS).interval == 123
