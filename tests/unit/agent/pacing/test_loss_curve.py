"""The loss curve: found through noise and spikes, and not found where there is none."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.pacing.loss_curve import FEWEST_LOSSES, MOST_INVALID, LossCurve, LossRecord

STEPS = 4000


def followed(
    loss: Callable[[int], float], *, noise: float = 0.0, spikes: float = 0.0, seed: int = 1, steps: int = STEPS
) -> LossRecord:
    """After `steps` losses with this noise, as a share, and such a share of spikes."""
    rng, fit = Random(seed), LossRecord()
    for iteration in range(1, steps + 1):
        spike = rng.choice([3, 30, 1e6]) if rng.random() < spikes else 1
        fit.add(iteration, loss(iteration) * (1 + rng.gauss(0, noise)) * spike)
    return fit


def found(fit: LossRecord) -> LossCurve:
    assert fit.why_none == ""
    assert fit.curve is not None
    return fit.curve


def exponential(steepness: float, floor: float = 1.5, scale: float = 3.0) -> Callable[[int], float]:
    return lambda iteration: floor + scale * math.exp(-steepness * iteration / STEPS)


@settings(max_examples=25)
@given(st.floats(1.5, 9.0), st.floats(0.5, 10.0), st.floats(-50.0, 50.0))
def test_a_clean_curve_is_found_whatever_its_floor(steepness: float, scale: float, floor: float) -> None:
    curve = found(followed(exponential(steepness, floor, scale)))
    assert curve.decay * STEPS == pytest.approx(steepness, rel=0.1)
    assert curve.floor == pytest.approx(floor, abs=0.1 * scale)
    assert curve.left(STEPS // 2) == pytest.approx(scale * math.exp(-steepness / 2), rel=0.15)


@settings(max_examples=25, derandomize=True)  # some noise is beyond any bound
@given(st.floats(2.0, 8.0), st.integers(0, 1000))
def test_noise_and_spikes_leave_it_near(steepness: float, seed: int) -> None:
    curve = found(followed(exponential(steepness), noise=0.03, spikes=0.03, seed=seed))
    assert curve.decay * STEPS == pytest.approx(steepness, rel=0.4)
    truth = LossCurve(floor=1.5, scale=3.0, decay=steepness / STEPS)
    assert curve.rate(STEPS // 2) == pytest.approx(truth.rate(STEPS // 2), rel=0.35)


@settings(max_examples=25, derandomize=True)  # some noise is beyond any bound
@given(st.floats(0.2, 0.8), st.integers(0, 1000))
def test_a_power_law_is_described_where_the_job_is(exponent: float, seed: int) -> None:
    curve = found(followed(lambda i: 1 + 5 * (i + 10) ** -exponent, noise=0.001, spikes=0.02, seed=seed))
    at = int(STEPS * 0.75)
    truth = 5 * exponent * (at + 10) ** (-exponent - 1)
    assert truth / 2 <= curve.rate(at) <= truth * 2


def test_each_shape_is_recognized() -> None:
    assert found(followed(exponential(5.0), noise=0.002)).power_scale is None
    assert found(followed(lambda i: 1 + 5 * (1 + i / 200) ** -0.5, noise=0.002)).power_scale is not None


CURVES = [
    LossCurve(floor=1.0, scale=3.0, decay=0.002),
    LossCurve(floor=1.0, scale=3.0, decay=1e-14),
    LossCurve(floor=0.0, scale=2.0, decay=0.5, power_scale=30.0, origin=7),
    LossCurve(floor=0.0, scale=2.0, decay=1.0, power_scale=30.0),
    LossCurve(floor=0.0, scale=2.0, decay=3.0, power_scale=30.0),
]


@pytest.mark.parametrize("curve", CURVES, ids=str)
@pytest.mark.parametrize("share", [1e-3, 0.3, 1.0])
def test_the_iterations_for_a_share_have_that_share_of_the_root_of_the_rate(
    curve: LossCurve, share: float
) -> None:
    at, end = 100.0, 2100.0

    def integral(start: float, stop: float) -> float:
        step = (stop - start) / 20_000
        return math.fsum(math.sqrt(curve.rate(start + (n + 0.5) * step)) for n in range(20_000)) * step

    assert curve.weight(at, end) == pytest.approx(integral(at, end), rel=1e-4)
    found = curve.iterations_for(share, at, end)
    assert integral(at, at + found) / integral(at, end) == pytest.approx(share, rel=1e-4)


@pytest.mark.parametrize("curve", CURVES, ids=str)
def test_the_rate_is_the_slope_of_the_loss(curve: LossCurve) -> None:
    assert curve.rate(500) == pytest.approx((curve.loss(499) - curve.loss(501)) / 2, rel=1e-3, abs=1e-12)


def test_a_record_continues_after_a_restart() -> None:
    first = followed(exponential(5.0))
    second = LossRecord()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.curve == first.curve


@pytest.mark.parametrize(
    "state", [None, 3, [], [[1]], [[1], ["x"]], [[1, 2], [1.0]], [[None], [1.0]], [[1], [math.inf]]]
)
def test_an_invalid_record_is_ignored(state: object) -> None:
    record = LossRecord()
    record.load_state_dict(state)
    assert record.why_none == "only 0 losses are known, 96 are needed"


def test_noise_alone_is_hardly_ever_a_curve() -> None:
    """It may be one by chance: a test of one per cent, as it were."""
    fits = [followed(lambda i: 2.0, noise=0.002 * (1 + seed % 100), seed=seed, steps=600) for seed in range(300)]
    assert sum(fit.curve is not None for fit in fits) <= 6
    assert {fit.why_none for fit in fits} <= {
        "",
        "the loss is rising",
        "the loss does not fall by more than its noise",
    }


def test_a_constant_loss_has_no_curve() -> None:
    fit = followed(lambda i: 2.0)
    assert (fit.curve, fit.why_none) == (None, "the loss does not fall by more than its noise")


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_rising_loss_has_no_curve_and_that_is_said(noise: float) -> None:
    fit = followed(lambda i: 2 + i / STEPS, noise=noise)
    assert (fit.curve, fit.why_none) == (None, "the loss is rising")


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_loss_that_fell_and_then_diverges_has_no_curve(noise: float) -> None:
    falls = exponential(5.0)
    fit = followed(lambda i: falls(i) + max(0, i - 3000) / 500, noise=noise)
    assert (fit.curve, fit.why_none) == (None, "the loss is rising")


def test_a_loss_that_diverges_slowly_to_infinity_has_no_curve() -> None:
    fit = followed(lambda i: 1.2 ** (i / 10) if i < 3500 else math.inf)
    assert fit.curve is None


def test_too_few_losses_say_nothing_and_how_many_are_needed() -> None:
    fit = followed(exponential(5.0), steps=FEWEST_LOSSES - 1)
    assert (fit.curve, fit.why_none) == (None, "only 95 losses are known, 96 are needed")
    fit.add(FEWEST_LOSSES, 1.0)
    assert fit.why_none != "only 95 losses are known, 96 are needed"


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_left_out_and_many_in_a_row_are_said(odd: float) -> None:
    fit = followed(exponential(5.0))
    for n in range(1, MOST_INVALID):
        fit.add(STEPS + n, odd)
    assert fit.curve is not None
    fit.add(STEPS + MOST_INVALID, odd)
    assert (fit.curve, fit.why_none) == (None, "the last 10 losses are not finite")
    fit.add(STEPS + MOST_INVALID + 1, 1.5)
    assert fit.curve is not None


@given(st.lists(st.tuples(st.integers(-5, 500), st.floats()), max_size=300))
@settings(max_examples=50)
def test_no_losses_are_odd_enough_to_raise(losses: list[tuple[int, float]]) -> None:
    fit = LossRecord()
    for iteration, loss in losses:
        fit.add(iteration, loss)
    assert fit.curve is not None or fit.why_none


@settings(max_examples=50)
@given(st.lists(st.floats(), min_size=100, max_size=200))
def test_neither_are_they_in_any_number(losses: list[float]) -> None:
    fit = LossRecord()
    for iteration, loss in enumerate(losses):
        fit.add(iteration, loss)
    assert fit.curve is not None or fit.why_none


def test_a_restore_forgets_the_losses_that_it_undoes() -> None:
    fit = followed(exponential(5.0))
    for iteration in range(STEPS + 1, STEPS + 2000):
        fit.add(iteration, 50.0)
    assert fit.why_none == "the loss is rising"
    for iteration in range(STEPS + 1, STEPS + 1000):
        fit.add(iteration, exponential(5.0)(iteration))
    assert found(fit).decay * STEPS == pytest.approx(5.0, rel=0.1)


def test_the_record_stays_bounded_and_covers_the_whole_job() -> None:
    fit = followed(exponential(5.0), steps=20 * STEPS)
    assert len(fit._losses.values) == len(fit._iterations.values) < 512
    assert fit._iterations.values[0] == 1
    assert fit._iterations.values[-1] > 19 * STEPS


def test_it_is_fitted_anew_only_when_the_record_has_grown() -> None:
    fit = followed(exponential(5.0))
    first = fit.curve
    for iteration in range(STEPS + 1, STEPS + 400):
        fit.add(iteration, 1.5)
        assert fit.curve is first
    for iteration in range(STEPS + 400, STEPS + 700):
        fit.add(iteration, 1.5)
    assert fit.curve is not first


def test_a_dropped_learning_rate_shows_soon_afterwards() -> None:
    """The loss was flat, and falls again since the drop at 3000."""
    falls = exponential(8.0)
    fit = followed(lambda i: falls(i) - (1 - math.exp(-max(0, i - 3000) / 600)), noise=0.005, seed=3)
    truth = math.exp(-500 / 600) / 600
    assert found(fit).rate(3500) == pytest.approx(truth, rel=0.5)


def test_an_excursion_that_outlasts_the_medians_leaves_the_curve_near() -> None:
    falls = exponential(4.0)
    curve = found(followed(lambda i: falls(i) + (5 if 2600 <= i < 2900 else 0), noise=0.01))
    assert curve.decay * STEPS == pytest.approx(4.0, rel=0.1)


def test_a_curve_tells_the_loss_what_is_left_and_how_fast_it_falls() -> None:
    curve = LossCurve(floor=1.0, scale=2.0, decay=0.01, origin=100)
    assert curve.loss(100) == 3
    assert curve.left(200) == pytest.approx(2 / math.e)
    assert curve.rate(200) == pytest.approx(0.02 / math.e)
    assert math.isfinite(curve.loss(-(10**9)))
