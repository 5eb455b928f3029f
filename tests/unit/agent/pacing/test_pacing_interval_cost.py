"""The share of time that moves a job forward: the published figures, and that the optimum is one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.pacing.interval_cost import best_interval_seconds, daly_interval_seconds, effective_ratio

LLAMA_3, RSC_1, RSC_2 = 3.09, 1.80, 5.01
"""Hours between failures of 16,384 GPUs: of one published run, and as two clusters' rates would make it."""

rates = st.floats(min_value=1e-8, max_value=1e-1)
costs = st.floats(min_value=1e-3, max_value=1e4)


@pytest.mark.parametrize(
    ("hours", "cost", "restart", "lag", "best", "percent"),
    [
        (LLAMA_3, 1, 180, 60, 149, 96.6), (LLAMA_3, 5, 300, 120, 331, 93.5),
        (LLAMA_3, 30, 600, 0, 794, 88.1), (LLAMA_3, 300, 900, 0, 2395, 72.7),
        (RSC_1, 1, 180, 60, 113, 94.8), (RSC_1, 5, 300, 120, 250, 90.3),
        (RSC_1, 30, 600, 0, 607, 83.0), (RSC_1, 300, 900, 0, 1777, 63.8),
        (RSC_2, 1, 180, 60, 189, 97.7), (RSC_2, 5, 300, 120, 420, 95.4),
        (RSC_2, 30, 600, 0, 1018, 91.3), (RSC_2, 300, 900, 0, 3102, 78.9),
    ],
)  # fmt: skip
def test_the_best_interval_of_a_large_job_and_what_it_is_worth(
    hours: float, cost: float, restart: float, lag: float, best: float, percent: float
) -> None:
    rate = 1 / (hours * 3600)
    interval = best_interval_seconds(rate, cost)
    ratio = effective_ratio(interval, rate=rate, cost_seconds=cost, lag_seconds=lag, restart_seconds=restart)
    assert interval == pytest.approx(best, rel=0.006)
    assert ratio * 100 == pytest.approx(percent, abs=0.1)


def test_a_published_optimum_found_on_a_grid_is_the_exact_one_rounded() -> None:
    assert best_interval_seconds(1 / (LLAMA_3 * 3600), 5) == pytest.approx(330.4, abs=0.3)


@pytest.mark.parametrize(("hours", "percent"), [(LLAMA_3, 88.5), (RSC_1, 81.2), (RSC_2, 92.7)])
def test_a_checkpoint_every_half_hour_is_what_it_was_found_to_be(hours: float, percent: float) -> None:
    ratio = effective_ratio(1800, rate=1 / (hours * 3600), cost_seconds=5, lag_seconds=120, restart_seconds=300)
    assert ratio * 100 == pytest.approx(percent, abs=0.06)


@pytest.mark.parametrize("x", [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.3, 0.5, 1.0])
def test_no_interval_of_a_fine_grid_is_better_than_the_best(x: float) -> None:
    rate, cost = x / 5.0, 5.0
    best = best_interval_seconds(rate, cost)
    highest = effective_ratio(best, rate=rate, cost_seconds=cost)
    grid = [best * 1.002**n for n in range(-2000, 2000)]
    found = max(grid, key=lambda interval: effective_ratio(interval, rate=rate, cost_seconds=cost))
    assert found == pytest.approx(best, rel=0.003)
    assert effective_ratio(found, rate=rate, cost_seconds=cost) <= highest * (1 + 1e-12)


@given(st.floats(min_value=1e-300, max_value=500.0))
def test_the_best_interval_solves_the_equation_of_the_optimum(x: float) -> None:
    """At the optimum the derivative is nothing: 1 - y = exp(-y - x), for y = λ W*."""
    y = best_interval_seconds(1.0, x)
    assert 0 < y <= 1
    if x > 1e-4:
        assert 1 - y == pytest.approx(math.exp(-y - x), rel=1e-9)
    else:
        series = math.sqrt(2 * x) - 2 * x / 3 + math.sqrt(2) / 18 * x**1.5
        assert y == pytest.approx(series, rel=1e-6)


@given(rates, costs)
def test_restarts_and_lags_scale_the_ratio_and_leave_the_optimum_where_it_is(rate: float, cost: float) -> None:
    best = best_interval_seconds(rate, cost)
    bare = effective_ratio(best, rate=rate, cost_seconds=cost)
    slow = effective_ratio(best, rate=rate, cost_seconds=cost, lag_seconds=60, restart_seconds=600)
    assert slow * (1 + rate * 660) == pytest.approx(bare)


@given(rates, costs, st.floats(0.1, 10), st.floats(0, 1e4), st.floats(0, 1e4))
def test_a_ratio_is_a_share_and_no_failures_are_better(
    rate: float, cost: float, factor: float, lag: float, restart: float
) -> None:
    interval = best_interval_seconds(rate, cost) * factor
    ratio = effective_ratio(interval, rate=rate, cost_seconds=cost, lag_seconds=lag, restart_seconds=restart)
    assert 0 <= ratio <= effective_ratio(interval, rate=0.0, cost_seconds=cost) <= 1


def test_without_failures_only_the_cost_of_checkpoints_counts() -> None:
    assert effective_ratio(95, rate=0.0, cost_seconds=5) == 0.95
    assert effective_ratio(math.inf, rate=0.0, cost_seconds=5) == 1
    assert best_interval_seconds(0.0, 5.0) == math.inf
    assert daly_interval_seconds(0.0, 5.0) == math.inf


def test_what_is_free_is_done_all_the_time_and_what_takes_for_ever_never_ends() -> None:
    assert best_interval_seconds(1e-4, 0.0) == 0
    assert effective_ratio(math.inf, rate=1e-4, cost_seconds=5) == 0
    assert effective_ratio(1e9, rate=1.0, cost_seconds=5) == 0


def test_figures_too_small_to_multiply_are_no_reason_to_raise() -> None:
    assert best_interval_seconds(1e-300, 1e-300) == pytest.approx(math.sqrt(2))
    assert effective_ratio(1e-300, rate=1e-300, cost_seconds=1e-300) == 0.5


@pytest.mark.parametrize("interval", [0.0, -1.0, math.nan])
def test_an_interval_of_nothing_has_no_ratio(interval: float) -> None:
    with pytest.raises(ValueError, match="more than 0"):
        effective_ratio(interval, rate=1e-4, cost_seconds=1)


def test_negative_rates_and_times_are_refused() -> None:
    with pytest.raises(ValueError, match="0 or more"):
        effective_ratio(1, rate=-1e-4, cost_seconds=1)
    with pytest.raises(ValueError, match="0 or more"):
        best_interval_seconds(1e-4, -1)


@given(rates, st.floats(min_value=1e-6, max_value=1e-2))
def test_the_approximation_comes_near_where_stalls_are_short(rate: float, x: float) -> None:
    cost = x / rate
    best = best_interval_seconds(rate, cost)
    assert daly_interval_seconds(rate, cost) == pytest.approx(best, rel=0.03)


def test_with_stalls_longer_than_half_the_time_between_failures_the_approximation_is_that_time() -> None:
    assert daly_interval_seconds(0.01, 49.0) == pytest.approx(math.sqrt(9800) - 49)
    assert daly_interval_seconds(0.01, 50.0) == 100
