"""COCI's rule as published, and that what stopped its authors' code does not stop ours."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from pacing_profiles import MEASURED

from holdfast.pacing import Failures, History, LossCurve, Plan, Profile, Settings, plan
from holdfast.pacing.coci import loss_step

MTBF_SECONDS = 60 / 0.0042
DECAY_A_MINUTE = 0.078
CURVE = LossCurve(floor=0.5, scale=2.0, decay=DECAY_A_MINUTE / 60)
SECOND = Profile(iteration_seconds=1.0, cost_seconds=0.13)


def coci(history: History, profile: Profile = SECOND, **settings: object) -> Plan:
    given = {"mtbf_seconds": MTBF_SECONDS, "budget": 1.0, **settings}
    return plan(profile, Settings(policy="coci", **given), history)  # type: ignore[arg-type]


@pytest.mark.parametrize(("cost", "checkpoints", "first"), [(0.13, 47, 0.27), (1.60, 3, 3.87)])
def test_the_published_rule_gives_the_known_checkpoints(cost: float, checkpoints: int, first: float) -> None:
    step = loss_step(DECAY_A_MINUTE, cost / 60, 0.0042)
    assert int(1 / step) == checkpoints
    assert -math.log(1 - step) / DECAY_A_MINUTE == pytest.approx(first, abs=0.01)
    made = coci(History(progress=CURVE), replace(SECOND, cost_seconds=cost))
    assert made.interval == pytest.approx(first * 60, abs=1)
    assert made.policy == "coci"
    assert made.reason.startswith("for equal steps of the loss")


def test_the_steps_of_the_loss_are_equal_and_the_intervals_grow() -> None:
    iteration, at = 0, []
    while (made := coci(History(iterations=iteration, progress=CURVE))).policy == "coci":
        assert made.interval is not None
        iteration += made.interval
        at.append(iteration)
    steps = [math.exp(-CURVE.decay * a) - math.exp(-CURVE.decay * b) for a, b in pairwise(at)]
    step = loss_step(DECAY_A_MINUTE, 0.13 / 60, 0.0042)
    assert steps == pytest.approx([step] * len(steps), rel=0.05)
    assert len(at) == 47
    gaps = [b - a for a, b in pairwise(at)]
    assert gaps == sorted(gaps)


def test_where_the_rule_ends_goodput_goes_on() -> None:
    made = coci(History(iterations=10_000, progress=CURVE))
    assert made.policy == "goodput"
    assert "of the loss is left and a step of COCI's rule is 2.12%, so goodput decides" in made.reason


def test_several_steps_within_one_iteration_do_not_stop_it() -> None:
    """Iterations of ten minutes, in which the loss falls by more than half."""
    long = replace(SECOND, iteration_seconds=600.0)
    falling = replace(CURVE, decay=DECAY_A_MINUTE * 10)
    for iteration in range(5):
        made = coci(History(iterations=iteration, progress=falling), long)
        assert (made.interval, made.policy) == (1, "coci")


def test_a_step_larger_than_all_of_the_loss_leaves_it_to_goodput() -> None:
    """With rare failures or slow checkpoints the published rule asks for none at all."""
    rare = History(progress=CURVE, failures=Failures())
    made = plan(replace(SECOND, cost_seconds=5.0), Settings(policy="coci"), rare)
    assert made.policy == "goodput"
    assert made.interval is not None


def test_without_a_loss_curve_goodput_decides() -> None:
    made = coci(History(), MEASURED)
    assert made.policy == "goodput"
    assert made.reason.startswith("it is not known how the loss falls, so goodput decides")


def test_free_checkpoints_are_taken_as_often_as_they_can_be_written() -> None:
    assert coci(History(progress=CURVE), replace(MEASURED, cost_seconds=0.0)).interval == 5


def test_the_budget_is_a_ceiling_here_too() -> None:
    made = coci(History(progress=CURVE), budget=0.001)
    assert made.interval == 130
    assert "the budget of 0.1% allows" in made.reason


def test_figures_that_are_no_numbers_leave_the_decision_to_goodput() -> None:
    flat = LossCurve(floor=0.5, scale=2.0, decay=1e-320)
    assert coci(History(progress=flat), replace(SECOND, cost_seconds=0.0)).policy != "coci"
