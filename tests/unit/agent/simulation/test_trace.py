"""Recorded fault traces: reading them, and the failures of a job that they give."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings, strategies

from holdfast.pacing import PacingSettings, policies
from holdfast.simulation import FaultTrace, NodeFault, SimulatedJob, TraceFailures, parse_trace, simulate


def event(node: object, time: object, kind: str, level: str | None = None) -> dict[str, object]:
    found: dict[str, object] = {"node_id": node, "event_time": time, "event_type": kind}
    return found if level is None else found | {"fault_type": {"Level": level, "Class": "GPU"}}


def trace(*faults: tuple[str, float, float], seconds: float = 1000.0) -> FaultTrace:
    found = sorted(
        (NodeFault(start, end, node) for node, start, end in faults), key=lambda each: each.start_seconds
    )
    return FaultTrace(faults=tuple(found), seconds=seconds)


def test_starts_and_ends_of_each_node_are_paired():
    read = parse_trace(
        json.dumps(
            [
                event("b", 4, "fault_end"),
                event("a", 1, "fault_start"),
                event("b", 2, "fault_start"),
                event("a", 8.5, "fault_end"),
            ]
        ),
        unit_seconds=10,
    )
    assert read.faults == (NodeFault(10, 85, "a"), NodeFault(20, 40, "b"))
    assert (read.seconds, read.nodes, read.unused) == (85, ("a", "b"), ())
    assert read.mtbf_seconds == 42.5


def test_times_before_the_first_moment_move_the_whole_trace():
    read = parse_trace(json.dumps([event("a", -3, "fault_start"), event("a", 1, "fault_end")]), unit_seconds=1)
    assert (read.faults, read.seconds) == ((NodeFault(0, 4, "a"),), 4)


def test_a_trace_may_be_limited_to_a_level():
    events = [
        event("a", 1, "fault_start", "Hardware Failure"),
        event("a", 2, "fault_end", "Hardware Failure"),
        event("b", 3, "fault_start", "Software Failure"),
        event("b", 9, "fault_end", "Software Failure"),
    ]
    read = parse_trace(json.dumps(events), unit_seconds=1, level="Hardware Failure")
    assert [fault.node for fault in read.faults] == ["a"]
    assert read.seconds == 9  # the cluster was observed until then


def test_what_cannot_be_used_is_named():
    events = [
        event("a", 0, "fault_end"),
        event("a", 1, "fault_start"),
        event("a", 2, "fault_start"),
        event("a", 3, "fault_end"),
        event("a", 4, "fault_end"),
        event("b", 5, "fault_start"),
        event("b", 6, "reboot"),
    ]
    read = parse_trace(json.dumps(events), unit_seconds=1)
    assert read.faults == (NodeFault(1, 4, "a"), NodeFault(5, math.inf, "b"))
    assert read.unused == (
        "1 × an event_type other than fault_start and fault_end ('reboot')",
        "1 × a fault_end without a fault_start",
        "1 × a fault of a node that was out of service already",
        "1 × a fault_start without a fault_end (out of service until the end)",
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("node_id,event_time", "neither JSON, nor CSV whose first line has event_type"),
        ("a 1 fault_start", "neither JSON, nor CSV whose first line has node_id, event_time, event_type"),
        (json.dumps("a"), "neither JSON, nor CSV"),
        (json.dumps([event("a", 1, "START")]), "no fault_start; 1 × an event_type other than .* \\('START'\\)"),
        ("{}", "not a JSON list"),
        ("[]", "no fault_start"),
        (
            "",
            "cannot be read: .* Give a JSON list of events, one JSON object a line, or CSV with the columns",
        ),
        (b"\xff\xfe", "cannot be read: 'utf-8' codec"),
        ("node_id,event_time,event_type\na,,fault_start", "event 0 of the trace has no event_time"),
        (json.dumps([event(None, 1, "fault_start")]), "event 0 of the trace has no node_id"),
        (json.dumps([event("a", 5, "fault_start")]), "all events of the trace are at the same time"),
        (json.dumps([event("a", "31.01.2026", "fault_start")]), "or a date such as 2026-01-31T12:00:00Z"),
        (json.dumps([event("a", 1_769_817_600_000, "fault_start")]), "in the unit of --trace-unit"),
        ("[3]", "event 0 of the trace is not an object"),
        (json.dumps([{"node_id": "a", "event_time": 1}]), "event 0 of the trace has no event_type"),
        (json.dumps([event("a", "noon", "fault_start")]), "event_time 'noon'"),
        (json.dumps([event("a", True, "fault_start")]), "event_time True"),
        ('[{"node_id": "a", "event_time": NaN, "event_type": "fault_start"}]', "event_time nan"),
        (json.dumps([event("a", 1, "fault_end")]), "no fault_start"),
        (json.dumps([event("a", 10**400, "fault_start")]), "event_time 1000.*: give a number"),
        (json.dumps([event("a", 1e308, "fault_start")]), r"event_time 1e\+308: .* of at most 1e\+12 s"),
        (json.dumps([event("a", -1_795_000_000_000, "fault_start")]), "in the unit of --trace-unit"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_trace_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        parse_trace(text)


HOURS = [("a", 1, "fault_start"), ("a", 3, "fault_end"), ("b", 4, "fault_start"), ("b", 8, "fault_end")]
"""Times in hours after midnight, or after 2026-01-31 00:00 UTC."""
AS_READ = (NodeFault(3600, 10800, "a"), NodeFault(14400, 28800, "b"))
FROM_FIRST = (NodeFault(0, 7200, "a"), NodeFault(10800, 25200, "b"))
MIDNIGHT = 1_769_817_600
NO_TIME = "1 × the time before the first event, much longer than the rest"


def lines(times: Callable[[int], object]) -> list[dict[str, object]]:
    return [event(node, times(hour), kind) for node, hour, kind in HOURS]


def csv(times: Callable[[int], object], end: str = "\n") -> str:
    rows = [f"{node},{times(hour)},{kind}" for node, hour, kind in HOURS]
    return end.join(["node_id,event_time,event_type", *rows, ""])


@pytest.mark.parametrize(
    ("text", "faults", "unused"),
    [
        (json.dumps(lines(int)[::-1]), AS_READ, ()),
        ("\n".join(map(json.dumps, lines(int))), AS_READ, ()),
        (csv(int), AS_READ, ()),
        (("\ufeff" + csv(float, "\r\n")).encode(), AS_READ, ()),
        (json.dumps(lines(lambda hour: MIDNIGHT / 3600 + hour)), FROM_FIRST, (NO_TIME,)),
        (csv(lambda hour: f"2026-01-31T0{hour}:00:00Z"), FROM_FIRST, (NO_TIME,)),
        (csv(lambda hour: f"2026-01-31T0{hour + 1}:00:00+01:00"), FROM_FIRST, (NO_TIME,)),
        (
            json.dumps(lines(lambda hour: f"2026-01-31 0{hour}:00")),
            FROM_FIRST,
            ("4 × a date without a time zone (read as UTC)", NO_TIME),
        ),
        (
            json.dumps([*lines(int)[:1], *lines(int), event("c", 9, "reboot")]),
            AS_READ,
            (
                "1 × an event that is in the trace already",
                "1 × an event_type other than fault_start and fault_end ('reboot')",
            ),
        ),
        (
            json.dumps(lines(int)[:3]),
            (AS_READ[0], NodeFault(14400, math.inf, "b")),
            ("1 × a fault_start without a fault_end (out of service until the end)",),
        ),
    ],
    ids=["unordered", "json lines", "csv", "csv of a spreadsheet", "hours since 1970", "dates", "zones", "no zone",
         "repeated", "no end"],
)  # fmt: skip
def test_a_trace_of_another_form_is_read_and_what_is_not_used_is_named(text, faults, unused):
    read = parse_trace(text, unit_seconds=3600)
    assert [(each.node, round(each.start_seconds), each.end_seconds) for each in read.faults] == [
        (each.node, each.start_seconds, pytest.approx(each.end_seconds, abs=0.01)) for each in faults
    ]
    assert sorted(read.unused) == sorted(unused)


def test_a_fault_of_a_node_in_use_is_a_failure_and_one_of_a_spare_is_none():
    failures = TraceFailures(trace(("a", 100, 150), ("b", 300, 350)), nodes=2)
    assert failures.seconds_left(0.0) == 100
    assert failures.failed(100.0) == 50  # no spare: it waits for the repair
    assert failures.seconds_left(150.0) == 150
    assert failures.failed(300.0) == 50
    assert failures.seconds_left(350.0) == math.inf


def test_a_healthy_spare_takes_over_at_once_and_its_fault_counts_from_then_on():
    # only the node that replaces the first one in use has a fault later
    both = trace(("a", 100, 900), ("b", 200, 250))
    failures = TraceFailures(both, nodes=1, spares=1)
    first = failures.seconds_left(0.0)
    assert first in (100, 200)
    assert failures.failed(first) == 0
    assert failures.seconds_left(first) == (100 if first == 100 else math.inf)


def failures_by_definition(recorded: FaultTrace, nodes: int, spares: int) -> list[tuple[float, float]]:
    """The failures of a job on all nodes of a cluster, and how long each waits; looks at every fault each time."""
    pool = sorted(recorded.nodes)[: nodes + spares]
    in_use: set[str] = set(pool[:nodes])
    now, found = 0.0, []
    while True:
        ready_at = now
        while (
            len(out := {each.node: each.end_seconds for each in recorded.faults if is_out(each, ready_at)})
            > spares
        ):
            if (ready_at := min(out.values())) == math.inf:
                return found
        if found:
            found[-1] = found[-1][0], ready_at - now
        kept = [node for node in pool if node in in_use and node not in out]
        others = [node for node in pool if node not in in_use and node not in out]
        in_use = {*kept, *others[: nodes - len(kept)]}
        later = [
            each.start_seconds for each in recorded.faults if each.start_seconds > ready_at and each.node in in_use
        ]
        if not later:
            return found
        now = min(later)
        found.append((now, math.inf))


def is_out(fault: NodeFault, now: float) -> bool:
    return fault.start_seconds <= now < fault.end_seconds


@given(
    strategies.lists(strategies.tuples(*[strategies.integers(0, 3)] * 3), min_size=4, max_size=30),
    strategies.integers(0, 2),
)
def test_failures_and_waits_are_those_of_the_definition(steps, spares):
    ends, faults = dict.fromkeys("abcd", 0.0), []
    for number, (node, gap, length) in enumerate(steps):
        name = "abcd"[node if number >= 4 else number]  # each node has a fault
        start = ends[name] + gap + 1
        ends[name] = start + length
        faults.append((name, start, ends[name]))
    recorded = trace(*faults)
    failures = TraceFailures(recorded, nodes=4 - spares, spares=spares)
    now, found = 0.0, []
    while (left := failures.seconds_left(now)) < math.inf:
        waited = failures.failed(now + left)
        found.append((now + left, waited))
        now += left + waited
    assert found == failures_by_definition(recorded, 4 - spares, spares)


def test_nodes_that_fail_together_are_one_failure():
    burst = trace(("a", 100, 400), ("b", 100, 300), ("c", 100, 200))
    failures = TraceFailures(burst, nodes=2, spares=1)
    assert failures.seconds_left(0.0) == 100
    assert failures.failed(100.0) == 200  # two of three are needed: until the second repair


def test_a_node_that_is_never_repaired_ends_a_job_without_spares():
    failures = TraceFailures(trace(("a", 100, math.inf)), nodes=1)
    assert failures.failed(100.0) == math.inf


def test_nodes_without_a_fault_are_part_of_the_cluster():
    one = trace(("a", 100, 200))
    seen = {TraceFailures(one, nodes=1, cluster_nodes=2, seed=seed).seconds_left(0.0) for seed in range(20)}
    assert seen == {100, math.inf}


def test_of_many_unknown_types_of_events_a_few_are_named():
    events = [event("a", 1, f"type {number}") for number in range(1000)] + [event("a", 2, "fault_start")]
    unused = parse_trace(json.dumps(events)).unused
    assert len(unused) == 7
    assert unused[0] == "1 × an event_type other than fault_start and fault_end ('type 0')"
    assert unused[5] == "995 × an event_type other than fault_start and fault_end (others)"


@pytest.mark.parametrize(
    ("nodes", "spares", "cluster", "words"),
    [
        (0, 1, None, "do not fit"),
        (2, 1, None, "do not fit"),
        (1, -1, None, "do not fit"),
        (1, 0, 1, "more than 1 of"),
    ],
)
def test_a_job_that_does_not_fit_the_cluster_is_refused(nodes, spares, cluster, words):
    with pytest.raises(ValueError, match=words):
        TraceFailures(trace(("a", 1, 2), ("b", 1, 2)), nodes=nodes, spares=spares, cluster_nodes=cluster)


def test_an_accelerated_trace_has_faults_and_repairs_sooner():
    fast = trace(("a", 100, 200), seconds=400.0).accelerated(4)
    assert (fast.faults, fast.seconds) == ((NodeFault(25, 50, "a"),), 100)
    with pytest.raises(ValueError, match="factor above 0"):
        fast.accelerated(0)


@given(
    faults=strategies.lists(
        strategies.tuples(
            strategies.sampled_from("abcd"), strategies.integers(0, 900), strategies.integers(1, 400)
        ),
        min_size=1,
        max_size=12,
    ),
    nodes=strategies.integers(1, 3),
    lag=strategies.sampled_from([0.0, 30.0]),
    interval=strategies.integers(1, 20),
)
@settings(max_examples=200, deadline=None)
def test_the_parts_of_a_run_are_all_of_the_trace(faults, nodes, lag, interval):
    recorded = trace(*((node, start, start + lasts) for node, start, lasts in faults), seconds=1300.0)
    job = SimulatedJob(
        total_iterations=10**6, iteration_seconds=3.0, cost_seconds=1.0, lag_seconds=lag, restart_seconds=20.0
    )
    outcome = simulate(
        job,
        policies["fixed"],
        PacingSettings(every=interval),
        failures=TraceFailures(recorded, nodes=nodes, spares=1, cluster_nodes=5),
        until_seconds=recorded.seconds,
    )
    parts = (
        outcome.useful_seconds,
        outcome.stall_seconds,
        outcome.lost_seconds,
        outcome.restart_seconds,
        outcome.waiting_seconds,
    )
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(outcome.wall_seconds)
    assert outcome.wall_seconds == recorded.seconds
    assert outcome.failures <= 2 * len(faults) + 1
