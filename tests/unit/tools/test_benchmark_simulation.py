"""What the simulations say, on fewer runs than the benchmark's."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.pacing import agreement
from benchmarks.pacing.at_scale import ChangingFailures, regret_of_change, regret_of_wrong_prior
from holdfast.simulation import PoissonFailures


@pytest.mark.parametrize("point", agreement.grid()[::8], ids=str)
def test_the_formula_is_what_the_simulator_finds(point):
    found, error = agreement.simulated(point, standard_error=0.0008)
    assert error < 0.0008
    assert abs(found - point.predicted()) < 0.003


def test_the_grid_is_as_wide_as_promised():
    points = agreement.grid()
    assert len(points) == 50
    assert (min(each.cost for each in points), max(each.cost for each in points)) == (1e-6, 1.0)
    assert all(each.lag <= each.interval for each in points)


@pytest.mark.parametrize(("wrong_by"), [10.0, 0.1])
def test_a_prior_that_is_wrong_by_ten_is_mended_within_three_days(wrong_by):
    assert -0.001 < regret_of_wrong_prior(wrong_by, range(8)) <= 0.005


@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_a_rate_that_changes_by_four_is_followed_within_two_half_lives(factor):
    assert -0.001 < regret_of_change(factor, range(1)) <= 0.01


def test_a_change_of_the_rate_is_counted_from_its_moment_on():
    steady = PoissonFailures(1.0, seed=3).seconds_left(0.0)
    source = ChangingFailures(1.0, seed=3, at_seconds=steady / 2, factor=4.0)
    assert source.seconds_left(0.0) == pytest.approx(steady * (1 / 2 + 1 / 8))
    source.ran(0.0, steady * 0.55)
    assert source.seconds_left(steady * 0.55) == pytest.approx(steady * 0.075)


def test_even_draws_have_the_mean_of_a_deck_within_a_few_parts_in_a_thousand():
    draws = agreement.even_draws(seed=1, strata=64)
    assert statistics.fmean(next(draws) for _ in range(64 * 50)) == pytest.approx(1.0, abs=0.005)
