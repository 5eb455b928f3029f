"""The output of `holdfast plan` in a terminal: sentences, a table of intervals, the curve, the inputs."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from holdfast.commands.console import percent, print_table, say
from holdfast.commands.plan_inputs import PlanInput
from holdfast.pacing.what_if import HOURS_A_DAY, IntervalComparison, IntervalForecast, PlotGeometry, advise
from holdfast.simulation import PlacementComparison, SimulatedPolicy
from holdfast.units import duration, format_iterations, share

MIN_USEFUL_ETTR = 0.01
"""ETTR below which no interval is worth a recommendation."""
NEGLIGIBLE = 1e-4
"""Difference in ETTR that is not worth acting on."""
WIDTH, HEIGHT = 80, 13
LABEL = 7
"""Columns of the vertical axis."""
CURVE, LIMIT, REQUESTED, CURRENT, BEST = "*", ":", "+", "X", "O"
STYLES = {CURVE: "green", LIMIT: "magenta", REQUESTED: "cyan", CURRENT: "bold yellow", BEST: "bold green"}
"""Each mark has its own letter, so that the plot works without color."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The result of `holdfast plan`; with --json it is printed as it is."""

    comparison: IntervalComparison
    current: str
    """The beginning of the sentence about the interval in force."""
    inputs: list[PlanInput]
    simulated: list[SimulatedPolicy] | None = None
    """With --simulate or --trace."""
    placement: PlacementComparison | None = None
    """With --policy coci and its options."""
    simulated_jobs: str = ""
    """What was simulated, in words."""


def print_report(report: PlanReport) -> None:
    comparison = report.comparison
    for sentence in _sentences(report):
        say(*_wrapped(sentence))
    say()
    header = ("", "EVERY", "TIME", "OVERHEAD", "ETTR", "UNSAVED", "GPU-H A DAY")
    print_table(header, [_row(each) for each in _rows(comparison)])
    for each in comparison.policies:
        if each.interval is None:
            say(f"{each.name}: {each.reason}")
        elif each.decided_by:
            say(f"{each.name}: replaced by {each.decided_by}")
    say()
    print_plot(comparison)
    say()
    if report.simulated is not None:
        say(*_wrapped(report.simulated_jobs))
        say()
        columns = ("", "ETTR", "QUARTILES", "CHECKPOINTS", "STALL", "LOST WORK", "RESTART", "WAITING")
        print_table(columns, [_simulated_row(each) for each in report.simulated])
        say()
    if report.placement is not None:
        for sentence in _placement_sentences(report.placement):
            say(*_wrapped(sentence))
        say()
    width = max(len(line.value) for line in report.inputs)
    for line in report.inputs:
        say(f"{line.name:<14}{line.value:<{width}}  {line.origin}")


def _placement_sentences(found: PlacementComparison) -> Iterator[str]:
    yield f"coci: {found.reason}."
    ends = ", ".join(f"{ratio:.2f} at {percent(end)}" for end, ratio in found.ended_early.items())
    yield (
        f"That is {len(found.iterations):,} checkpoints in total, against {found.even_checkpoints:,} with even "
        f"spacing. Relative to even spacing, a failure loses {found.lost_progress:.2f} times the progress; a job "
        f"that ends permanently before its last iteration loses {ends} times the progress; a job that finishes "
        f"repeats {found.repeated_iterations:.2f} times as many iterations per failure."
    )


