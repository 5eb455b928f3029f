"""A plot of ETTR over the interval in characters, for a terminal of at least 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from holdfast.commands.console import percent
from holdfast.pacing.policy import duration
from holdfast.pacing.what_if import IntervalComparison, PlotGeometry

WIDTH, HEIGHT = 80, 13
LABEL = 7
"""Columns of the vertical axis."""
CURVE, LIMIT, REQUESTED, CURRENT, BEST = "*", ":", "+", "X", "O"
STYLES = {CURVE: "green", LIMIT: "magenta", REQUESTED: "cyan", CURRENT: "bold yellow", BEST: "bold green"}
"""Each mark has its own letter, so that the plot works without color."""


def print_plot(comparison: IntervalComparison) -> None:
    console = Console(width=WIDTH, highlight=False)
    for line in plot(comparison):
        console.print(line, no_wrap=True)


def plot(comparison: IntervalComparison) -> Iterator[Text]:
    """Yield the lines of the plot and its legend."""
    geometry = PlotGeometry(comparison)
    columns = WIDTH - LABEL - 1
    cells = _cells(comparison, geometry, columns)
    labels = {_row(geometry.y(share)): ettr(share) for share in geometry.shares(5)}
    for row in range(HEIGHT):
        yield _line(f"{labels.get(row, ''):>{LABEL}}", "|", cells[row])
    yield Text(" " * LABEL + "+" + "-" * columns)
    yield Text(" " * (LABEL + 1) + _times(geometry, columns))
    yield Text.assemble("  ", *_legend(comparison))


def ettr(share: float) -> str:
    """Format an ETTR with more digits above 99 %, where most intervals are."""
    if 0.99995 <= share < 1:
        return ">99.99%"
    return f"{share * 100:.2f}%" if 0.99 <= share < 1 else f"{share * 100:.1f}%"


def _cells(comparison: IntervalComparison, geometry: PlotGeometry, columns: int) -> list[list[str]]:
    cells = [[" "] * columns for _ in range(HEIGHT)]

    def put(mark: str, seconds: float | None, ettr: float | None) -> None:
        if seconds is not None and ettr is not None and geometry.y(ettr) >= 0:
            cells[_row(geometry.y(ettr))][_column(geometry.x(seconds), columns)] = mark

    if geometry.low < comparison.budget_seconds < geometry.high:
        for row in cells:
            row[_column(geometry.x(comparison.budget_seconds), columns)] = LIMIT
    for one, other in zip(comparison.curve, comparison.curve[1:], strict=False):
        first, last = (_column(geometry.x(point.interval_seconds), columns) for point in (one, other))
        for column in range(first, last + 1):
            part = (column - first) / (last - first) if last > first else 0.0
            at = (column + 0.5) / columns
            put(
                CURVE,
                geometry.low * (geometry.high / geometry.low) ** at,
                one.ettr + part * (other.ettr - one.ettr),
            )
    for each in comparison.requested:
        put(REQUESTED, each.achieved_seconds, each.ettr)
    if comparison.current is not None:
        put(CURRENT, comparison.current.achieved_seconds, comparison.current.ettr)
    put(BEST, comparison.best.achieved_seconds, comparison.best.ettr)
    return cells


def _line(label: str, edge: str, cells: list[str]) -> Text:
    line = Text(label + edge)
    for cell in "".join(cells).rstrip():
        line.append(cell, STYLES.get(cell, ""))
    return line


def _times(geometry: PlotGeometry, columns: int) -> str:
    line = [" "] * columns
    free = 0
    for time in geometry.times(6):
        label = duration(time)
        start = min(max(_column(geometry.x(time), columns) - len(label) // 2, 0), columns - len(label))
        if start >= free:
            line[start : start + len(label)] = label
            free = start + len(label) + 2
    return "".join(line).rstrip()


def _legend(comparison: IntervalComparison) -> Iterator[tuple[str, str] | str]:
    shown = [(BEST, "optimum")]
    if comparison.current is not None:
        same = comparison.current.interval == comparison.best.interval
        shown.append((BEST if same else CURRENT, "also in force" if same else "in force"))
    if comparison.requested:
        shown.append((REQUESTED, "requested"))
    shown.append((LIMIT, f"{percent(comparison.budget)} budget, exceeded to the left"))
    for index, (mark, meaning) in enumerate(shown):
        yield "   " if index else ""
        yield mark, STYLES[mark]
        yield f" {meaning}"


def _row(y: float) -> int:
    return HEIGHT - 1 - min(HEIGHT - 1, max(0, round(y * (HEIGHT - 1))))


def _column(x: float, columns: int) -> int:
    return min(columns - 1, max(0, int(x * columns)))
