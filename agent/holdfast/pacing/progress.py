"""How a job's loss falls, as an exponential curve fitted while it runs: what a policy may know of its progress.

The curve is L(i) = c + A exp(-θ i). For a given θ it is linear in c and A, which are found by least absolute
deviations (iteratively reweighted); θ is searched for. Medians of neighbouring losses are fitted, not single ones.
So neither noise nor spikes count for much, and nothing has to be known of the floor c or of the sign of a loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter, mul
from statistics import median

from .estimate import Reservoir

KEPT_LOSSES = 512
GROUPS = 24
"""Medians that a curve is fitted to."""
FEWEST_LOSSES = 4 * GROUPS
ODD_LOSSES = 10
"""So many losses in a row that are no numbers mean that nothing is known of the progress."""
LARGEST_LOSS = 1e100
"""One beyond it is as good as infinite."""
REFIT_SHARE = 0.125
"""By how much longer the record has to be before it is fitted again."""
UNEXPLAINED = 0.7
"""A curve has to leave less than this share of the deviations from a constant: else it may be noise."""
CLEARLY = 2.5
ANOTHER_STORY = 0.7
"""By which share a curve has to be nearer to the newer half than that of the whole, to take its place."""
STEEPEST = GROUPS / 2
"""θ times the length of the record, at most: a steeper curve rests on two medians."""
FLATTEST = 0.05
SEARCHED = 10
REFINED = 4
PASSES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve:
    """L(i) = floor + scale * exp(-decay * (i - origin))."""

    floor: float
    """Where the loss is heading."""
    scale: float
    """How far above it the loss was at `origin`."""
    decay: float
    """θ, per iteration."""
    origin: int = 0

    def left(self, iteration: float) -> float:
        """What is still to be learned: the loss above its floor."""
        return self.scale * math.exp(min(-self.decay * (iteration - self.origin), 700.0))

    def loss(self, iteration: float) -> float:
        return self.floor + self.left(iteration)

    def rate(self, iteration: float) -> float:
        """r(i) = -L'(i): what an iteration learns."""
        return self.decay * self.left(iteration)


class ProgressFit:
    """Follows the losses of a job. `add` takes a microsecond, `curve` some milliseconds where it fits anew."""

    def __init__(self) -> None:
        self._forget()
        self._curve: LossCurve | None = None
        self._why_none = ""
        self._odd = 0
        self._added = 0
        self._fit_at = 0

    def add(self, iteration: int, loss: float) -> None:
        """The loss of an iteration. One that comes again after a restore replaces it and all later ones."""
        if not abs(loss) <= LARGEST_LOSS:
            self._odd += 1
            return
        self._odd = 0
        if self._iterations.values and iteration <= self._iterations.values[-1]:
            self._rewind(iteration)
        self._iterations.add(iteration)
        self._losses.add(loss)
        self._added += 1

    @property
    def curve(self) -> LossCurve | None:
        """None where the losses show no falling curve; `why_none` says why."""
        if self._odd >= ODD_LOSSES:
            return None
        if self._added >= self._fit_at:
            self._fit_at = self._added + max(GROUPS, int(self._added * REFIT_SHARE))
            self._fit()
        return self._curve

    @property
    def why_none(self) -> str:
        """In words; empty where there is a curve."""
        if self._odd >= ODD_LOSSES:
            return f"the last {self._odd:,} losses are not numbers"
        return "" if self.curve is not None else self._why_none

    def _fit(self) -> None:
        losses = len(self._losses.values)
        if losses < FEWEST_LOSSES:
            self._fit_at = self._added + 1
            self._curve, self._why_none = None, f"only {losses} losses are known, {FEWEST_LOSSES} are needed"
        else:
            self._curve, self._why_none = fit(self._iterations.values, self._losses.values)

    def _rewind(self, iteration: int) -> None:
        before = [
            (at, loss)
            for at, loss in zip(self._iterations.values, self._losses.values, strict=True)
            if at < iteration
        ]
        self._forget()
        for at, loss in before:
            self._iterations.add(at)
            self._losses.add(loss)
        self._added = self._fit_at = len(before)

    def _forget(self) -> None:
        # one of each for every loss: so they are thinned alike, and stay side by side
        self._iterations, self._losses = Reservoir(KEPT_LOSSES), Reservoir(KEPT_LOSSES)


FLAT = "the loss does not fall by more than its noise"
RISING = "the loss is rising"


