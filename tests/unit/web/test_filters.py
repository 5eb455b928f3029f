from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from holdfast_web.shared import filters
from tests.support.formats import FORMATS


@pytest.mark.parametrize(("function", "value", "text"), FORMATS)
def test_a_figure_reads_as_in_the_log_of_the_agent(function: str, value: float, text: str) -> None:
    assert getattr(filters, function)(value) == text


@pytest.mark.parametrize("function", [filters.duration, filters.percent, filters.share, filters.size])
def test_a_figure_that_is_missing_is_a_dash(function: Callable[[None], str]) -> None:
    assert function(None) == "–"


@pytest.mark.parametrize(("value", "text"), [(math.nan, "NaN"), (math.inf, "∞")])
@pytest.mark.parametrize("function", [filters.duration, filters.percent])
def test_a_figure_that_is_not_finite_is_named(function: Callable[[float], str], value: float, text: str) -> None:
    assert function(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "never"), (0.4, "just now"), (34.2, "34 s ago"), (59.6, "1 min ago"), (75.0, "1 min 15 s ago")],
)
def test_an_age_has_no_fractions(seconds: float | None, text: str) -> None:
    assert filters.age(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "NaN"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (2.34567891, "2.3457"),
        (1e-9, "1.000e-09"),
    ],
)
def test_a_loss_that_is_not_a_number_is_shown_as_what_it_is(value: float | None, text: str) -> None:
    assert filters.metric(value) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(None, "–"), (0.0, "–"), (4.123, "4.12 iterations/s"), (0.08, "12.5 s/iteration"), (math.nan, "–")],
)
def test_a_slow_rate_is_shown_in_seconds_for_each_iteration(rate: float | None, text: str) -> None:
    assert filters.rate(rate) == text


def test_a_sparkline_leaves_out_what_is_not_finite() -> None:
    line = filters.polyline([1.0, math.nan, 2.0, 1.5], 120, 24)
    assert len(line.split()) == 3
    assert filters.polyline([1.0], 120, 24) == ""


def test_a_quiet_sparkline_stays_in_the_middle() -> None:
    heights = [float(point.split(",")[1]) for point in filters.polyline([1.0, 1.001, 1.0], 120, 24).split()]
    assert all(11 < height < 13 for height in heights)


@pytest.mark.parametrize(
    ("fraction", "text"),
    [
        (None, "–"), (math.nan, "NaN"), (0.0, "0.0 %"), (0.9346, "93.5 %"), (0.98996, "99.0 %"),
        (0.9986, "99.86 %"), (0.99996, ">99.99 %"), (1.0, "100.0 %"),
    ],
)  # fmt: skip
def test_a_share_near_the_whole_keeps_the_digits_that_matter(fraction: float | None, text: str) -> None:
    assert filters.share(fraction) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (math.inf, "∞"), (0.0, "0"), (0.002, "<0.01"), (0.1234, "0.123"), (48.6, "48.6"),
        (3984.2, "3,984"),
    ],
)  # fmt: skip
def test_an_amount_has_three_digits(value: float | None, text: str) -> None:
    assert filters.amount(value) == text


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, -5e-324, 1e-310, -1.0, 2.0**63]
)
@pytest.mark.parametrize(
    "function",
    [filters.age, filters.amount, filters.duration, filters.gpu_hours, filters.metric, filters.percent,
     filters.rate, filters.share, filters.clock, filters.stamp, filters.iso, filters.day],
)  # fmt: skip
def test_an_absurd_figure_is_formatted(function: Callable[[float], str], value: float) -> None:
    text = function(value)
    assert text
    if function not in (filters.percent, filters.share):
        assert len(text) <= 40
