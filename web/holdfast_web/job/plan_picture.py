"""The plan's curve for an SVG that the template draws; places are percentages, so that it fits any width."""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.pacing.outlook import Choice, Frame, Outlook

CURVE_WIDTH, CURVE_HEIGHT = 1000, 100
"""The box of the curve's own coordinates."""
ABOVE, BELOW = 16.0, 14.0
"""Percent of the height that labels have over and under the curve."""
TIMES, SHARES = 5, 4
OVER, UNDER, FURTHER_UNDER = -11, 22, 38
NEAR = 16.0
"""Percent of the width within which the labels of two marks would run into each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A choice on the curve."""

    kind: str
    """`best`, `present` or `asked`: each has a shape of its own."""
    choice: Choice
    x: float
    y: float
    side: str
    """Where its label begins: `start`, `middle` or `end`."""
    label: int
    """Its line, in pixels under the mark; above it where less than 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    at: float
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    points: str
    """Of the curve, in its own box."""
    top: float
    height: float
    """Of that box, in percent."""
    times: list[Tick]
    shares: list[Tick]
    marks: list[Mark]
    """The optimum last, on top of the others."""
    budget: float | None
    """Left of here the budget is not kept; None where that is outside the picture."""


def draw(outlook: Outlook) -> Picture:
    frame = Frame(outlook)
    points = " ".join(
        f"{frame.x(point.interval_seconds) * CURVE_WIDTH:.1f},{(1 - frame.y(point.effective)) * CURVE_HEIGHT:.1f}"
        for point in outlook.curve
    )
    inside = frame.low < outlook.budget_seconds < frame.high
    held = [("asked", each) for each in outlook.asked]
    if outlook.present is not None and outlook.present.interval is not None:
        held.append(("present", outlook.present))
    marks = _marks(frame, [*held, ("best", outlook.best)])
    return Picture(
        points=points,
        top=ABOVE,
        height=100 - ABOVE - BELOW,
        times=[Tick(at=_x(frame, time), value=time) for time in frame.times(TIMES)],
        shares=[Tick(at=_y(frame, share), value=share) for share in frame.shares(SHARES)],
        marks=marks,
        budget=_x(frame, outlook.budget_seconds) if inside else None,
    )


def _marks(frame: Frame, choices: list[tuple[str, Choice]]) -> list[Mark]:
    places = {kind: _x(frame, each.kept_seconds or 0.0) for kind, each in choices}
    lines = {"best": OVER, "present": UNDER, "asked": UNDER}
    if abs(places.get("asked", math.inf) - places.get("present", -math.inf)) < NEAR:
        lines["asked"] = FURTHER_UNDER if abs(places["asked"] - places["best"]) < NEAR else OVER
    return [_mark(frame, kind, each, lines[kind]) for kind, each in choices]


def _mark(frame: Frame, kind: str, choice: Choice, label: int) -> Mark:
    x = _x(frame, choice.kept_seconds or 0.0)
    return Mark(
        kind=kind,
        choice=choice,
        x=x,
        y=_y(frame, choice.effective or 0.0),
        side="start" if x < 18 else "end" if x > 82 else "middle",
        label=label,
    )


def _x(frame: Frame, seconds: float) -> float:
    return round(100 * frame.x(seconds), 2)


def _y(frame: Frame, effective: float) -> float:
    return round(ABOVE + (100 - ABOVE - BELOW) * (1 - max(0.0, frame.y(effective))), 2)
