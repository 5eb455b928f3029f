"""The table of `holdfast doctor`: one row for each check, and what to change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.commands.console import print_table, say
from holdfast.commands.doctor.findings import STATES, Finding, FindingState
from holdfast.units import format_bytes


def worst(findings: Sequence[Finding]) -> FindingState:
    return max((each.state for each in findings), key=STATES.index, default="ok")


def print_report(findings: Sequence[Finding], world_size: int) -> None:
    by_check = [
        [each for each in findings if each.check == check] for check in dict.fromkeys(f.check for f in findings)
    ]
    print_table(
        ("CHECK", "STATE", "MEASURED"), [(each[0].check, worst(each), _measured(each)) for each in by_check]
    )
    for each in by_check:
        for line in _changes(each, world_size):
            say("", *line)


def _measured(findings: Sequence[Finding]) -> str:
    """Summarize what the ranks measured: the range and the sum of speeds, else what the worst state says."""
    speeds = [each.bytes_per_second for each in findings if each.bytes_per_second is not None]
    if len(speeds) == len(findings) > 1:
        low, high, total = (f"{format_bytes(round(speed))}/s" for speed in (min(speeds), max(speeds), sum(speeds)))
        return f"{low} to {high} each, {total} together"
    state = worst(findings)
    said = list(dict.fromkeys(each.measured for each in findings if each.state == state))
    return said[0] if len(said) == 1 else f"{said[0]}, and {len(said) - 1} other"


def _changes(findings: Sequence[Finding], world_size: int) -> Iterator[tuple[str, ...]]:
    """Yield the lines about each different problem, with the ranks that have it."""
    texts = dict.fromkeys((f.state, f.measured, f.remedy) for f in findings if f.state in ("warning", "problem"))
    for state, measured, remedy in texts:
        same = [each for each in findings if (each.state, each.measured, each.remedy) == (state, measured, remedy)]
        hosts = ", ".join(dict.fromkeys(each.host for each in same))
        ranks = ", ".join(str(each.rank) for each in same[:8]) + (", …" if len(same) > 8 else "")
        where = "" if world_size == 1 else f" on {hosts} (rank {ranks})"
        yield f"{same[0].check}: {state}{where}: {measured}", *([f"  change: {remedy}"] if remedy else [])
