"""The geometry of the charts of a comparison. Positions are percentages, so that the SVG fits any width."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 1000, 1000
"""The viewBox of the curves."""
X_TICKS, Y_TICKS = 6, 5
MARGIN = 0.04
"""Share of the range above and below the curves."""
LARGEST, SMALLEST = 1e300, 1e-300
"""Largest value and smallest range that are drawn: sums and differences of them stay finite and positive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlottedCurve:
    """One curve; `color` is the index of its color."""

    name: str
    color: int
    points: list[str]
    """SVG points of its unbroken parts."""
    raw: list[str]
    """The same before smoothing; empty without smoothing."""


@dataclass(frozen=True, slots=True)
class AxisTick:
    at: float
    """Position in percent, from the left or from the top."""
    value: float


@dataclass(frozen=True, slots=True)
class AxisRange:
    """A range of an axis; a logarithmic one is positive."""

    low: float
    high: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Return the position of a value, from 0 to 1."""
        return (self._scaled(value) - self._scaled(self.low)) / (self._scaled(self.high) - self._scaled(self.low))

    def ticks(self, most: int) -> list[float]:
        """Return round values in the range."""
        if self.logarithmic and self.high / self.low >= 10:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            return [10.0**exponent for exponent in range(first, last + 1, 1 + (last - first) // most)]
        rough = (self.high - self.low) / most
        size = 10 ** math.floor(math.log10(rough))
        step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
        return [index * step for index in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value


def x_range(places: Iterable[float], start: float | None, end: float | None) -> AxisRange:
    """Return the range of all places, cut to a window."""
    known = list(places)
    low = min(known, default=0.0) if start is None else start
    high = max(known, default=1.0) if end is None else end
    return AxisRange(low, high if high > low else low + 1)


def y_range(values: Iterable[float], *, logarithmic: bool) -> AxisRange | None:
    """Return the range of the finite values, of the positive ones for a logarithmic axis; None without any."""
    known = [value for value in values if abs(value) <= LARGEST and (value > 0 or not logarithmic)]
    if not known:
        return None
    low, high = min(known), max(known)
    if logarithmic:
        return AxisRange(low / 1.1, high * 1.1, logarithmic=True)
    room = max(high - low or abs(high) or 1.0, SMALLEST) * MARGIN
    return AxisRange(low - room, high + room)


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Return the exponential moving average, corrected for its start; non-finite values are left out of it."""
    average = total = 0.0
    found = []
    for value in values:
        if math.isfinite(value):
            average = weight * average + (1 - weight) * value
            total = weight * total + (1 - weight)
            found.append(average / total)
        else:
            found.append(value)
    return found


def parts(x: Sequence[float], y: Sequence[float], across: AxisRange, up: AxisRange) -> list[str]:
    """Return the SVG points of the parts of a curve between values that cannot be drawn."""
    found: list[list[str]] = [[]]
    for place, value in zip(x, y, strict=True):
        if not math.isfinite(value) or (up.logarithmic and value <= 0):
            found.append([])
        elif across.low <= place <= across.high:
            found[-1].append(f"{WIDTH * across.place(place):.0f},{HEIGHT * (1 - up.place(value)):.0f}")
    # a single point is a dot: a line to itself with round ends
    return [" ".join(part * 2 if len(part) == 1 else part) for part in found if part]


def ticks(axis: AxisRange, most: int, position: Callable[[float], float]) -> list[AxisTick]:
    return [AxisTick(round(100 * position(axis.place(value)), 2), value) for value in axis.ticks(most)]
