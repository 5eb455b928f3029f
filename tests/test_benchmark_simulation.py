"""What the simulations say, on fewer runs than the benchmark's."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
from benchmarks.pacing import agreement, coci, equal_number
from benchmarks.pacing.at_scale import regret_of_change, regret_of_wrong_prior
from benchmarks.pacing.conditions import CONDITIONS, Compared, compared
from benchmarks.pacing.drawing import picture

from holdfast.pacing.renewal import young_interval_seconds


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


@pytest.mark.parametrize(("length", "equal_loss", "density"), [(3, 1.01, 0.85), (5, 1.08, 0.68), (10, 1.39, 0.40)])
def test_a_given_number_of_checkpoints_loses_least_at_the_root_of_the_progress(length, equal_loss, density):
    lost = equal_number.lost_by_one_failure(length)
    assert lost["equal loss"] == pytest.approx(equal_loss, rel=0.05)
    assert lost["√ density"] == pytest.approx(density, rel=0.05)


def test_what_a_killed_job_leaves_is_paid_for_in_completion():
    found = equal_number.killed_for_good(runs=400)
    assert found["√ density"].gap <= 0.75 * found["uniform"].gap
    assert 0 < found["√ density"].completion - found["uniform"].completion <= 0.03
    assert found["equal loss"].completion > found["√ density"].completion


@pytest.mark.parametrize(("wrong_by"), [10.0, 0.1])
def test_a_prior_that_is_wrong_by_ten_is_mended_within_three_days(wrong_by):
    assert -0.001 < regret_of_wrong_prior(wrong_by, range(8)) <= 0.005


@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_a_rate_that_changes_by_four_is_followed_within_two_half_lives(factor):
    assert -0.001 < regret_of_change(factor, range(1)) <= 0.01


@pytest.mark.parametrize(("cost", "number", "first", "young"), [(0.13, 46, 0.27, 1.02), (1.6, 3, 3.87, 3.56)])
def test_cocis_rule_is_the_published_one(cost, number, first, young):
    """Its checkpoints are fewer in proportion to their cost, not to its root. Minutes."""
    rate = 0.0042 / 60
    work = coci.job(cost)
    [way] = [each for each in coci.ways(work, rate) if each.name == coci.PUBLISHED]
    taken = coci.places(work, way)
    assert len(taken) == pytest.approx(number, abs=1)
    assert taken[0] * work.iteration_seconds / 60 == pytest.approx(first, abs=0.01)
    assert young_interval_seconds(rate, cost) / 60 == pytest.approx(young, abs=0.01)


@pytest.fixture(scope="module")
def serial() -> list[Compared]:
    [condition] = [each for each in CONDITIONS if each.key == "serial"]
    return compared(condition, range(1))


def test_the_jacobian_turns_cocis_comparison_around(serial):
    rows = {row.name: row for row in serial}
    found = rows[coci.PUBLISHED]
    assert found.published.median < 1 < found.true.low
    assert found.published_vs_checkfreq.median < 0.12
    assert rows[coci.MENDED].true.low > 1
    assert rows["goodput"].true.median == pytest.approx(1.0, abs=0.02)


def test_the_picture_is_drawn_inside_its_frame(serial):
    drawn = ElementTree.fromstring(picture({"serial": serial, "parallel": serial}))

    def places(*keys: str) -> list[float]:
        return [float(each.attrib[key]) for each in drawn.iter() for key in keys if key in each.attrib]

    _, _, width, height = map(float, drawn.attrib["viewBox"].split())
    xs, ys = places("x", "x1", "x2", "cx"), places("y", "y1", "y2", "cy")
    assert 0 <= min(xs) <= max(xs) <= width
    assert 0 <= min(ys) <= max(ys) <= height
    assert all(math.isfinite(each) for each in (*xs, *ys))