def fit(iterations: Sequence[float], losses: Sequence[float]) -> tuple[LossCurve | None, str]:
    """The curve through these losses, or why there is none.

    That of the whole record, unless its newer half tells another story: the learning rate was changed, or the loss
    falls in some other way than exponentially.
    """
    half = len(losses) // 2
    newer = _Record(_medians(iterations[half:]), _medians(losses[half:]))
    if newer.rises:
        return None, RISING
    whole = _Record(_medians(iterations), _medians(losses)).curve()
    off = newer.error(whole) if whole else math.inf
    if off <= newer.noise:
        return whole, ""
    other = newer.curve()
    if other is not None and newer.error(other) < ANOTHER_STORY * off:
        return other, ""
    return whole, "" if whole else FLAT


@dataclass(frozen=True, slots=True)
class _Record:
    iterations: list[float]
    losses: list[float]

    @property
    def noise(self) -> float:
        """By how much neighbours differ."""
        return median(abs(b - a) for a, b in pairwise(self.losses))

    @property
    def rises(self) -> bool:
        """Whether the last third lies above one of those before, by more than noise."""
        third = len(self.losses) // 3
        first, middle, last = self.losses[:third], self.losses[third:-third], self.losses[-third:]
        return median(last) > min(median(first), median(middle)) + CLEARLY * self.noise

    def curve(self) -> LossCurve | None:
        """None where the loss does not fall, or not by more than its noise."""
        first, span = self.iterations[0], self.iterations[-1] - self.iterations[0]
        middle = median(self.losses)
        deviation = math.fsum(abs(each - middle) for each in self.losses) / len(self.losses)
        if not (span > 0 and deviation > 0):
            return None
        line = _search(
            [(each - first) / span for each in self.iterations],
            [(each - middle) / deviation for each in self.losses],
        )
        if line.scale <= 0 or line.error >= UNEXPLAINED * len(self.losses):
            return None
        return LossCurve(
            floor=middle + deviation * line.floor,
            scale=deviation * line.scale,
            decay=line.decay / span,
            origin=round(first),
        )

    def error(self, curve: LossCurve) -> float:
        """Mean absolute deviation from a curve."""
        off = (abs(loss - curve.loss(at)) for at, loss in zip(self.iterations, self.losses, strict=True))
        return math.fsum(off) / len(self.losses)


@dataclass(frozen=True, slots=True)
class _Line:
    """c + A u with u = exp(-θ x), x from 0 to 1."""

    decay: float
    floor: float
    scale: float
    error: float
    """Sum of absolute deviations."""


def _search(at: Sequence[float], ys: Sequence[float]) -> _Line:
    """The best θ on a logarithmic grid, then ever closer around it."""
    step = (STEEPEST / FLATTEST) ** (1 / (SEARCHED - 1))
    best = min((_line(FLATTEST * step**n, at, ys) for n in range(SEARCHED)), key=attrgetter("error"))
    for _ in range(REFINED):
        step = math.sqrt(step)
        around = (_line(min(best.decay * factor, STEEPEST), at, ys) for factor in (step, 1 / step))
        best = min(best, *around, key=attrgetter("error"))
    return best


def _line(decay: float, at: Sequence[float], ys: Sequence[float]) -> _Line:
    """c and A of the least absolute deviations for this θ."""
    us = [math.exp(-decay * x) for x in at]
    weights = [1.0] * len(ys)
    for _ in range(PASSES):
        floor, scale = _weighted(us, ys, weights)
        off = [abs(y - floor - scale * u) for u, y in zip(us, ys, strict=True)]
        # what is nearly on the line must not outweigh all else
        least = sum(off) / len(off) * 1e-3
        if least == 0:
            break
        weights = [1 / (each if each > least else least) for each in off]
    return _Line(decay, floor, scale, sum(off))


def _weighted(us: Sequence[float], ys: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """c and A of the least weighted squares."""
    total = sum(weights)
    mean_u = sum(map(mul, weights, us)) / total
    mean_y = sum(map(mul, weights, ys)) / total
    pulls = [w * (u - mean_u) for w, u in zip(weights, us, strict=True)]
    scale = sum(map(mul, pulls, ys)) / sum(map(mul, pulls, us))
    return mean_y - scale * mean_u, scale


def _medians(values: Sequence[float]) -> list[float]:
    edges = [len(values) * n // GROUPS for n in range(GROUPS + 1)]
    return [median(values[a:b]) for a, b in pairwise(edges)]
