"""The loss of a job as a falling curve, fitted while it trains: how much an iteration still learns.

Two shapes are compared: exponential, L(i) = c + A exp(-θ i), which COCI assumes (H. Li, Z. Wang, H. Zhao et al.,
FGCS 164, 2025, 107597), and a power law, L(i) = c + A (1 + i/s)^-θ, as large models have. Both have three
parameters, so that the smaller residual is also the smaller AIC. For a given θ both are linear in c and A, which
are found by least absolute deviations (iteratively reweighted least squares); θ is searched for. The fit is to
medians of neighboring losses: noise and spikes count little, and neither c nor the sign of the loss is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter, mul
from statistics import median
from typing import Any

from holdfast.pacing.estimator import ThinnedSamples

KEPT_LOSSES = 512
GROUPS = 24
"""Medians that a curve is fitted to."""
FEWEST_LOSSES = 4 * GROUPS
MOST_INVALID = 10
"""Losses in a row that are not finite, after which the curve no longer counts."""
LARGEST_LOSS = 1e100
REFIT_SHARE = 0.125
"""Growth of the record after which it is fitted again."""
UNEXPLAINED = 0.7
"""A curve must leave less than this share of the deviations from a constant, or it may be noise."""
CLEARLY = 2.5
"""Rise of the loss, in deviations between neighbors, that is no noise."""
NEARER = 0.7
"""Share of the error of the whole record's curve that a curve of its newer half must reach to replace it."""
SEARCHED, REFINED, PASSES = 10, 4, 3
EXPONENTIAL_RANGE = 0.05, GROUPS / 2
"""θ times the length of the record: a steeper curve depends on two medians."""
POWER_RANGE = 0.05, 4.0
POWER_SCALE = 1 / GROUPS
"""s as a share of the record."""

FLAT = "the loss does not fall by more than its noise"
RISING = "the loss is rising"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve:
    """L(i) = floor + scale · u(i - origin), where u(t) is exp(-θ t), or (1 + t/s)^-θ with `power_scale`."""

    floor: float
    """c: where the loss is heading."""
    scale: float
    """A: its distance from the floor at `origin`."""
    decay: float
    """θ: per iteration, or the exponent of the power law."""
    origin: int = 0
    power_scale: float | None = None
    """s, in iterations; `None` for an exponential curve."""

    @property
    def is_falling(self) -> bool:
        numbers = self.scale, self.decay, self.power_scale or 1.0
        return all(0 < each < math.inf for each in numbers)

    def loss(self, iteration: float) -> float:
        """L(i)."""
        return self.floor + self.left(iteration)

    def left(self, iteration: float) -> float:
        """Return what is still to be learned: the loss above its floor."""
        at = iteration - self.origin
        if self.power_scale is None:
            return self.scale * math.exp(min(-self.decay * at, 700.0))
        return self.scale * math.pow(self._from_origin(iteration), -self.decay)

    def rate(self, iteration: float) -> float:
        """r(i) = -L'(i): what an iteration learns."""
        if self.power_scale is None:
            return self.decay * self.left(iteration)
        return self.decay * self.left(iteration) / (self.power_scale * self._from_origin(iteration))

    def weight(self, at: float, end: float) -> float:
        """∫√r from `at` to `end`."""
        if self.power_scale is None:
            x = self.decay * (end - at) / 2
            return math.sqrt(self.rate(at)) * (end - at if x < 1e-9 else -math.expm1(-x) * 2 / self.decay)
        here = self._from_origin(at)
        power, logarithm = (1 - self.decay) / 2, math.log(self._from_origin(end) / here)
        grown = logarithm if abs(power * logarithm) < 1e-9 else math.expm1(power * logarithm) / power
        return math.sqrt(self.rate(at)) * here * grown * self.power_scale

    def iterations_for(self, share: float, at: float, end: float) -> float:
        """Return Δ with `weight(at, at + Δ)` = `share` of `weight(at, end)`."""
        if self.power_scale is None:
            x = self.decay * (end - at) / 2
            return share * (end - at) if x < 1e-9 else -math.log1p(math.expm1(-x) * share) * 2 / self.decay
        # √r ∝ z^(-(θ + 1)/2) with z = 1 + t/s
        here = self._from_origin(at)
        power, logarithm = (1 - self.decay) / 2, math.log(self._from_origin(end) / here)
        if abs(power * logarithm) < 1e-9:
            return here * math.expm1(share * logarithm) * self.power_scale
        whole = math.expm1(power * logarithm)
        return here * math.expm1(math.log1p(share * whole) / power) * self.power_scale

    def _from_origin(self, iteration: float) -> float:
        assert self.power_scale is not None
        return 1 + max(0.0, iteration - self.origin) / self.power_scale


