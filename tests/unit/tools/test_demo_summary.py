"""The summary of the demo states what the timeline holds, also when that is bad news."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

from demo_summary import DemoEvents, _overheads, read_losses, summary

from holdfast.client import CheckpointInfo, Order

MEASURED = [(0.035, 0.021), (0.02, None), (0.02, 0.05), (0.02, None)]
"""Budgets, and the overheads under them."""


class SummaryClient:
    """Answers like a client whose job was killed after iteration 5, and restored from 7 to 4."""

    def __init__(self) -> None:
        self.again = [0.5, 0.4, 0.3]
        self.intervals: list[int | None] = [None, 10, 4, 6]
        self.most_points = 2000

    def restorable(self, job: str) -> list[CheckpointInfo]:
        return [
            CheckpointInfo(
                id="000000000004-1",
                at=103.0,
                iteration=4,
                lineage=1,
                kind="scheduled",
                state="durable",
                payload_bytes=109_000_000,
            )
        ]

    def get(self, path: str, *, points: int, **window: int) -> dict[str, Any]:
        first = [1.0, 0.9, 0.8, 0.7, 0.5, 0.4, 0.3]
        lines = [series(1, 1, first), series(2, 5, self.again)]
        wanted = range(window.get("from", 1), window.get("to", 7) + 1)
        bucketed = len(wanted) > min(points, self.most_points)
        return {
            "bucketed": bucketed,
            "extent": [1, 7],
            "series": [] if bucketed else [within(line, wanted) for line in lines],
            "lineages": [{}, {}],
            "checkpoints_total": 2,
            "checkpoints": [{"at": 103.0}, {"at": 106.0}],
            "attempts": [{"attempt": 1, "iteration": 0}, {"attempt": 2, "iteration": 4}],
            "paced": [
                {"budget": budget, "measured_overhead": overhead, "interval": interval, "at": 103.5 + place}
                for place, (interval, (budget, overhead)) in enumerate(
                    itertools.zip_longest(self.intervals, MEASURED, fillvalue=MEASURED[-1])
                )
            ],
        }


def series(lineage: int, start: int, losses: list[float]) -> dict[str, Any]:
    iterations = list(range(start, start + len(losses)))
    return {
        "lineage": lineage,
        "iteration": iterations,
        "at": [100.0 + iteration for iteration in iterations],
        "seconds": {"mean": [0.1] * len(losses)},
        "stall_seconds": [0.0, 0.025] + [0.0] * (len(losses) - 2),
        "metrics": {"loss": {"mean": losses}},
    }


def within(line: dict[str, Any], wanted: range) -> dict[str, Any]:
    """The columns of a series at the wanted iterations."""

    def cut(column: list[Any]) -> list[Any]:
        return [value for at, value in zip(line["iteration"], column, strict=True) if at in wanted]

    columns = {name: cut(line[name]) for name in ("iteration", "at", "stall_seconds")}
    return {
        **columns,
        "lineage": line["lineage"],
        "seconds": {"mean": cut(line["seconds"]["mean"])},
        "metrics": {"loss": {"mean": cut(line["metrics"]["loss"]["mean"])}},
    }


@pytest.fixture
def server() -> SummaryClient:
    return SummaryClient()


@pytest.fixture
def events(server: SummaryClient) -> DemoEvents:
    order = Order(
        id="o",
        job="j",
        checkpoint="000000000004-1",
        iteration=4,
        state="restored",
        created_at=104.0,
        who="",
        fence=1,
        from_iteration=7,
        from_lineage=1,
        new_lineage=2,
        seconds=0.25,
    )
    before_restore = {key: loss for key, loss in read_losses(server, "j").items() if key[0] == 1}  # type: ignore[arg-type]
    return DemoEvents(
        killed_at=5,
        killed_at_time=103.0,
        losses_before_kill=before_restore,
        order=order,
    )


def rows(server: SummaryClient, events: DemoEvents) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in summary(server, "j", events).splitlines()[1:]:  # type: ignore[arg-type]
        name, _, value = line.strip().partition("  ")
        found.setdefault(name, []).append(value.strip())
    return found


def test_each_figure_comes_from_the_timeline(server: SummaryClient, events: DemoEvents) -> None:
    assert rows(server, events) == {
        "iterations": ["10 on 2 lineages"],
        "checkpoints": ["2 taken, 1 kept, 109 MB each"],
        "interval": ["every 10, then 4, then 6 iterations"],
        "overhead": ["2.10 % under a budget of 3.50 %", "5.00 % under a budget of 2.00 %"],
        "above because": ["too short to judge (3 iterations, 0 checkpoints)"],
        "longest stall": ["25 ms"],
        "lost to the kill": ["1 iteration: killed after 5, resumed at 4"],
        "kill to new iteration": ["3.0 s"],
        "losses repeated": ["all 1 after the kill equal the first ones, bit for bit"],
        "restore": ["0.25 s, from iteration 7 to 4"],
        "losses replayed": ["all 3 after the restore equal the first ones, bit for bit"],
    }


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([None, 10, 10, 4], "every 10, then 4 iterations"),
        ([10, None, 10, 10], "every 10 iterations"),
        ([10, 4, 10, None], "every 10, then 4, then 10 iterations"),
        ([1, 1, None, None], "every 1 iteration"),
        ([1, 4, 9, 3, 4, 2, 1], "every 1 iteration at first, every 1 at the end, between 1 and 9 on the way"),
        ([None] * 4, "never decided"),
    ],
)
def test_the_interval_is_given_as_the_interval_history_has_it(
    server: SummaryClient, events: DemoEvents, intervals: list[int | None], expected: str
) -> None:
    server.intervals = intervals
    assert rows(server, events)["interval"] == [expected]


def test_a_run_longer_than_one_answer_is_read_in_windows(
    server: SummaryClient, events: DemoEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("demo_summary.POINTS", 3)
    server.most_points = 3
    assert rows(server, events)["iterations"] == ["10 on 2 lineages"]
    assert rows(server, events)["losses replayed"] == ["all 3 after the restore equal the first ones, bit for bit"]


def test_a_loss_that_differs_in_its_last_bit_is_told(server: SummaryClient, events: DemoEvents) -> None:
    server.again[1] = 0.4000000000000001
    assert rows(server, events)["losses replayed"] == ["1 of 3 DIFFER after the restore, first at iteration 6"]


def test_a_loss_that_differs_after_the_kill_is_told(server: SummaryClient, events: DemoEvents) -> None:
    events.losses_before_kill[1, 5] = 0.6
    assert rows(server, events)["losses repeated"] == ["1 of 1 DIFFER after the kill, first at iteration 5"]


def test_nothing_to_compare_is_not_success(server: SummaryClient, events: DemoEvents) -> None:
    events.losses_before_kill = {}
    assert rows(server, events)["losses repeated"] == [
        "not compared: the server had no report of them before the kill"
    ]
    events.killed_at = 4  # where the next attempt resumed
    assert rows(server, events)["losses repeated"] == ["none were repeated after the kill"]


def test_an_overhead_above_the_budget_says_what_it_was_measured_over() -> None:
    times = [0.1] * 1800 + [0.05] * 100 + [0.2] * 300
    timeline = {
        "paced": [{"budget": 0.02, "measured_overhead": 0.05, "at": 3000.0}],
        "series": [{"at": range(len(times)), "seconds": {"mean": times}}],
        "checkpoints": [{"at": 10.0 * number} for number in range(25)],
    }
    first, (_, text) = _overheads(timeline)
    assert first == ("overhead", "5.00 % under a budget of 2.00 %")
    assert text == (
        "other load on this machine (2199 iterations, 24 checkpoints; "
        "8 of 10 iterations take 100 to 200 % of the usual time)"
    )
    timeline["paced"][0]["measured_overhead"] = 0.019  # type: ignore[index]
    assert list(_overheads(timeline)) == [("overhead", "1.90 % under a budget of 2.00 %")]


def test_the_kill_that_lost_something_is_the_one_that_counts(server: SummaryClient, events: DemoEvents) -> None:
    events.killed_attempt = 2
    whole = server.get

    def killed_twice(path: str, **query: int) -> dict[str, Any]:
        attempts = [{"attempt": number, "iteration": iteration} for number, iteration in ((1, 0), (2, 5), (3, 3))]
        return {**whole(path, **query), "attempts": attempts}

    server.get = killed_twice  # type: ignore[method-assign, assignment]
    assert rows(server, events)["lost to the kill"] == ["2 iterations: killed after 5, resumed at 3"]
