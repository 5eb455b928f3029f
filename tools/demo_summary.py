"""The figures of a demo run, from the server's records."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from holdfast.client import CheckpointInfo, Client, Order

Losses = dict[tuple[int, int], float]
"""Values by (lineage, iteration)."""
POINTS = 2000
"""Maximum number of single iterations in an answer of the server."""
ENOUGH_ITERATIONS, ENOUGH_CHECKPOINTS = 1000, 20
"""Least number of measurements for an excess overhead not to be due to a short run."""
MOST_INTERVALS = 6
"""Listed one by one."""


@dataclass
class DemoEvents:
    """Events of the run that the demo itself caused."""

    killed_at: int | None = None
    killed_attempt: int = 1
    killed_at_time: float = 0.0
    losses_before_kill: Losses = field(default_factory=dict)
    order: Order | None = None


def read_losses(client: Client, job: str) -> Losses:
    return _losses(_timeline(client, job))


def summary(client: Client, job: str, story: DemoEvents) -> str:
    """Format the figures in two columns."""
    timeline = _timeline(client, job)
    kept = client.restorable(job)
    stalls = [value for series in timeline["series"] for value in series["stall_seconds"] if value is not None]
    rows = [
        (
            "iterations",
            f"{sum(len(series['iteration']) for series in timeline['series'])} on {_lineages(timeline)}",
        ),
        ("checkpoints", f"{timeline['checkpoints_total']} taken, {len(kept)} kept, {_size(kept)} each"),
        ("interval", _intervals(timeline)),
        *_overheads(timeline),
        ("longest stall", f"{max(stalls, default=0.0) * 1000:.0f} ms" if stalls else "none"),
        *_after_kill(timeline, story),
        *_after_restore(timeline, story),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(["What was measured:", *(f"  {name:<{width}}  {value}" for name, value in rows)])


def _intervals(timeline: dict[str, Any]) -> str:
    """Return the intervals in force in order; none before the first decision."""
    decided = [row["interval"] for row in timeline["paced"] if row["interval"] is not None]
    changes = [interval for interval, _ in itertools.groupby(decided)]
    if not changes:
        return "never decided"
    if len(changes) <= MOST_INTERVALS:
        return f"every {', then '.join(map(str, changes))} {'iteration' if changes == [1] else 'iterations'}"
    between = f"between {min(changes)} and {max(changes)} on the way"
    return f"every {_counted(changes[0], 'iteration')} at first, every {changes[-1]} at the end, {between}"


def _overheads(timeline: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Return the last measured overhead for each budget, and what it rests on where it is above."""
    measured: dict[float, float | None] = {}
    measured_until: dict[float, float] = {}
    for row in timeline["paced"]:
        if row["measured_overhead"] or row["budget"] not in measured:
            measured[row["budget"]] = row["measured_overhead"]
            measured_until[row["budget"]] = row["at"]
    since = 0.0
    for budget, overhead in measured.items():
        yield "overhead", f"{_percent(overhead)} under a budget of {_percent(budget)}"
        if overhead is not None and overhead > budget:
            yield "  above because", _basis(timeline, since, measured_until[budget])
        since = measured_until[budget]


def _basis(timeline: dict[str, Any], since: float, until: float) -> str:
    """Return what an overhead was measured over, and how much the iterations of this machine vary."""
    seconds = sorted(
        spent
        for series in timeline["series"]
        for at, spent in zip(series["at"], series["seconds"]["mean"], strict=True)
        if since < at <= until and spent is not None
    )
    checkpoints = sum(since < row["at"] <= until for row in timeline["checkpoints"])
    basis = f"{_counted(len(seconds), 'iteration')}, {_counted(checkpoints, 'checkpoint')}"
    if len(seconds) >= 10:
        low, middle, high = (seconds[len(seconds) * part // 10] for part in (1, 5, 9))
        basis += (
            f"; 8 of 10 iterations take {low / middle * 100:.0f} to {high / middle * 100:.0f} % of the usual time"
        )
    short = len(seconds) < ENOUGH_ITERATIONS or checkpoints < ENOUGH_CHECKPOINTS
    return f"{'too short to judge' if short else 'other load on this machine'} ({basis})"


def _after_kill(timeline: dict[str, Any], story: DemoEvents) -> Iterator[tuple[str, str]]:
    second = next(row for row in timeline["attempts"] if row["attempt"] == story.killed_attempt + 1)
    assert story.killed_at is not None
    lost = story.killed_at - second["iteration"]
    yield (
        "lost to the kill",
        f"{_counted(lost, 'iteration')}: killed after {story.killed_at}, resumed at {second['iteration']}",
    )
    yield "kill to new iteration", f"{_first_new_at(timeline, story) - story.killed_at_time:.1f} s"
    repeated = range(second["iteration"] + 1, story.killed_at + 1)
    before = {key: loss for key, loss in story.losses_before_kill.items() if key[1] in repeated}
    if before or not lost:
        yield "losses repeated", _compared(before, _losses(timeline), "the kill")
    else:
        yield "losses repeated", "not compared: the server had no report of them before the kill"


def _after_restore(timeline: dict[str, Any], story: DemoEvents) -> Iterator[tuple[str, str]]:
    order = story.order
    assert order is not None
    assert order.seconds is not None
    yield "restore", f"{order.seconds:.2f} s, from iteration {order.from_iteration} to {order.iteration}"
    losses = _losses(timeline)
    first = {
        (order.new_lineage or 0, iteration): loss
        for (lineage, iteration), loss in losses.items()
        if lineage == order.from_lineage and iteration > order.iteration
    }
    yield "losses replayed", _compared(first, losses, "the restore")


def _compared(before: Losses, after: Losses, event: str) -> str:
    both = before.keys() & after.keys()
    if not both:
        return f"none were repeated after {event}"
    different = sorted(key[1] for key in both if before[key] != after[key])
    if different:
        return f"{len(different)} of {len(both)} DIFFER after {event}, first at iteration {different[0]}"
    return f"all {len(both)} after {event} equal the first ones, bit for bit"


def _first_new_at(timeline: dict[str, Any], story: DemoEvents) -> float:
    """Return when the first new iteration after the kill ended."""
    return min(
        float(at)
        for series in timeline["series"]
        for iteration, at in zip(series["iteration"], series["at"], strict=True)
        if iteration == (story.killed_at or 0) + 1 and at > story.killed_at_time
    )


def _losses(timeline: dict[str, Any]) -> Losses:
    return {
        (series["lineage"], iteration): loss
        for series in timeline["series"]
        if "loss" in series["metrics"]
        for iteration, loss in zip(series["iteration"], series["metrics"]["loss"]["mean"], strict=True)
        if loss is not None
    }


def _timeline(client: Client, job: str) -> dict[str, Any]:
    """Return the whole timeline with single iterations, read in windows."""
    found: dict[str, Any] = client.get(f"/jobs/{job}/timeline", points=POINTS)
    if found["bucketed"]:
        first, last = found["extent"]
        found["series"] = []
        for start in range(first, last + 1, POINTS):
            window = {"from": start, "to": start + POINTS - 1, "points": POINTS}
            found["series"] += client.get(f"/jobs/{job}/timeline", **window)["series"]
    return found


def _lineages(timeline: dict[str, Any]) -> str:
    return _counted(len(timeline["lineages"]), "lineage")


def _size(kept: list[CheckpointInfo]) -> str:
    return f"{kept[0].payload_bytes / 1e6:.0f} MB" if kept else "-"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _percent(fraction: float | None) -> str:
    return "not measured" if fraction is None else f"{fraction * 100:.2f} %"