class LossRecord:
    """The losses of a job, thinned, and the curve through them.

    `add` takes a microsecond, `curve` a few milliseconds where it fits anew.
    """

    def __init__(self) -> None:
        self._curve: LossCurve | None = None
        self._why_none = ""
        self._invalid = self._added = self._fit_at = 0
        self._restart([])

    def add(self, iteration: int, loss: float) -> None:
        """Add the loss of an iteration. After a restore, it replaces those of the same and later iterations."""
        if not abs(loss) <= LARGEST_LOSS:
            self._invalid += 1
            return
        self._invalid = 0
        if self._iterations.values and iteration <= self._iterations.values[-1]:
            known = zip(self._iterations.values, self._losses.values, strict=True)
            self._restart([(at, each) for at, each in known if at < iteration])
        self._iterations.add(iteration)
        self._losses.add(loss)
        self._added += 1

    @property
    def curve(self) -> LossCurve | None:
        """`None` where the losses show no falling curve; `why_none` says why."""
        if self._invalid >= MOST_INVALID:
            return None
        if self._added >= self._fit_at:
            self._fit_at = self._added + max(GROUPS, int(self._added * REFIT_SHARE))
            self._fit()
        return self._curve

    @property
    def why_none(self) -> str:
        """Why there is no curve, in words; empty where there is one."""
        if self._invalid >= MOST_INVALID:
            return f"the last {self._invalid:,} losses are not finite"
        return "" if self.curve is not None else self._why_none

    def state_dict(self) -> list[list[float]]:
        """Return the thinned losses as JSON types."""
        return [list(self._iterations.values), list(self._losses.values)]

    def load_state_dict(self, state: Any) -> None:
        """Continue an earlier record; an invalid one is ignored."""
        try:
            found = [(int(at), float(loss)) for at, loss in zip(*state, strict=True)]
        except (TypeError, ValueError, OverflowError):
            return
        self._restart(sorted(each for each in found if abs(each[1]) <= LARGEST_LOSS)[:KEPT_LOSSES])

    def _fit(self) -> None:
        losses = len(self._losses.values)
        if losses < FEWEST_LOSSES:
            self._fit_at = self._added + 1
            self._curve, self._why_none = None, f"only {losses} losses are known, {FEWEST_LOSSES} are needed"
        else:
            self._curve, self._why_none = fit(self._iterations.values, self._losses.values)

    def _restart(self, known: Sequence[tuple[float, float]]) -> None:
        # one of each for every loss, so that both are thinned alike
        self._iterations, self._losses = ThinnedSamples(KEPT_LOSSES), ThinnedSamples(KEPT_LOSSES)
        for at, loss in known:
            self._iterations.add(at)
            self._losses.add(loss)
        self._added = len(known)
        self._fit_at = self._added


def fit(iterations: Sequence[float], losses: Sequence[float]) -> tuple[LossCurve | None, str]:
    """Return the curve through these losses, or `None` and why there is none.

    It is that of the whole record, unless the newer half shows another: the learning rate was changed.
    """
    half = len(losses) // 2
    newer = _Medians(_medians(iterations[half:]), _medians(losses[half:]))
    if newer.rises:
        return None, RISING
    whole = _Medians(_medians(iterations), _medians(losses)).curve()
    off = newer.error(whole) if whole else math.inf
    if off <= newer.noise:
        return whole, ""
    other = newer.curve()
    if other is not None and newer.error(other) < NEARER * off:
        return other, ""
    return whole, "" if whole else FLAT


