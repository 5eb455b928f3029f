"""The estimate of a job's failure rate: its closed form, what it forgets, how far it is to be believed."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.pacing.failures import HALF_LIFE_SECONDS, NEARLY_NORMAL, Failures, gamma_quantile
from holdfast.pacing.interval_cost import best_interval_seconds, effective_ratio

DAY = 86400.0
GPUS = 16_384
LLAMA_3_SECONDS = 3.09 * 3600


def test_a_job_that_has_not_run_yet_fails_as_clusters_report() -> None:
    assert Failures().prior_seconds / 3600 == pytest.approx(199.2, abs=0.1)
    assert Failures(world_size=GPUS).prior_seconds / 3600 == pytest.approx(3.0, abs=0.01)
    assert Failures(world_size=1024).rate * Failures(world_size=1024).prior_seconds == 1


def test_a_time_that_somebody_stated_takes_the_place_of_the_published_one() -> None:
    assert Failures(world_size=GPUS, mean_seconds=600.0).prior_seconds == 600


@pytest.mark.parametrize("odd", [0.0, -5.0, math.nan, math.inf])
def test_a_stated_time_that_is_none_is_not_used(odd: float) -> None:
    assert Failures(mean_seconds=odd).rate == Failures().rate


def test_the_posterior_is_the_conjugate_one() -> None:
    seen = Failures(count=3, exposure_seconds=5000.0, mean_seconds=1000.0)
    assert seen.rate == 4 / 6000
    assert seen.none_within(3000.0) == pytest.approx((6000 / 9000) ** 4)
    assert seen.none_within(0.0) == 1


def test_what_was_seen_a_half_life_ago_counts_half() -> None:
    seen = Failures(count=4, exposure_seconds=DAY).after(HALF_LIFE_SECONDS, failures=1)
    assert seen.count == pytest.approx(4 / 2 + 1)
    assert seen.exposure_seconds == pytest.approx(DAY / 2 + HALF_LIFE_SECONDS / (2 * math.log(2)))


@given(st.lists(st.tuples(st.floats(0, 30 * DAY), st.integers(0, 5)), max_size=8))
def test_it_does_not_matter_in_how_many_steps_time_is_told(steps: list[tuple[float, int]]) -> None:
    at_once = in_halves = Failures(count=2, exposure_seconds=DAY)
    for seconds, failures in steps:
        at_once = at_once.after(seconds, failures=failures)
        in_halves = in_halves.after(seconds / 3).after(seconds * 2 / 3, failures=failures)
    assert in_halves.count == pytest.approx(at_once.count)
    assert in_halves.exposure_seconds == pytest.approx(at_once.exposure_seconds)


def test_a_short_time_counts_in_full() -> None:
    assert Failures().after(60.0).exposure_seconds == pytest.approx(60, rel=1e-4)


@given(st.floats(0, 100), st.floats(0, 1e8))
def test_quiet_time_lowers_the_rate_and_a_failure_raises_it(count: float, seconds: float) -> None:
    seen = Failures(count=count, exposure_seconds=seconds)
    assert seen.after(0.0, failures=1).rate > seen.rate
    fresh = Failures()
    assert fresh.after(seconds).rate <= fresh.rate


@pytest.mark.parametrize("probability", [0.001, 0.05, 0.3, 0.5, 0.95, 0.999])
def test_a_quantile_is_right_where_it_has_a_closed_form(probability: float) -> None:
    assert gamma_quantile(1.0, probability) == pytest.approx(-math.log(1 - probability), rel=1e-7)
    x = gamma_quantile(2.0, probability)
    assert 1 - math.exp(-x) * (1 + x) == pytest.approx(probability, rel=1e-7)
    x = gamma_quantile(0.5, probability)
    assert math.erf(math.sqrt(x)) == pytest.approx(probability, rel=1e-7)


@pytest.mark.parametrize(
    ("shape", "probability", "published"),
    [(5.0, 0.05, 1.970150), (5.0, 0.95, 9.153519), (50.0, 0.05, 38.964658), (50.0, 0.95, 62.171056)],
)
def test_a_quantile_is_the_published_one(shape: float, probability: float, published: float) -> None:
    """Half of the chi-squared quantiles of 10 and 100 degrees of freedom."""
    assert gamma_quantile(shape, probability) == pytest.approx(published, rel=1e-5)


@pytest.mark.parametrize("probability", [0.05, 0.95])
def test_where_the_approximation_begins_it_agrees_with_the_series(probability: float) -> None:
    series, approximation = (gamma_quantile(NEARLY_NORMAL * factor, probability) for factor in (1, 1 + 1e-9))
    assert approximation == pytest.approx(series, rel=1e-4)


@given(st.floats(0.5, 1e4), st.floats(0.001, 0.998))
def test_a_quantile_grows_with_its_probability(shape: float, probability: float) -> None:
    assert 0 <= gamma_quantile(shape, probability) < gamma_quantile(shape, probability + 0.001)


def test_the_interval_of_a_job_that_has_not_run_yet_has_a_closed_form() -> None:
    low, high = Failures(mean_seconds=1000.0).interval()
    assert low == pytest.approx(-math.log(0.95) / 1000)
    assert high == pytest.approx(-math.log(0.05) / 1000)


def test_nine_in_ten_intervals_of_simulated_jobs_hold_the_rate_that_was() -> None:
    rng, jobs, held = Random(20261122), 2000, 0
    for _ in range(jobs):
        rate = rng.expovariate(LLAMA_3_SECONDS)
        seen, left = Failures(mean_seconds=LLAMA_3_SECONDS), rng.uniform(0, DAY)
        while (until := rng.expovariate(rate)) < left:
            seen, left = seen.after(until, failures=1), left - until
        low, high = seen.after(left).interval()
        held += low <= rate <= high
    assert 0.88 <= held / jobs <= 0.92


def _lived(seen: Failures, rng: Random, seconds: float, mean_seconds: float) -> Failures:
    while (until := rng.expovariate(1 / mean_seconds)) < seconds:
        seen, seconds = seen.after(until, failures=1), seconds - until
    return seen.after(seconds)


def _worth(planned_rate: float, mean_seconds: float) -> float:
    return effective_ratio(
        best_interval_seconds(planned_rate, 5.0),
        rate=1 / mean_seconds,
        cost_seconds=5.0,
        lag_seconds=120.0,
        restart_seconds=300.0,
    )


@pytest.mark.parametrize("wrong", [0.1, 10.0])
def test_three_days_after_a_start_with_a_prior_ten_times_wrong_little_is_lost(wrong: float) -> None:
    rng, oracle = Random(3), _worth(1 / LLAMA_3_SECONDS, LLAMA_3_SECONDS)
    prior = Failures(mean_seconds=LLAMA_3_SECONDS * wrong)
    assert oracle - _worth(prior.rate, LLAMA_3_SECONDS) > 0.01
    worths = [_worth(_lived(prior, rng, 3 * DAY, LLAMA_3_SECONDS).rate, LLAMA_3_SECONDS) for _ in range(100)]
    assert oracle - sum(worths) / len(worths) <= 0.005


@pytest.mark.parametrize("change", [0.25, 4.0])
def test_two_half_lives_after_the_rate_has_changed_little_is_lost(change: float) -> None:
    rng, after = Random(4), LLAMA_3_SECONDS * change
    worths = []
    for _ in range(20):
        seen = _lived(Failures(world_size=GPUS), rng, 4 * HALF_LIFE_SECONDS, LLAMA_3_SECONDS)
        worths.append(_worth(_lived(seen, rng, 2 * HALF_LIFE_SECONDS, after).rate, after))
    assert _worth(1 / after, after) - sum(worths) / len(worths) <= 0.01
