"""What holds for every policy, whatever question it answers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.pacing import (
    MAX_INTERVAL,
    FailureEstimate,
    FailureHistory,
    IntervalPlan,
    PacingSettings,
    Profile,
    plan,
    policies,
)
from holdfast.pacing.interval_cost import budget_interval, pipeline_interval, unsaved_iterations
from tests.support.pacing_profiles import (
    MEASURED,
    budgets,
    odd_histories,
    odd_numbers,
    odd_profiles,
    odd_settings,
    profiles,
)

CEILED = sorted(set(policies) - {"fixed"})
STATED = PacingSettings(mtbf_seconds=3600.0)


@given(odd_profiles, odd_settings, odd_histories, st.sampled_from(sorted(policies)))
def test_no_figures_are_odd_enough_to_raise(
    profile: Profile, settings: PacingSettings, history: FailureHistory, name: str
) -> None:
    made = plan(profile, replace(settings, policy=name), history)
    assert made.interval is None or 1 <= made.interval <= MAX_INTERVAL
    assert made.reason
    assert made.ettr is None or 0 <= made.ettr <= 1


@pytest.mark.parametrize("name", sorted(policies))
def test_a_job_of_which_nothing_is_known_has_a_plan_and_its_worth(name: str) -> None:
    made = plan(MEASURED, PacingSettings(policy=name))
    assert made.interval is not None
    assert made.ettr is not None
    assert 0.9 < made.ettr < 1


@pytest.mark.parametrize("name", CEILED)
@pytest.mark.parametrize("odd", [math.nan, 0.0, -1.0, math.inf])
def test_nothing_timed_means_nothing_planned(name: str, odd: float) -> None:
    made = plan(Profile(iteration_seconds=odd), replace(STATED, policy=name))
    assert made.interval is None
    assert "no iteration has been timed" in made.reason


@pytest.mark.parametrize("name", CEILED)
def test_a_budget_of_nothing_means_no_checkpoint_that_costs_anything(name: str) -> None:
    made = plan(MEASURED, replace(STATED, policy=name, budget=0.0))
    assert made.interval is None
    assert "budget" in made.reason
    free = plan(replace(MEASURED, cost_seconds=0.0), replace(STATED, policy=name, budget=0.0))
    assert free.interval is not None


@given(profiles, budgets, st.sampled_from(CEILED))
def test_the_budget_is_a_ceiling_and_writing_keeps_up(profile: Profile, budget: float, name: str) -> None:
    made = plan(profile, replace(STATED, policy=name, budget=budget))
    affordable = budget_interval(profile, budget)
    assert made.interval is not None
    assert affordable is not None
    assert made.interval >= min(max(affordable, pipeline_interval(profile)), MAX_INTERVAL)


@given(profiles, st.sampled_from(CEILED), budgets, budgets)
def test_a_larger_budget_never_makes_checkpoints_rarer(
    profile: Profile, name: str, one: float, other: float
) -> None:
    rich, poor = (
        plan(profile, replace(STATED, policy=name, budget=each)).interval
        for each in (max(one, other), min(one, other))
    )
    assert rich is not None
    assert poor is not None
    assert rich <= poor


@given(profiles, st.sampled_from(CEILED), st.floats(0, 1e4), budgets)
def test_a_slower_disk_never_makes_checkpoints_more_frequent(
    profile: Profile, name: str, more: float, budget: float
) -> None:
    settings = replace(STATED, policy=name, budget=budget)
    slower = plan(replace(profile, persist_seconds=profile.persist_seconds + more), settings).interval
    quick = plan(profile, settings).interval
    assert slower is not None
    assert quick is not None
    assert slower >= quick


@given(profiles, st.sampled_from(sorted(policies)), st.integers(1, 10_000))
def test_more_in_flight_never_makes_checkpoints_rarer(profile: Profile, name: str, every: int) -> None:
    settings = replace(STATED, policy=name, every=every if name == "fixed" else None)
    one, four = (plan(replace(profile, in_flight=n), settings) for n in (1, 4))
    assert one.interval is not None
    assert four.interval is not None
    assert four.interval <= one.interval


def test_with_two_in_flight_the_next_one_starts_after_half_of_a_write() -> None:
    """One is durable after 10 s and its stall is free time for it too."""
    profile = Profile(iteration_seconds=1.0, snapshot_seconds=2.0, persist_seconds=8.0, cost_seconds=0.0)
    assert plan(profile, PacingSettings(budget=1.0)).interval == 10
    assert plan(replace(profile, in_flight=2), PacingSettings(budget=1.0)).interval == 5
    assert unsaved_iterations(replace(profile, in_flight=2), 5) == 15
    assert unsaved_iterations(profile, 5) == 20


def test_the_worth_of_an_interval_counts_what_becomes_of_it() -> None:
    """Writing takes ten iterations: checkpoints ordered every seven start every fourteen."""
    profile = Profile(iteration_seconds=1.0, persist_seconds=10.0, cost_seconds=0.0)
    seven, fourteen = (plan(profile, PacingSettings(every=every, mtbf_seconds=1000.0)) for every in (7, 14))
    assert seven.ettr == fourteen.ettr
    assert seven.ettr == pytest.approx(14e-3 / ((1 + 70e-3) * math.expm1(14e-3)))


def test_a_time_between_failures_that_somebody_set_wins_over_the_published_one() -> None:
    history = FailureHistory(failures=FailureEstimate(world_size=16_384))
    rare, often = (plan(MEASURED, PacingSettings(mtbf_seconds=mtbf), history).ettr for mtbf in (1e6, 1e3))
    assert rare is not None
    assert often is not None
    assert rare > 0.96 > 0.93 > often


@given(odd_numbers)
def test_an_odd_restart_time_counts_nothing(seconds: float) -> None:
    made = plan(MEASURED, PacingSettings(), FailureHistory(restart_seconds=seconds))
    instant = plan(MEASURED, PacingSettings(), FailureHistory(restart_seconds=0.0))
    assert made.ettr is not None
    assert instant.ettr is not None
    assert made.ettr <= instant.ettr


def test_every_policy_is_offered_under_the_name_its_plans_carry() -> None:
    for name, policy in policies.items():
        made = policy(MEASURED, PacingSettings(policy=name, every=3, mtbf_seconds=3600.0), FailureHistory())
        assert made.policy == name
        assert isinstance(made, IntervalPlan)
