"""The picture for the docs: what each policy costs by each measure. Plain SVG, readable on light and dark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from .coci import BASELINE
from .conditions import Compared

WIDTH, LEFT, RIGHT, ROW = 760, 190, 20, 30
LOW, HIGH = 0.02, 100.0
TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
PANELS = {"serial": "One worker", "parallel": "Data parallel, 4 workers, then 2, then 1"}
MARKS = {
    "published": "P_l as COCI published it",
    "true": "P_l with the missing Jacobian",
    "time": "time that was not useful, simulated",
}
STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #1f2933 }
.small { font-size: 11px; fill: #52606d }
.title { font-weight: 600 }
.grid { stroke: #d5dbe1 } .even { stroke: #52606d }
.published { fill: #b45309; stroke: #b45309 } .true { fill: #1d4ed8; stroke: #1d4ed8 }
.time { fill: #0f766e; stroke: #0f766e }
@media (prefers-color-scheme: dark) {
  text { fill: #e5e9ee } .small { fill: #a5b1bd } .grid { stroke: #3b4652 } .even { stroke: #a5b1bd }
  .published { fill: #fbbf24; stroke: #fbbf24 } .true { fill: #93b4ff; stroke: #93b4ff }
  .time { fill: #5eead4; stroke: #5eead4 }
}
"""


def picture(tables: Mapping[str, Sequence[Compared]]) -> str:
    """A panel for each condition, a line for each policy; the fixed interval is 1, less is to its left."""
    parts: list[str] = []
    top = 44
    for key, title in PANELS.items():
        rows = [row for row in tables[key] if row.name != BASELINE]
        parts += _panel(title, rows, top)
        top += 34 + ROW * len(rows) + 40
    height = top
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-labelledby="title"><title id="title">What checkpoints and failures cost under each policy, '
        f"as a multiple of what they cost at the best fixed interval</title><style>{STYLE}</style>"
    )
    return "\n".join([head, *_legend(), *parts, "</svg>"]) + "\n"


def _legend() -> list[str]:
    parts, x = [], 12.0
    for name, words in MARKS.items():
        parts += [_mark(name, x, 18), _text(x + 12, 22, words)]
        x += 32 + 6.6 * len(words)
    return parts


def _panel(title: str, rows: Sequence[Compared], top: float) -> list[str]:
    begin, end = top + 26, top + 26 + ROW * len(rows)
    parts = [_text(12, top + 14, title, "title")]
    for tick in TICKS:
        kind = "even" if tick == 1 else "grid"
        parts.append(f'<line class="{kind}" x1="{_x(tick):.1f}" x2="{_x(tick):.1f}" y1="{begin}" y2="{end}"/>')
        parts.append(_text(_x(tick), end + 15, f"{tick:g}", "small", "middle"))
    parts.append(
        _text(_x(math.sqrt(LOW * HIGH)), end + 30, "times the cost at the fixed interval", "small", "middle")
    )
    for place, row in enumerate(rows):
        y = begin + ROW * (place + 0.5)
        parts.append(_text(LEFT - 12, y + 4, row.name, anchor="end"))
        for offset, name in ((-6, "published"), (0, "true")):
            spread = getattr(row, name)
            parts.append(
                f'<line class="{name}" x1="{_x(spread.low):.1f}" x2="{_x(spread.high):.1f}" '
                f'y1="{y + offset}" y2="{y + offset}"/>'
            )
            parts.append(_mark(name, _x(spread.median), y + offset))
        parts.append(_mark("time", _x(row.time), y + 6))
    return parts


def _x(ratio: float) -> float:
    share = math.log(min(max(ratio, LOW), HIGH) / LOW) / math.log(HIGH / LOW)
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _mark(name: str, x: float, y: float) -> str:
    """Of different shapes, so that colours are not needed to tell them apart."""
    if name == "published":
        return f'<circle class="{name}" cx="{x:.1f}" cy="{y}" r="4"/>'
    if name == "true":
        return f'<rect class="{name}" x="{x - 4:.1f}" y="{y - 4}" width="8" height="8"/>'
    return f'<path class="{name}" d="M{x - 5:.1f} {y + 4} l5 -8 l5 8 z"/>'


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
