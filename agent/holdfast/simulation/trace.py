"""Failures of a job from a recorded fault trace of a cluster, with its bursts, repair times and spare nodes.

A trace is a JSON list of events `{"node_id": "a", "event_time": 3.9, "event_type": "fault_start"}`, with
`fault_end` at the repair; an optional `fault_type` has the `Level`, such as "Hardware Failure". The format is that
of InfiniteHBD-Trace (400 servers over 348 days; "InfiniteHBD", SIGCOMM 2025). The same events may come as one JSON
object a line or as CSV with a header, and times as dates in ISO 8601.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

DAY = 86400.0
FIELDS = ("node_id", "event_time", "event_type")
EVENT_TYPES = ("fault_start", "fault_end")
MOST_SECONDS = 1e12
"""Largest time of an event: a simulation with larger ones would add seconds to a time that does not change."""
EPOCH_FACTOR = 3.0
"""Time before the first event, in durations of the rest, above which it belongs to no cluster."""
MOST_NAMED = 5
"""Number of unknown event types that are named."""


@dataclass(frozen=True, slots=True)
class NodeFault:
    """One node is out of service from `start_seconds` until `end_seconds`; infinite if the trace has no repair."""

    start_seconds: float
    end_seconds: float
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultTrace:
    """The faults of a cluster's nodes, in the order of their time."""

    faults: tuple[NodeFault, ...]
    seconds: float
    """Time from the first moment of the trace to its last event."""
    unused: tuple[str, ...] = ()
    """What the reader could not use, in words."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that have a fault, in the order of their first one."""
        return tuple(dict.fromkeys(fault.node for fault in self.faults))

    @property
    def mtbf_seconds(self) -> float:
        """Mean time between faults of all nodes together."""
        return self.seconds / len(self.faults)

    @property
    def gap_variation(self) -> float:
        """Coefficient of variation of the times between faults: 1 for a constant rate, above it for bursts."""
        starts = [fault.start_seconds for fault in self.faults]
        gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
        mean = statistics.fmean(gaps) if gaps else 0.0
        return statistics.pstdev(gaps) / mean if mean > 0 else 0.0

    def accelerated(self, factor: float) -> FaultTrace:
        """Return the trace with all times, those of repairs included, divided by `factor`."""
        if not 0 < factor < math.inf:
            raise ValueError(f"a trace cannot be accelerated by {factor:g}: give a factor above 0")
        return replace(
            self,
            seconds=self.seconds / factor,
            faults=tuple(
                NodeFault(fault.start_seconds / factor, fault.end_seconds / factor, fault.node)
                for fault in self.faults
            ),
        )


def parse_trace(text: str | bytes, *, unit_seconds: float = DAY, level: str | None = None) -> FaultTrace:
    """Parse a trace.

    Args:
        text: a JSON list, one JSON object a line, or CSV.
        unit_seconds: the unit of an `event_time` that is a number; days by default.
        level: use only faults whose `fault_type` has this `Level`.

    Raises:
        ValueError: it is none of these, or has no fault; names the event and the field.
    """
    unused: Counter[str] = Counter()
    read = [_event(number, event, unit_seconds, unused) for number, event in enumerate(_decoded(text))]
    faults = _paired(sorted(_used(read, level, unused), key=lambda event: event[0]), unused)
    left_out = tuple(f"{count:,} × {reason}" for reason, count in unused.items())
    if not faults:
        which = f" of the level {level!r}" if level is not None else ""
        raise ValueError("; ".join((f"the trace has no fault_start{which}", *left_out)))
    earliest, latest = min(time for time, *_ in read), max(time for time, *_ in read)
    first = min(0.0, earliest)
    if earliest > EPOCH_FACTOR * (latest - earliest):  # times since 1970, most of them without the cluster
        first = earliest
        left_out += ("1 × the time before the first event, much longer than the rest",)
    if latest <= first:
        raise ValueError("all events of the trace are at the same time: a trace needs a duration")
    return FaultTrace(
        faults=tuple(NodeFault(start - first, end - first, node) for start, end, node in sorted(faults)),
        seconds=latest - first,
        unused=left_out,
    )


