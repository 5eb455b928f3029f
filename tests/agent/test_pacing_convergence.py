"""Placing a limited number of checkpoints by what is being learned."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pacing_profiles import MEASURED

from holdfast.pacing import History, LossCurve, Plan, Profile, Settings, plan
from holdfast.pacing.convergence import DENSEST, next_interval

TOTAL = 100_000
FREE = replace(MEASURED, cost_seconds=0.0, snapshot_seconds=0.0, persist_seconds=0.0)


def curve(steepness: float, total: int = TOTAL) -> LossCurve:
    """A loss that falls by exp(-steepness) over the whole job."""
    return LossCurve(floor=1.0, scale=3.0, decay=steepness / total)


def convergence(history: History, checkpoints: int | None = 40, profile: Profile = FREE) -> Plan:
    return plan(profile, Settings(policy="convergence", checkpoints=checkpoints), history)


def placed(history: History, checkpoints: int, profile: Profile = FREE) -> list[int]:
    """Where the checkpoints of a whole job come to lie."""
    assert history.total_iterations is not None
    at: list[int] = []
    while True:
        here = replace(history, iterations=at[-1] if at else history.iterations, checkpoints=len(at))
        made = convergence(here, checkpoints, profile)
        if made.interval is None or here.iterations + made.interval > history.total_iterations:
            return at
        at.append(here.iterations + made.interval)


def lost(at: list[int], loss: LossCurve, total: int) -> float:
    """Learning that is lost on average when the job dies at an even chance of all its iterations."""
    edges = [0, *at, total]

    def integral(a: float, b: float) -> float:
        return (loss.left(a) - loss.left(b)) / loss.decay

    return sum((b - a) * loss.left(a) - integral(a, b) for a, b in pairwise(edges)) / total


@pytest.mark.parametrize(("steepness", "ratio"), [(3, 0.847), (5, 0.679), (10, 0.395)])
def test_as_much_less_is_lost_as_theory_says(steepness: float, ratio: float) -> None:
    loss = curve(steepness)
    chosen = placed(History(total_iterations=TOTAL, progress=loss), 40)
    even = placed(History(total_iterations=TOTAL), 40)
    assert lost(chosen, loss, TOTAL) / lost(even, loss, TOTAL) == pytest.approx(ratio, rel=0.05)


def test_the_checkpoints_lie_where_the_closed_form_puts_them() -> None:
    decay, count = 5 / TOTAL, 40
    at = placed(History(total_iterations=TOTAL, progress=curve(5)), count)
    theory = [
        -2 / decay * math.log(1 - (j / count) * (1 - math.exp(-decay * TOTAL / 2))) for j in range(1, count + 1)
    ]
    assert at == pytest.approx(theory, abs=20)
    assert at[-1] == TOTAL


def test_without_a_curve_they_are_spread_evenly_and_that_is_said() -> None:
    at = placed(History(total_iterations=TOTAL), 40)
    assert at == [2500 * n for n in range(1, 41)]
    assert (
        "spread evenly, as it is not known how the loss falls"
        in convergence(History(total_iterations=TOTAL)).reason
    )


@pytest.mark.parametrize("decay", [0.0, -1.0, math.nan, math.inf])
def test_a_curve_that_does_not_fall_is_no_curve(decay: float) -> None:
    odd = LossCurve(floor=0.0, scale=1.0, decay=decay)
    assert convergence(History(total_iterations=TOTAL, progress=odd)).interval == 2500


def test_the_plan_says_what_is_traded() -> None:
    reason = convergence(History(total_iterations=TOTAL, checkpoints=30, progress=curve(5))).reason
    assert reason == (
        "for the least learning lost should the job die for good: 10 of 40 checkpoints left for 100,000 "
        "iterations, dense where the loss falls fast; it trades a later completion for less learning lost early on"
    )


@given(st.floats(0, 40), st.integers(1, 400), st.integers(1000, 10**6), st.floats(0, 0.9))
def test_a_whole_job_takes_as_many_as_it_may(steepness: float, limit: int, total: int, begun: float) -> None:
    history = History(iterations=int(total * begun), total_iterations=total, progress=curve(steepness, total))
    taken = len(placed(history, limit))
    assert taken <= limit
    assert taken >= 0.9 * min(limit, total - history.iterations)


def test_a_curve_that_says_all_is_learned_does_not_use_up_the_checkpoints() -> None:
    """A fit of the first steps may say so; were it believed, all 40 would lie within the first iterations."""
    at = placed(History(total_iterations=TOTAL, progress=curve(5000)), 40)
    assert at[0] == round(TOTAL / 40 / DENSEST)
    assert at[20] > TOTAL / 8
    assert len(at) == 40


@given(st.floats(0, 1e3), st.floats(1, 1e9), st.integers(1, 10**6))
def test_the_next_one_is_never_later_than_evenly_spaced(decay: float, ahead: float, left: int) -> None:
    assert ahead / left / DENSEST * (1 - 1e-9) <= next_interval(decay, ahead, left) <= ahead / left * (1 + 1e-9)


def test_the_budget_is_a_ceiling_here_too() -> None:
    made = convergence(History(total_iterations=TOTAL, progress=curve(5)), 20_000, MEASURED)
    assert made.interval == 20
    assert "the budget of 3.5% allows one every 20 iterations at most" in made.reason


@pytest.mark.parametrize(
    ("history", "checkpoints", "why"),
    [
        (History(total_iterations=TOTAL, progress=curve(5)), None, "places a limited number of checkpoints"),
        (History(progress=curve(5)), 40, "has to know how many iterations the job will have"),
        (History(iterations=TOTAL, total_iterations=TOTAL), 40, "gone beyond its planned end at 100,000"),
    ],
)  # fmt: skip
def test_what_it_cannot_answer_goodput_decides(history: History, checkpoints: int | None, why: str) -> None:
    made = convergence(history, checkpoints, MEASURED)
    assert why in made.reason
    assert "so goodput decides: for the most progress" in made.reason
    assert made.policy == "goodput"
    assert made.interval == plan(MEASURED, Settings(policy="goodput"), history).interval


@pytest.mark.parametrize("policy", ["convergence", "coci"])
@pytest.mark.parametrize("taken", [40, 41])
def test_when_all_are_taken_there_are_no_more_and_the_way_out_is_said(policy: str, taken: int) -> None:
    history = History(checkpoints=taken, total_iterations=TOTAL, progress=curve(5))
    made = plan(MEASURED, Settings(policy=policy, checkpoints=40), history)
    assert (made.interval, made.policy) == (None, policy)
    assert made.reason == (
        "all 40 checkpoints that the job may take are taken: no more until the limit is raised, another policy is "
        "chosen or somebody asks for one"
    )
