"""The curve of ETTR against the interval in plain characters, for a terminal of 80 columns or more."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from holdfast.commands.console import percent
from holdfast.pacing.policy import duration
from holdfast.pacing.what_if import Frame, Outlook

WIDTH, HEIGHT = 80, 13
LABEL = 7
"""Columns for the scale on the left."""
CURVE, LIMIT, ASKED, PRESENT, BEST = "*", ":", "+", "X", "O"
STYLES = {CURVE: "green", LIMIT: "magenta", ASKED: "cyan", PRESENT: "bold yellow", BEST: "bold green"}
"""Every mark is told by its letter: colour only helps."""


def print_plot(outlook: Outlook) -> None:
    """In colour where a person looks at it."""
    console = Console(width=WIDTH, highlight=False)
    for line in plot(outlook):
        console.print(line, no_wrap=True)


def plot(outlook: Outlook) -> Iterator[Text]:
    """Line by line, with the legend."""
    frame = Frame(outlook)
    columns = WIDTH - LABEL - 1
    cells = _cells(outlook, frame, columns)
    labels = {_row(frame.y(share)): ettr(share) for share in frame.shares(5)}
    for row in range(HEIGHT):
        yield _line(f"{labels.get(row, ''):>{LABEL}}", "|", cells[row])
    yield Text(" " * LABEL + "+" + "-" * columns)
    yield Text(" " * (LABEL + 1) + _times(frame, columns))
    yield Text.assemble("  ", *_legend(outlook))


def ettr(share: float) -> str:
    """With the digits that tell two intervals apart: the last hundredth is where most are."""
    if 0.99995 <= share < 1:
        return ">99.99%"
    return f"{share * 100:.2f}%" if 0.99 <= share < 1 else f"{share * 100:.1f}%"


def _cells(outlook: Outlook, frame: Frame, columns: int) -> list[list[str]]:
    cells = [[" "] * columns for _ in range(HEIGHT)]

    def put(mark: str, seconds: float | None, effective: float | None) -> None:
        if seconds is not None and effective is not None and frame.y(effective) >= 0:
            cells[_row(frame.y(effective))][_column(frame.x(seconds), columns)] = mark

    if frame.low < outlook.budget_seconds < frame.high:
        for row in cells:
            row[_column(frame.x(outlook.budget_seconds), columns)] = LIMIT
    for one, other in zip(outlook.curve, outlook.curve[1:], strict=False):
        first, last = (_column(frame.x(point.interval_seconds), columns) for point in (one, other))
        for column in range(first, last + 1):
            part = (column - first) / (last - first) if last > first else 0.0
            at = (column + 0.5) / columns
            put(
                CURVE,
                frame.low * (frame.high / frame.low) ** at,
                one.effective + part * (other.effective - one.effective),
            )
    for each in outlook.asked:
        put(ASKED, each.kept_seconds, each.effective)
    if outlook.present is not None:
        put(PRESENT, outlook.present.kept_seconds, outlook.present.effective)
    put(BEST, outlook.best.kept_seconds, outlook.best.effective)
    return cells


def _line(label: str, edge: str, cells: list[str]) -> Text:
    line = Text(label + edge)
    for cell in "".join(cells).rstrip():
        line.append(cell, STYLES.get(cell, ""))
    return line


def _times(frame: Frame, columns: int) -> str:
    line = [" "] * columns
    free = 0
    for time in frame.times(6):
        label = duration(time)
        start = min(max(_column(frame.x(time), columns) - len(label) // 2, 0), columns - len(label))
        if start >= free:
            line[start : start + len(label)] = label
            free = start + len(label) + 2
    return "".join(line).rstrip()


def _legend(outlook: Outlook) -> Iterator[tuple[str, str] | str]:
    shown = [(BEST, "optimum")]
    if outlook.present is not None:
        same = outlook.present.interval == outlook.best.interval
        shown.append((BEST if same else PRESENT, "in force, too" if same else "in force"))
    if outlook.asked:
        shown.append((ASKED, "asked for"))
    shown.append((LIMIT, f"{percent(outlook.budget)} budget, over it to the left"))
    for index, (mark, meaning) in enumerate(shown):
        yield "   " if index else ""
        yield mark, STYLES[mark]
        yield f" {meaning}"


def _row(y: float) -> int:
    return HEIGHT - 1 - min(HEIGHT - 1, max(0, round(y * (HEIGHT - 1))))


def _column(x: float, columns: int) -> int:
    return min(columns - 1, max(0, int(x * columns)))