def _wrapped(sentence: str) -> list[str]:
    """Wrap to the width of the plot, with no number separated from its unit."""
    bound = re.sub(r"(\d) (?=(?:\w?s|min|h)\b)", "\\1\N{NO-BREAK SPACE}", sentence)
    lines = textwrap.wrap(bound, WIDTH, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _rows(comparison: IntervalComparison) -> Iterator[IntervalForecast]:
    yield comparison.best
    yield from comparison.neighbors
    yield from (each for each in comparison.policies if each.interval is not None and not each.decided_by)
    yield from comparison.requested
    if comparison.current is not None:
        yield comparison.current


def _row(each: IntervalForecast) -> tuple[str, ...]:
    return (
        each.name,
        f"{each.interval:,}",
        duration(each.interval_seconds or 0.0),
        percent(each.overhead) + ("" if each.within_budget else " !"),
        share(each.ettr or 0.0),
        duration(each.unsaved_seconds or 0.0),
        _amount(each.wasted_gpu_hours_per_day or 0.0),
    )


def _sentences(report: PlanReport) -> Iterator[str]:
    comparison, best = report.comparison, report.comparison.best
    assert best.interval is not None
    if (best.ettr or 0.0) < MIN_USEFUL_ETTR:
        often = duration(comparison.mtbf_seconds)
        yield f"No interval helps: with a failure every {often}, failures undo nearly all progress."
        return
    every = f"{format_iterations(best.interval)} ({duration(best.achieved_seconds or 0.0)})"
    yield f"The best interval is {every}: {share(best.ettr or 0.0)} of the time moves training forward."
    if not best.within_budget:
        yield f"Its overhead of {percent(best.overhead)} is over the budget of {percent(comparison.budget)}."
    if comparison.current is not None:
        yield f"{report.current} {_compared(comparison, comparison.current)}"
    if (advice := advise(comparison)) is not None:
        budget = "" if advice.budget is None else f" with a budget of {percent(advice.budget)}"
        yield f"The policy {advice.policy}{budget} would gain {percent(advice.gain)} of the time."
    for each in comparison.requested:
        yield f"The requested interval is {_compared(comparison, each)}"
    held = comparison.current or best
    gpu_hours = held.mean_lost_gpu_hours or 0.0
    hours = f" ({_amount(gpu_hours)} GPU-hours)" if gpu_hours >= 0.01 else ""
    yield (
        f"A failure now loses {duration(held.mean_lost_seconds or 0.0)} of work on average{hours}, at most "
        f"{duration(held.unsaved_seconds or 0.0)}; the next checkpoint is durable before the next failure with a "
        f"probability of {share(held.survival_probability or 0.0)}."
    )


def _compared(comparison: IntervalComparison, held: IntervalForecast) -> str:
    """Describe an interval with its price: `143 (2.38 min): 92.5%, …`."""
    time = duration(held.interval_seconds or 0.0)
    if held.achieved_seconds != held.interval_seconds:
        time = f"{time}, actually {duration(held.achieved_seconds or 0.0)}, since writing takes longer"
    text = f"{held.interval:,} ({time}): {share(held.ettr or 0.0)}"
    price, idle = held.wasted_gpu_hours_per_day or 0.0, held.wasted_gpus or 0.0
    if price < NEGLIGIBLE * HOURS_A_DAY * comparison.world_size:
        return f"{text}, as good as the best."
    idle_gpus = f" as if {idle:,.0f} of {comparison.world_size:,} GPUs were idle," if idle >= 1 else ""
    return f"{text},{idle_gpus} {_amount(price)} GPU-hours a day behind the best."


def _amount(number: float) -> str:
    """Format a number with three digits."""
    if number == 0:
        return "-"
    if number < 0.01:
        return "<0.01"
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _simulated_row(each: SimulatedPolicy) -> tuple[str, ...]:
    return (
        each.policy,
        share(each.ettr),
        f"{share(each.ettr_low)} to {share(each.ettr_high)}",
        f"{each.checkpoints:,.0f}",
        *(percent(part) for part in (each.stall_share, each.lost_share, each.restart_share, each.waiting_share)),
    )


def print_plot(comparison: IntervalComparison) -> None:
    console = Console(width=WIDTH, highlight=False)
    for line in plot(comparison):
        console.print(line, no_wrap=True)


def plot(comparison: IntervalComparison) -> Iterator[Text]:
    """Yield the lines of the plot and its legend."""
    geometry = PlotGeometry(comparison)
    columns = WIDTH - LABEL - 1
    cells = _cells(comparison, geometry, columns)
    labels = {_line_number(geometry.y(each)): share(each) for each in geometry.shares(5)}
    for row in range(HEIGHT):
        yield _line(f"{labels.get(row, ''):>{LABEL}}", "|", cells[row])
    yield Text(" " * LABEL + "+" + "-" * columns)
    yield Text(" " * (LABEL + 1) + _times(geometry, columns))
    yield Text.assemble("  ", *_legend(comparison))


def _cells(comparison: IntervalComparison, geometry: PlotGeometry, columns: int) -> list[list[str]]:
    cells = [[" "] * columns for _ in range(HEIGHT)]

    def put(mark: str, seconds: float | None, ettr: float | None) -> None:
        if seconds is not None and ettr is not None and geometry.y(ettr) >= 0:
            cells[_line_number(geometry.y(ettr))][_column(geometry.x(seconds), columns)] = mark

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


def _line_number(y: float) -> int:
    return HEIGHT - 1 - min(HEIGHT - 1, max(0, round(y * (HEIGHT - 1))))


def _column(x: float, columns: int) -> int:
    return min(columns - 1, max(0, int(x * columns)))