@dataclass(frozen=True, slots=True)
class _Medians:
    iterations: list[float]
    losses: list[float]

    @property
    def noise(self) -> float:
        """Typical difference between neighbors."""
        return median(abs(b - a) for a, b in pairwise(self.losses))

    @property
    def rises(self) -> bool:
        """Whether the last third is above one of those before by more than noise."""
        third = len(self.losses) // 3
        first, middle, last = self.losses[:third], self.losses[third:-third], self.losses[-third:]
        return median(last) > min(median(first), median(middle)) + CLEARLY * self.noise

    def curve(self) -> LossCurve | None:
        """Return the better of both shapes; `None` where the loss does not fall, or not by more than its noise."""
        first, span = self.iterations[0], self.iterations[-1] - self.iterations[0]
        middle = median(self.losses)
        deviation = math.fsum(abs(each - middle) for each in self.losses) / len(self.losses)
        if not (span > 0 and deviation > 0):
            return None
        at = [(each - first) / span for each in self.iterations]
        ys = [(each - middle) / deviation for each in self.losses]
        logs = [math.log1p(x / POWER_SCALE) for x in at]
        exponential = _search(at, ys, EXPONENTIAL_RANGE)
        power = _search(logs, ys, POWER_RANGE)
        best = min(exponential, power, key=attrgetter("error"))
        if best.scale <= 0 or best.error >= UNEXPLAINED * len(self.losses):
            return None
        found = LossCurve(
            floor=middle + deviation * best.floor,
            scale=deviation * best.scale,
            decay=best.decay if best is power else best.decay / span,
            origin=round(first),
            power_scale=POWER_SCALE * span if best is power else None,
        )
        return found if found.is_falling else None

    def error(self, curve: LossCurve) -> float:
        """Mean absolute deviation from a curve."""
        off = (abs(loss - curve.loss(at)) for at, loss in zip(self.iterations, self.losses, strict=True))
        return math.fsum(off) / len(self.losses)


@dataclass(frozen=True, slots=True)
class _Line:
    """c + A u with u = exp(-θ x)."""

    decay: float
    floor: float
    scale: float
    error: float
    """Sum of absolute deviations."""


def _search(at: Sequence[float], ys: Sequence[float], between: tuple[float, float]) -> _Line:
    """Return the best θ on a logarithmic grid, then on finer ones around it."""
    flattest, steepest = between
    step = (steepest / flattest) ** (1 / (SEARCHED - 1))
    best = min((_line(flattest * step**n, at, ys) for n in range(SEARCHED)), key=attrgetter("error"))
    for _ in range(REFINED):
        step = math.sqrt(step)
        around = (_line(min(best.decay * factor, steepest), at, ys) for factor in (step, 1 / step))
        best = min(best, *around, key=attrgetter("error"))
    return best


def _line(decay: float, at: Sequence[float], ys: Sequence[float]) -> _Line:
    """Return c and A of the least absolute deviations for this θ."""
    us = [math.exp(-decay * x) for x in at]
    weights = [1.0] * len(ys)
    for _ in range(PASSES):
        floor, scale = _weighted(us, ys, weights)
        off = [abs(y - floor - scale * u) for u, y in zip(us, ys, strict=True)]
        least = sum(off) / len(off) * 1e-3  # a point on the line must not outweigh all others
        if least == 0:
            break
        weights = [1 / max(each, least) for each in off]
    return _Line(decay, floor, scale, sum(off))


def _weighted(us: Sequence[float], ys: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Return c and A of the least weighted squares."""
    total = sum(weights)
    mean_u = sum(map(mul, weights, us)) / total
    mean_y = sum(map(mul, weights, ys)) / total
    pulls = [w * (u - mean_u) for w, u in zip(weights, us, strict=True)]
    scale = sum(map(mul, pulls, ys)) / sum(map(mul, pulls, us))
    return mean_y - scale * mean_u, scale


def _medians(values: Sequence[float]) -> list[float]:
    edges = [len(values) * n // GROUPS for n in range(GROUPS + 1)]
    return [median(values[a:b]) for a, b in pairwise(edges)]
