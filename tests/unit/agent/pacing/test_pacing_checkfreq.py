"""Algorithm 1 of CheckFreq: the golden vectors, and what must hold for every profile."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.pacing import MAX_INTERVAL, History, Plan, Profile, Settings, policies

PAPER = Profile(
    iteration_seconds=1.0,
    update_seconds=0.1,
    snapshot_seconds=1.9,
    device_copy_seconds=0.05,
    persist_seconds=3.0,
    checkpoint_bytes=1,
    memory_used_bytes=10,
    memory_total_bytes=16,
)

seconds = st.floats(min_value=0, max_value=1e5, allow_nan=False)
profiles = st.builds(
    Profile,
    iteration_seconds=st.floats(min_value=1e-5, max_value=1e4),
    update_seconds=seconds,
    snapshot_seconds=seconds,
    device_copy_seconds=seconds | st.just(math.inf),
    persist_seconds=seconds,
    checkpoint_bytes=st.integers(0, 2**40),
    memory_used_bytes=st.integers(0, 2**40),
    memory_total_bytes=st.integers(0, 2**40),
    cost_seconds=seconds | st.none(),
)
budgets = st.floats(min_value=1e-4, max_value=1.0)


def checkfreq(profile: Profile, budget: float = 0.05) -> Plan:
    return policies["checkfreq"](profile, Settings(budget=budget), History())


def interval(profile: Profile, budget: float = 0.05) -> int:
    chosen = checkfreq(profile, budget).interval
    assert chosen is not None
    return chosen


def test_a_cheap_copy_within_device_memory_leaves_the_pipeline_as_the_limit() -> None:
    plan = checkfreq(PAPER)
    assert (plan.interval, plan.mode) == (5, "gpu")
    assert plan.cost_seconds == pytest.approx(0.05)


def test_without_room_on_the_device_the_budget_is_the_limit() -> None:
    plan = checkfreq(replace(PAPER, memory_total_bytes=10))
    assert (plan.interval, plan.mode) == (20, "cpu")
    assert plan.overhead == pytest.approx(0.05)


def test_room_for_less_than_the_checkpoint_is_no_room() -> None:
    assert checkfreq(replace(PAPER, checkpoint_bytes=10, memory_total_bytes=20)).mode == "cpu"


def test_a_copy_hidden_by_the_next_iteration_costs_nothing() -> None:
    plan = checkfreq(replace(PAPER, snapshot_seconds=0.5))
    assert (plan.interval, plan.mode, plan.cost_seconds) == (4, "cpu", 0.0)


def test_free_and_instant_checkpoints_are_taken_every_iteration() -> None:
    assert interval(replace(PAPER, snapshot_seconds=0.0, persist_seconds=0.0)) == 1


def test_no_budget_at_all_means_no_checkpoint_that_costs_anything() -> None:
    plan = checkfreq(PAPER, budget=0.0)
    assert plan.interval is None
    assert "budget" in plan.reason
    assert interval(replace(PAPER, snapshot_seconds=0.5), budget=0.0) == 4


def test_the_measured_cost_takes_the_place_of_the_predicted_stall() -> None:
    assert interval(replace(PAPER, cost_seconds=2.0)) == 40
    assert interval(replace(PAPER, cost_seconds=0.0)) == 5


def test_a_quotient_that_is_whole_is_not_rounded_up() -> None:
    assert 0.3 / 0.1 < 3 < 0.3 / (0.1 * 1.0) + 1
    assert interval(Profile(iteration_seconds=0.1, cost_seconds=0.3), budget=1.0) == 3
    assert interval(Profile(iteration_seconds=0.1, cost_seconds=0.21), budget=0.3) == 7


def test_nothing_timed_means_nothing_planned() -> None:
    for unusable in (0.0, -1.0, math.nan, math.inf):
        assert checkfreq(Profile(iteration_seconds=unusable)).interval is None


@given(profiles, budgets)
def test_the_interval_is_at_least_one_and_its_predicted_cost_within_the_budget(
    profile: Profile, budget: float
) -> None:
    plan = checkfreq(profile, budget)
    assert plan.interval is not None
    assert plan.overhead is not None
    assert 1 <= plan.interval <= MAX_INTERVAL
    assert plan.overhead <= budget * (1 + 1e-9) or plan.interval == MAX_INTERVAL


@given(profiles, budgets, budgets)
def test_a_larger_budget_never_makes_checkpoints_rarer(profile: Profile, one: float, other: float) -> None:
    assert interval(profile, max(one, other)) <= interval(profile, min(one, other))


@given(profiles, seconds, budgets)
def test_a_slower_disk_never_makes_checkpoints_more_frequent(profile: Profile, more: float, budget: float) -> None:
    slower = replace(profile, persist_seconds=profile.persist_seconds + more)
    assert interval(slower, budget) >= interval(profile, budget)


@given(profiles, budgets)
def test_a_checkpoint_is_durable_before_the_next_one_starts(profile: Profile, budget: float) -> None:
    plan = checkfreq(profile, budget)
    assert plan.interval is not None
    busy = profile.snapshot_seconds + profile.persist_seconds
    until_next = plan.interval * profile.iteration_seconds + plan.cost_seconds
    assert until_next >= busy * (1 - 1e-9) or plan.interval == MAX_INTERVAL


@given(profiles, budgets)
def test_device_memory_is_used_only_where_the_checkpoint_fits(profile: Profile, budget: float) -> None:
    if checkfreq(profile, budget).mode == "gpu":
        assert profile.memory_total_bytes - profile.memory_used_bytes > profile.checkpoint_bytes


@given(
    st.builds(
        Profile,
        iteration_seconds=st.floats(),
        update_seconds=st.floats(),
        snapshot_seconds=st.floats(),
        device_copy_seconds=st.floats(),
        persist_seconds=st.floats(),
        cost_seconds=st.floats() | st.none(),
    ),
    st.sampled_from(sorted(policies)),
    st.integers(1, MAX_INTERVAL) | st.none(),
)
def test_no_measurement_is_odd_enough_to_raise(profile: Profile, policy: str, every: int | None) -> None:
    plan = policies[policy](profile, Settings(policy=policy, every=every), History())
    assert plan.interval is None or plan.interval >= 1
    assert plan.reason
