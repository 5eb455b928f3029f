"""Convergence-aware placement within a write budget."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.pacing import (
    Controller,
    FailureEstimate,
    FailureHistory,
    IntervalPlan,
    Observation,
    PacingSettings,
    plan,
)
from holdfast.pacing.coci import DENSEST, SPARSEST
from holdfast.pacing.failures import JobHistory, TrainingProgress
from holdfast.pacing.loss_curve import LossCurve
from holdfast.pacing.policy import Profile

TOTAL = 100_000
STATE = 10**9
PROFILE = Profile(iteration_seconds=1.0, checkpoint_bytes=STATE, cost_seconds=0.0)
EVEN = 2500
SETTINGS = PacingSettings(policy="coci", write_bytes_per_second=STATE / EVEN, max_unsaved_seconds=1e9)
"""One checkpoint every 2,500 iterations: 40 in all."""


def curve(steepness: float, total: int = TOTAL) -> LossCurve:
    """A loss that falls by exp(-steepness) over the whole job."""
    return LossCurve(floor=1.0, scale=3.0, decay=steepness / total)


def chosen(progress: TrainingProgress | None, settings: PacingSettings = SETTINGS) -> IntervalPlan:
    return plan(PROFILE, settings, FailureHistory(progress=progress))


def placed(loss: LossCurve | None, total: int = TOTAL, settings: PacingSettings = SETTINGS) -> list[int]:
    """Where the checkpoints of a whole job are."""
    at: list[int] = []
    while True:
        here = TrainingProgress(
            iteration=at[-1] if at else 0, total_iterations=total, checkpoints=len(at), curve=loss
        )
        interval = chosen(here, settings).interval
        assert interval is not None
        if here.iteration + interval >= total:
            return at
        at.append(here.iteration + interval)


def lost(at: list[int], loss: LossCurve, total: int = TOTAL) -> float:
    """Progress that a failure takes back, at a moment as likely as any other."""
    return (
        sum(
            (b - a) * loss.left(a) - (loss.left(a) - loss.left(b)) / loss.decay
            for a, b in pairwise([0, *at, total])
        )
        / total
    )


@pytest.mark.parametrize(("steepness", "ratio"), [(3, 0.847), (5, 0.679)])
def test_as_much_less_progress_is_lost_as_theory_says(steepness, ratio):
    loss = curve(steepness)
    assert len(placed(None)) == 39
    assert len(placed(loss)) == pytest.approx(39, abs=1)
    assert lost(placed(loss), loss) / lost(placed(None), loss) == pytest.approx(ratio, rel=0.05)


def test_without_a_curve_checkpoints_are_spaced_evenly_and_the_reason_says_so():
    assert placed(None) == [EVEN * n for n in range(1, 40)]
    made = chosen(TrainingProgress(iteration=0, total_iterations=TOTAL, why_no_curve="the loss is rising"))
    assert made.reason.startswith("goodput decides, as the loss is rising: ")
    assert made.policy == "coci"


@pytest.mark.parametrize(
    ("progress", "why"),
    [
        (None, "the number of iterations of the job is unknown: set total= or HOLDFAST_TOTAL"),
        (TrainingProgress(iteration=5, curve=curve(5)), "the number of iterations of the job is unknown"),
        (
            TrainingProgress(iteration=TOTAL, total_iterations=TOTAL, curve=curve(5)),
            "the job is past its total of 100,000",
        ),
        (TrainingProgress(iteration=5, total_iterations=TOTAL, curve=curve(-1)), "the loss is not known"),
    ],
)
def test_what_is_missing_is_named_and_goodput_decides(progress, why):
    made = chosen(progress)
    assert why in made.reason
    assert made.interval == plan(PROFILE, replace(SETTINGS, policy="goodput")).interval == EVEN


def test_where_the_write_budget_does_not_bind_goodput_decides():
    costly = replace(PROFILE, cost_seconds=30.0)
    settings = replace(SETTINGS, write_bytes_per_second=1e12)
    progress = TrainingProgress(iteration=5, total_iterations=TOTAL, curve=curve(5))
    made = plan(costly, settings, FailureHistory(progress=progress))
    assert "the write budget of 1 TB/s does not bind" in made.reason
    assert made.interval == plan(costly, replace(settings, policy="goodput")).interval


def test_the_reason_shows_the_plan_ahead():
    made = chosen(TrainingProgress(iteration=0, total_iterations=TOTAL, curve=curve(5)))
    assert made.interval == 929
    assert made.reason == (
        "for the least progress lost with a write budget of 34.6 GB/day: 40 checkpoints for the 100,000 "
        "iterations left, dense where the loss falls fast (15 min 29 s now, 54 min 1 s half-way, 3 h 9 min at the "
        "end)"
    )


def test_a_job_with_more_ranks_than_usual_takes_more():
    history = JobHistory(world_size=8)
    history.trained(1, 10 * 86400.0)
    usual = history.state_dict()
    grown = JobHistory(world_size=32)
    grown.load_state_dict(json.loads(json.dumps(usual)))
    failures = grown.history.failures
    hours = {ranks: ranks / 50_000 + 1 / 200 for ranks in (8, 32)}
    assert failures.relative_rate == pytest.approx(hours[32] / hours[8])
    progress = TrainingProgress(iteration=0, total_iterations=TOTAL, curve=curve(5))
    of_usual = plan(PROFILE, SETTINGS, replace(history.history, progress=progress)).interval
    of_grown = plan(PROFILE, SETTINGS, replace(grown.history, progress=progress)).interval
    assert of_grown == pytest.approx(of_usual / math.sqrt(hours[32] / hours[8]), rel=1e-2)


@given(st.floats(0.01, 1e4), st.integers(0, 10**6), st.integers(1000, 10**6), st.floats(0, 0.999))
def test_the_density_stays_within_its_limits(steepness, taken, total, begun):
    progress = TrainingProgress(
        iteration=int(total * begun), total_iterations=total, checkpoints=taken, curve=curve(steepness, total)
    )
    interval = chosen(progress).interval
    assert EVEN / DENSEST - 1 <= interval <= EVEN * SPARSEST + 1


@pytest.mark.parametrize("longest", [2600, 4000, 10_000])
def test_no_more_than_accepted_is_unsaved_and_the_write_budget_still_holds(longest):
    settings = replace(SETTINGS, max_unsaved_seconds=float(longest))
    at = placed(curve(5), settings=settings)
    assert max(b - a for a, b in pairwise([0, *at, TOTAL])) <= 1.06 * longest  # whole checkpoints
    assert len(at) <= 40
    assert lost(at, curve(5)) <= lost(placed(None), curve(5))


def test_the_write_budget_comes_before_the_wish_for_little_unsaved_work():
    settings = replace(SETTINGS, max_unsaved_seconds=2000.0)  # even spacing is 2,500
    assert placed(curve(5), settings=settings) == placed(curve(5))


def test_the_overhead_budget_is_a_ceiling_here_too():
    costly = replace(PROFILE, cost_seconds=70.0)  # 2,000 iterations within 3.5 %
    progress = TrainingProgress(iteration=0, total_iterations=TOTAL, curve=curve(5))
    made = plan(costly, SETTINGS, FailureHistory(failures=FailureEstimate(world_size=10**6), progress=progress))
    assert made.interval == 2000
    assert "the budget of 3.5 % allows one every 2,000 iterations at most" in made.reason


def trained(controller: Controller, first: int, last: int) -> list[int]:
    """Train from `first` to `last`; return after which iterations checkpoints began."""
    begun: list[int] = []
    for iteration in range(first, last + 1):
        stall = 1e-3 if begun and begun[-1] == iteration - 1 else 0.0
        controller.job_history.lost(iteration, 1 + 3 * math.exp(-10 * iteration / 20_000))
        controller.observe(
            Observation(
                iteration=iteration, seconds=1.0 + stall, checkpoint_stall_seconds=stall, in_flight=stall > 0
            )
        )
        if stall:
            controller.measured(
                Profile(
                    iteration_seconds=math.nan, snapshot_seconds=0.01, persist_seconds=0.1, checkpoint_bytes=STATE
                )
            )
        if controller.due(iteration):
            controller.started(iteration)
            begun.append(iteration)
    return begun


def test_the_controller_follows_the_plan_over_a_restart():
    settings = replace(SETTINGS, write_bytes_per_second=STATE / 200)  # 100 in all
    first = Controller(settings, total_iterations=20_000)
    begun = trained(first, 1, 8000)
    second = Controller(settings, total_iterations=20_000)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.restored(8000)
    begun += trained(second, 8001, 20_000)
    assert 85 <= len(begun) <= 110
    early = sum(at <= 5000 for at in begun)
    late = sum(at > 15_000 for at in begun)
    assert early > 3 * late > 0
    assert second.plan.policy == "coci"
    assert "goodput" not in second.plan.reason


def test_other_policies_follow_no_losses():
    assert Controller(PacingSettings(policy="coci")).follows_losses
    assert not any(
        Controller(PacingSettings(policy=name)).follows_losses for name in ("goodput", "checkfreq", "fixed")
    )