def _decoded(text: str | bytes) -> list[Any]:
    """Return the events of a JSON list, of lines with an object each, or of CSV with a header."""
    try:
        text = (text.decode("utf-8-sig") if isinstance(text, bytes) else text).lstrip()
        if text[:1] == "{" and len(lines := [line for line in text.splitlines() if line.strip()]) > 1:
            return [json.loads(line) for line in lines]
        is_table = text[:1] not in ("[", "{", "")
        events = _rows(text.splitlines()) if is_table else json.loads(text)
    except RecursionError:
        raise ValueError("the trace is not JSON that can be read: it is nested too deeply") from None
    except (ValueError, csv.Error) as error:
        raise ValueError(
            f"the trace cannot be read: {error}. Give a JSON list of events, one JSON object a line, or CSV with "
            f"the columns {', '.join(FIELDS)}"
        ) from None
    if not isinstance(events, list):
        raise ValueError("the trace is not a JSON list of events with node_id, event_time and event_type")
    return events


def _rows(lines: list[str]) -> list[dict[str, Any]]:
    separator = max(",;\t", key=lines[0].count)
    rows = csv.DictReader(lines, delimiter=separator, skipinitialspace=True)
    rows.fieldnames = [name.strip().lower() for name in rows.fieldnames or ()]
    if missing := [name for name in FIELDS if name not in rows.fieldnames]:
        raise ValueError(f"neither JSON, nor CSV whose first line has {', '.join(missing)}")
    return list(rows)


_Event = tuple[float, str, str, str | None]
"""Time in seconds, node, type and level."""


def _event(number: int, event: Any, unit_seconds: float, unused: Counter[str]) -> _Event:
    if not isinstance(event, Mapping):
        raise ValueError(f"event {number} of the trace is not an object with node_id, event_time and event_type")
    for name in FIELDS:
        if event.get(name) in (None, ""):
            raise ValueError(f"event {number} of the trace has no {name}")
    time = event["event_time"]
    seconds = _seconds(time, unit_seconds, unused)
    if seconds is None or not -MOST_SECONDS <= seconds <= MOST_SECONDS:
        raise ValueError(
            f"event {number} of the trace has the event_time {time!r:.40}: give a number, in the unit of "
            f"--trace-unit, of at most {MOST_SECONDS:g} s, or a date such as 2026-01-31T12:00:00Z"
        )
    kind = event.get("fault_type")
    level = kind.get("Level") if isinstance(kind, Mapping) else kind
    return seconds, str(event["node_id"]), str(event["event_type"]), None if level is None else str(level)


def _seconds(time: Any, unit_seconds: float, unused: Counter[str]) -> float | None:
    """Return a time in seconds, of a date since 1970; `None` if it is neither a number nor a date."""
    if isinstance(time, bool) or not isinstance(time, int | float | str):
        return None
    try:
        return float(time) * unit_seconds
    except OverflowError:
        return None
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(str(time).strip())
    except ValueError:
        return None
    if moment.tzinfo is None:
        unused["a date without a time zone (read as UTC)"] += 1
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp()


def _used(events: Iterable[_Event], level: str | None, unused: Counter[str]) -> Iterable[_Event]:
    others: dict[str, str] = {}
    seen: set[_Event] = set()
    for event in events:
        if event in seen:
            unused["an event that is in the trace already"] += 1
            continue
        seen.add(event)
        if event[2] not in EVENT_TYPES:
            others.setdefault(event[2], f"{event[2]!r:.40}" if len(others) < MOST_NAMED else "others")
            unused[f"an event_type other than fault_start and fault_end ({others[event[2]]})"] += 1
        elif level is None or event[3] == level:
            yield event


