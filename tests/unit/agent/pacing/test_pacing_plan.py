"""`plan`: orders before policies, and what a plan tells about its price and its unsaved work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.pacing import PacingSettings, Profile, parse_policy, plan
from tests.support.pacing_profiles import CheckfreqSettings

MEASURED = Profile(iteration_seconds=0.5, snapshot_seconds=0.3, persist_seconds=2.2, cost_seconds=0.35)


def test_the_policy_decides_where_nobody_ordered_otherwise() -> None:
    made = plan(MEASURED, CheckfreqSettings(budget=0.035))
    assert (made.interval, made.policy) == (20, "checkfreq")
    assert made.overhead == pytest.approx(0.035)
    assert made.reason == (
        "a checkpoint costs 350 ms (measured), 3.5 % of 20 iterations: as often as the budget of 3.5 % allows"
    )


def test_an_ordered_interval_wins_over_the_policy_and_says_what_it_costs() -> None:
    made = plan(MEASURED, PacingSettings(budget=0.035, every=7))
    assert (made.interval, made.policy) == (7, "fixed")
    assert made.overhead == pytest.approx(0.1)
    assert made.reason == "set to every 7 iterations: 10 % is more than the budget of 3.5 %"


def test_an_ordered_interval_within_the_budget_says_what_it_costs() -> None:
    assert plan(MEASURED, PacingSettings(every=50)).reason == "set to every 50 iterations, 1.4 % overhead"


def test_an_interval_shorter_than_a_write_says_that_checkpoints_wait_for_each_other() -> None:
    free = replace(MEASURED, cost_seconds=0.0)
    assert "wait for each other" in plan(free, PacingSettings(every=2)).reason


def test_an_interval_that_cannot_be_kept_costs_what_becomes_of_it() -> None:
    """Writing takes five iterations: every sixth at best."""
    assert plan(MEASURED, PacingSettings(every=2)).overhead == pytest.approx(0.35 / (6 * 0.5))


def test_paused_wins_over_everything() -> None:
    made = plan(MEASURED, PacingSettings(every=7, paused=True))
    assert made.interval is None
    assert made.overhead == 0.0
    assert "paused" in made.reason


def test_before_the_profile_only_an_order_makes_a_plan() -> None:
    assert plan(None, CheckfreqSettings()).interval is None
    assert plan(None, PacingSettings(every=7)).interval == 7
    assert plan(None, PacingSettings(every=7)).overhead is None


def test_an_unknown_policy_is_replaced_and_named() -> None:
    made = plan(MEASURED, PacingSettings(policy="of-tomorrow"))
    assert made.interval == plan(MEASURED, CheckfreqSettings()).interval
    assert "'of-tomorrow'" in made.reason


def test_the_fixed_policy_without_an_interval_leaves_it_to_checkfreq() -> None:
    made = plan(MEASURED, PacingSettings(policy="fixed"))
    assert made.interval == plan(MEASURED, CheckfreqSettings()).interval
    assert made.reason.startswith("no interval is set")


def test_a_failure_loses_at_most_the_interval_and_the_write_under_way() -> None:
    made = plan(MEASURED, PacingSettings(every=20))
    assert made.unsaved_iterations == 20 + 5
    assert made.unsaved_seconds == pytest.approx(25 * 0.5 * 1.035)


def test_within_the_pipeline_unsaved_work_is_at_most_two_intervals() -> None:
    for every in range(5, 60):
        unsaved = plan(MEASURED, PacingSettings(every=every)).unsaved_iterations
        assert unsaved is not None
        assert unsaved <= 2 * every


def test_an_interval_that_writing_cannot_keep_up_with_exposes_more_than_two() -> None:
    """One write is 5 iterations, so checkpoints start 6 apart, and the newest is lost until it is durable."""
    assert plan(MEASURED, PacingSettings(every=2)).unsaved_iterations == 6 + 5


def test_names_of_policies_are_read_as_typed() -> None:
    assert parse_policy(" CheckFreq ") == "checkfreq"
    with pytest.raises(ValueError, match=r"'often' is not one of checkfreq, coci, fixed, goodput, young-daly"):
        parse_policy("often")
