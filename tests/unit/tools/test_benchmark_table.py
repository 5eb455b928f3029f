"""What the benchmark says of what it measured: medians, ratios, and cells without a figure."""

from __future__ import annotations

import math

import pytest

from benchmarks.checkpoint.table import best, medians, ratio, render


def test_one_disturbed_round_does_not_move_a_figure():
    assert medians({"blocked": [0.1, 9.0, 0.2], "durable": []}) == {"blocked": 0.2}


def test_the_best_of_a_measure_is_the_lowest_of_those_who_have_it():
    contenders = {"one": {"blocked": 2.0}, "two": {"blocked": 1.0}, "three": {"durable": 0.1}}
    assert best(contenders, "blocked") == ("two", 1.0)
    assert best(contenders, "restore_cold") is None


@pytest.mark.parametrize(
    ("ours", "other", "expected"),
    [(1.0, 4.0, 0.25), (None, 4.0, None), (1.0, None, None), (1.0, 0.0, None), (1.0, math.inf, None)],
)
def test_a_ratio_is_ours_to_the_other_and_none_where_there_is_nothing_to_compare_with(ours, other, expected):
    assert ratio(ours, other) == expected


def test_two_differences_that_are_nothing_are_alike():
    assert ratio(-0.02, 0.0001, least=0.001) == 1.0
    assert ratio(0.05, -0.01, least=0.001) == 50.0


def test_every_row_of_the_table_is_as_wide_and_what_was_not_measured_is_a_dash():
    lines = render({"plain": {}, "a long name": {"blocked": 0.25, "durable": math.inf}})
    assert len({len(line) for line in lines}) == 1
    assert "0.2500" in lines[2]
    assert "–" in lines[1]
    assert "inf" not in lines[2]
