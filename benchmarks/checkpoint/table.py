"""Medians, ratios, and the table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.harness import aligned

Samples = Mapping[str, Sequence[float]]
Medians = dict[str, float]

LEAST_SECONDS = 0.001
"""Smaller times count as this: ratios of smaller ones are noise."""

COLUMNS = (
    ("blocked", "blocked s", "{:.4f}"),
    ("slowdown", "slow-down s", "{:+.3f}"),
    ("slowdown_share", "of an iter.", "{:+.0%}"),
    ("background_cpu", "backgr. CPU s", "{:.2f}"),
    ("durable", "durable s", "{:.2f}"),
    ("durable_idle", "idle s", "{:.2f}"),
    ("persist_idle", "persist s", "{:.3f}"),
    ("memory_mb", "memory MB", "{:,.0f}"),
    ("restore_cold", "restore cold", "{:.2f}"),
    ("restore_warm", "warm s", "{:.2f}"),
    ("every_iteration", "each iter.", "{:.2f}×"),
)


def medians(samples: Samples) -> Medians:
    return {measure: statistics.median(values) for measure, values in samples.items() if values}


def best_ways(found: Medians) -> Medians:
    """Return the fastest median of several ways to do the same, named `what way`."""
    ways: Medians = {}
    for name, seconds in found.items():
        what = name.partition(" ")[0]
        ways[what] = min(seconds, ways.get(what, math.inf))
    return ways


def best(contenders: Mapping[str, Medians], measure: str) -> tuple[str, float] | None:
    """Return the contender with the lowest figure, and the figure."""
    known = {name: figures[measure] for name, figures in contenders.items() if measure in figures}
    return min(known.items(), key=lambda item: item[1], default=None)


def ratio(ours: float | None, other: float | None, *, least: float = 0.0) -> float | None:
    """Return ours ÷ other, both at least `least`; `None` if one is missing."""
    if ours is None or other is None:
        return None
    ours, other = max(ours, least), max(other, least)
    return round(ours / other, 4) if other and math.isfinite(other) else None


def render(contenders: Mapping[str, Medians]) -> list[str]:
    """Return the lines of the table."""
    rows = [["", *(title for _, title, _ in COLUMNS)]]
    for name, figures in contenders.items():
        rows.append([name, *(_cell(figures.get(key), form) for key, _, form in COLUMNS)])
    return aligned(rows)


def _cell(value: float | None, form: str) -> str:
    return "–" if value is None or not math.isfinite(value) else form.format(value)
