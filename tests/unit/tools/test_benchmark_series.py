"""The benchmark of series: its gradient is a gradient, and its rival is optimal."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from benchmarks.series.gradient import Shot, misfit, recomputed_gradient, stored_gradient
from benchmarks.series.revolve import Advance, Restore, Reverse, Snapshot, least_advances, schedule
from benchmarks.series.wave import Survey, Wave
from holdfast_series import SeriesStore, Zfp

SMALL = Survey(side=40, steps=90, dtype=torch.float64)


@pytest.fixture(scope="module")
def shot() -> Shot:
    return Shot.fired(SMALL, 18, SMALL.true_velocity())


@pytest.fixture(scope="module")
def wave() -> Wave:
    return Wave(SMALL, SMALL.first_velocity() ** 2)


def test_the_gradient_passes_the_taylor_test(shot: Shot, wave: Wave) -> None:
    """What a gradient leaves of a difference falls with the square of the step."""
    gradient = stored_gradient(shot, wave, SeriesStore())
    direction = torch.zeros_like(wave.squared)
    direction[SMALL.water :] = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(1)).double()
    slope_expected = float((gradient * direction[SMALL.water :]).sum())
    value, steps = misfit(shot, wave), [4e4 / 2**power for power in range(4)]
    left = [
        abs(misfit(shot, Wave(SMALL, wave.squared + step * direction)) - value - step * slope_expected)
        for step in steps
    ]
    slopes = torch.tensor([larger / smaller for larger, smaller in itertools.pairwise(left)]).log2()
    assert slopes == pytest.approx(torch.full((3,), 2.0), abs=0.1)


def test_recomputation_gives_the_same_gradient(shot: Shot, wave: Wave) -> None:
    exact = stored_gradient(shot, wave, SeriesStore())
    for slots in (2, 5, 90):
        gradient, solved = recomputed_gradient(shot, wave, slots)
        assert torch.equal(gradient, exact)
        assert solved == least_advances(SMALL.steps, slots) + 1


def test_a_bounded_codec_gives_nearly_the_same_gradient(shot: Shot, wave: Wave) -> None:
    exact = stored_gradient(shot, wave, SeriesStore())
    with SeriesStore(codec=Zfp(1e-3)) as store:
        assert float((stored_gradient(shot, wave, store) - exact).norm() / exact.norm()) < 2e-3


@functools.cache
def fewest_advances(steps: int, slots: int) -> int:
    """By trying every place for the next snapshot."""
    if steps <= 1:
        return 0
    if slots == 1:
        return steps * (steps - 1) // 2
    return min(first + fewest_advances(steps - first, slots - 1) + fewest_advances(first, slots)
               for first in range(1, steps))  # fmt: skip


@pytest.mark.parametrize("slots", range(1, 7))
def test_revolve_advances_as_often_as_the_binomial_formula_says(slots: int) -> None:
    for steps in range(1, 41):
        at = advanced = 0
        snapshots: list[int] = []
        reversed_steps = []
        for action in schedule(steps, slots):
            match action:
                case Snapshot():
                    snapshots.append(at)
                case Restore(last):
                    at = snapshots.pop() if last else snapshots[-1]
                case Advance(start, end):
                    assert start == at
                    at, advanced = end, advanced + end - start
                case Reverse(step):
                    assert step == at
                    reversed_steps.append(step)
            assert len(snapshots) <= slots
        assert reversed_steps == list(reversed(range(steps)))
        assert advanced == least_advances(steps, slots) == fewest_advances(steps, slots)