def _paired(events: Iterable[_Event], unused: Counter[str]) -> list[tuple[float, float, str]]:
    """Pair starts and ends of each node; faults of a node that overlap become one."""
    open_faults: dict[str, list[float]] = {}
    faults: list[tuple[float, float, str]] = []
    for time, node, kind, _ in events:
        starts = open_faults.setdefault(node, [])
        if kind == "fault_start":
            starts.append(time)
        elif not starts:
            unused["a fault_end without a fault_start"] += 1
        elif len(starts) == 1:
            faults.append((starts.pop(), time, node))
        else:
            starts.pop()
            unused["a fault of a node that was out of service already"] += 1
    for node, starts in open_faults.items():
        if starts:
            unused["a fault_start without a fault_end (out of service until the end)"] += 1
            faults.append((starts[0], math.inf, node))
    return faults


class TraceFailures:
    """The failures of a job that needs `nodes` of a cluster's nodes and has `spares` more.

    A fault of a node in use is a failure. Healthy spares replace what is out of service; without enough of them,
    the job waits for repairs. A fault during a restart takes effect at its end.
    """

    def __init__(
        self, trace: FaultTrace, *, nodes: int, spares: int = 0, cluster_nodes: int | None = None, seed: int = 0
    ) -> None:
        """Choose the nodes of the job at random, by `seed`.

        Args:
            cluster_nodes: the size of the cluster; by default, the nodes that have a fault in the trace. Further
                ones never fail.
        """
        names = trace.nodes
        cluster = len(names) if cluster_nodes is None else cluster_nodes
        if cluster < len(names):
            raise ValueError(f"the trace has faults of {len(names):,} nodes, more than {cluster:,} of the cluster")
        if nodes < 1 or spares < 0 or nodes + spares > cluster:
            raise ValueError(
                f"{nodes:,} nodes and {spares:,} spares do not fit into a cluster of {cluster:,} nodes"
            )
        chosen = random.Random(seed).sample(range(cluster), nodes + spares)  # noqa: S311 - repeated by its seed
        own = {names[number] if number < len(names) else number for number in chosen}
        self.seconds = trace.seconds
        """Length of the trace."""
        self._faults = [fault for fault in trace.faults if fault.node in own]
        self._begun = 0
        """How many of them have begun."""
        self._out: dict[str | int, float] = {}
        """Nodes that are out of service, with the end of the fault."""
        pool = sorted(own, key=str)
        self._in_use, self._idle = set(pool[:nodes]), pool[nodes:]
        self._next = math.inf
        self.failed(0.0)

    def seconds_left(self, now: float) -> float:
        """Return how long the job can run from `now` until the next fault of a node in use."""
        return max(0.0, self._next - now)

    def ran(self, now: float, seconds: float) -> None:
        """Nothing to do: the times of a trace are fixed."""

    def failed(self, now: float) -> float:
        """Replace the nodes that are out of service; return how long the job waits until enough are healthy."""
        ready_at = now
        self._pass_to(ready_at)
        while len(self._out) > len(self._idle):
            ready_at = min(self._out.values())
            if ready_at == math.inf:
                self._next = math.inf
                return math.inf
            self._pass_to(ready_at)
        lost = self._in_use & self._out.keys()
        replacing = [node for node in self._idle if node not in self._out][: len(lost)]
        self._in_use -= lost
        self._in_use.update(replacing)
        self._idle = sorted({*self._idle, *lost} - {*replacing}, key=str)
        later = (self._faults[number] for number in range(self._begun, len(self._faults)))
        self._next = next((fault.start_seconds for fault in later if fault.node in self._in_use), math.inf)
        return ready_at - now

    def _pass_to(self, now: float) -> None:
        """Begin and end the faults up to this time, which never goes back."""
        while self._begun < len(self._faults) and self._faults[self._begun].start_seconds <= now:
            fault = self._faults[self._begun]
            self._out[fault.node] = fault.end_seconds
            self._begun += 1
        self._out = {node: end for node, end in self._out.items() if end > now}
