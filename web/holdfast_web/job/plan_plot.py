"""The geometry of the plan's plot. Positions are percentages, so that the SVG fits any width."""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.pacing.what_if import IntervalComparison, IntervalForecast, PlotGeometry

CURVE_WIDTH, CURVE_HEIGHT = 1000, 100
"""The viewBox of the curve."""
ABOVE, BELOW = 16.0, 14.0
"""Percent of the height reserved for labels above and below the curve."""
TIMES, SHARES = 5, 4
OVER, UNDER, FURTHER_UNDER = -11, 22, 38
NEAR = 16.0
"""Percent of the width within which two labels would overlap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotMark:
    """A marked interval on the curve."""

    kind: str
    """`best`, `present` or `asked`; selects the shape."""
    choice: IntervalForecast
    x: float
    y: float
    side: str
    """The text anchor of the label: `start`, `middle` or `end`."""
    label: int
    """The vertical offset of the label in pixels; negative is above the mark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotTick:
    at: float
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPlot:
    points: str
    """SVG points of the curve in its viewBox."""
    top: float
    height: float
    """Top and height of the viewBox in percent."""
    times: list[PlotTick]
    shares: list[PlotTick]
    marks: list[PlotMark]
    """Marks in drawing order; the optimum is last, on top."""
    budget: float | None
    """Intervals left of this position exceed the budget; None if outside the plot."""


def draw(comparison: IntervalComparison) -> PlanPlot:
    frame = PlotGeometry(comparison)
    points = " ".join(
        f"{frame.x(point.interval_seconds) * CURVE_WIDTH:.1f},{(1 - frame.y(point.ettr)) * CURVE_HEIGHT:.1f}"
        for point in comparison.curve
    )
    inside = frame.low < comparison.budget_seconds < frame.high
    held = [("asked", each) for each in comparison.requested]
    if comparison.current is not None and comparison.current.interval is not None:
        held.append(("present", comparison.current))
    marks = _marks(frame, [*held, ("best", comparison.best)])
    return PlanPlot(
        points=points,
        top=ABOVE,
        height=100 - ABOVE - BELOW,
        times=[PlotTick(at=_x(frame, time), value=time) for time in frame.times(TIMES)],
        shares=[PlotTick(at=_y(frame, share), value=share) for share in frame.shares(SHARES)],
        marks=marks,
        budget=_x(frame, comparison.budget_seconds) if inside else None,
    )


def _marks(frame: PlotGeometry, choices: list[tuple[str, IntervalForecast]]) -> list[PlotMark]:
    places = {kind: _x(frame, each.achieved_seconds or 0.0) for kind, each in choices}
    lines = {"best": OVER, "present": UNDER, "asked": UNDER}
    if abs(places.get("asked", math.inf) - places.get("present", -math.inf)) < NEAR:
        lines["asked"] = FURTHER_UNDER if abs(places["asked"] - places["best"]) < NEAR else OVER
    return [_mark(frame, kind, each, lines[kind]) for kind, each in choices]


def _mark(frame: PlotGeometry, kind: str, choice: IntervalForecast, label: int) -> PlotMark:
    x = _x(frame, choice.achieved_seconds or 0.0)
    return PlotMark(
        kind=kind,
        choice=choice,
        x=x,
        y=_y(frame, choice.ettr or 0.0),
        side="start" if x < 18 else "end" if x > 82 else "middle",
        label=label,
    )


def _x(frame: PlotGeometry, seconds: float) -> float:
    return round(100 * frame.x(seconds), 2)


def _y(frame: PlotGeometry, ettr: float) -> float:
    return round(ABOVE + (100 - ABOVE - BELOW) * (1 - max(0.0, frame.y(ettr))), 2)
