"""An attempt as a trace in Chrome's format, which Perfetto (ui.perfetto.dev) opens.

One track each for iterations, the stages of checkpoints and the kinds of stall; what people ordered as instants;
loss and measured overhead as counters. Times are microseconds since the attempt began. What is no number is left
out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast.protocol.field_types import MAX_ITERATION, TIMES_END
from holdfast.protocol.jobs import Edit, Order
from holdfast.protocol.timeline import IntervalInfo
from holdfast_server import models
from holdfast_server.core.errors import InvalidSetting
from holdfast_server.db import Database
from holdfast_server.queries import timeline_annotations
from holdfast_server.queries.job_view import find_job
from holdfast_server.queries.timeline import MAX_MARKS, MAX_POINTS, MAX_ROWS
from holdfast_server.records import desired_state, restore_orders
from holdfast_server.records.ancestry import ancestry_of
from holdfast_server.samples import read_plan, reading
from holdfast_server.samples.rollups import LAST, SUM, Rollup
from holdfast_server.samples.sample_codec import BUILT_IN
from holdfast_server.samples.series import AT, SECONDS, TimelineData, buckets_of

TRACKS = ("iterations", "snapshot", "persist", "stalls", "orders")
MOST_ROWS = 20_000
"""Most checkpoints, and most stalls, in a trace; later ones are omitted."""

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Within:
    """The part of a job in the trace."""

    attempt: int
    uid: str
    begin: float
    end: float
    """When the next attempt started, or this one ended."""
    first: int
    last: int

    def lasts(self, at: float) -> bool:
        return self.begin <= at <= self.end

    def us(self, at: float) -> float:
        return round(1e6 * (at - self.begin), 1)


@dataclass(frozen=True, slots=True)
class _Found:
    """Data of the trace."""

    plans: Sequence[read_plan.PlannedRead]
    contents: TimelineData
    checkpoints: Sequence[models.CheckpointRecord]
    stalls: Sequence[models.StallRecord]
    edits: Sequence[Edit]
    orders: Sequence[Order]
    paced: Sequence[IntervalInfo]


def trace(db: Database, job: str, attempt: int | None, first: int | None, last: int | None) -> dict[str, Any]:
    """Return the trace of an attempt, or of some of its iterations.

    Without a number, of the attempt that reported the last iteration, or of the newest attempt.

    Raises:
        UnknownJob, InvalidSetting.
    """
    with db.read() as session:
        all_series = reading.series_of(session, job)
        within = _within(session, job, all_series, attempt, first, last)
        plans = _plans(all_series, within)
        found = _Found(
            plans,
            reading.contents(session, job, [read for plan in plans for read in plan.segments]),
            _checkpoints_of(session, job, within),
            _stalls_of(session, job, within),
            desired_state.edit_rows(session, job, limit=MAX_ROWS),
            restore_orders.order_rows(session, job, limit=MAX_ROWS),
            _paced_of(session, job, within),
        )
    return _trace(job, within, found)


def _trace(job: str, within: _Within, found: _Found) -> dict[str, Any]:
    rows = {"checkpoints": found.checkpoints, "stalls": found.stalls}
    events = [
        *_names(job, within.attempt),
        *_iterations(found, within),
        *_checkpoints(found.checkpoints[:MOST_ROWS], within),
        *_stalls(found.stalls[:MOST_ROWS], within),
        *_orders(found, within),
    ]
    about = {"job": job, "attempt": within.attempt}
    cut = [name for name, some in rows.items() if len(some) > MOST_ROWS]
    return {
        "traceEvents": [made for event in events if (made := _of_numbers(event)) is not None],
        "displayTimeUnit": "ms",
        "otherData": about | ({"only_the_first": MOST_ROWS, "of": cut} if cut else {}),
    }


def _of_numbers(event: Event) -> Event | None:
    """Replace non-finite arguments by null; None for an event whose time is not finite."""
    if not all(math.isfinite(event.get(name, 0.0)) for name in ("ts", "dur")):
        return None
    odd = [name for name, one in event["args"].items() if isinstance(one, float) and not math.isfinite(one)]
    return event | {"args": event["args"] | dict.fromkeys(odd)} if odd else event


def _within(
    session: Session,
    job: str,
    all_series: Iterable[models.SampleSeriesRecord],
    attempt: int | None,
    first: int | None,
    last: int | None,
) -> _Within:
    found, rows = find_job(session, job), models.AttemptRecord
    query = select(rows).where(rows.job == job).order_by(rows.started_at, rows.attempt)
    known = session.scalars(query).all()
    if attempt is None:
        uid = found.uid if last is None else _uid_at(all_series, last, found)
        chosen = next((row for row in known if row.uid == uid), None)
    else:
        chosen = next((row for row in reversed(known) if row.attempt == attempt), None)
    if chosen is None:
        raise InvalidSetting("attempt", f"no attempt {found.attempt if attempt is None else attempt} of {job!r}")
    later = (row.started_at for row in known if row.started_at > chosen.started_at)
    end = next(later, TIMES_END if chosen.finished_at is None else chosen.finished_at)
    return _Within(
        chosen.attempt, chosen.uid, chosen.started_at, end, first or 0, MAX_ITERATION if last is None else last
    )


def _uid_at(all_series: Iterable[models.SampleSeriesRecord], iteration: int, job: models.JobRecord) -> str:
    """Return the attempt that reported an iteration, the newest on the current lineage."""
    there = [one for one in all_series if one.first_iteration <= iteration <= one.last_iteration]
    newest = max(there, key=lambda one: (one.lineage == job.lineage, one.uid == job.uid, one.id), default=None)
    return job.uid if newest is None else newest.uid


def _plans(all_series: Iterable[models.SampleSeriesRecord], within: _Within) -> list[read_plan.PlannedRead]:
    found = []
    for one in all_series:
        first, last = max(one.first_iteration, within.first), min(one.last_iteration, within.last)
        if one.uid == within.uid and first <= last:
            found.append(read_plan.PlannedRead(one.lineage, False, False, [read_plan.Segment(one, first, last)]))
    # they follow each other, and share the points
    rows = sum(line.rows for line in found)
    return [read_plan.plan(line, max(2, math.ceil(MAX_POINTS * line.rows / rows))) for line in found]


def _checkpoints_of(session: Session, job: str, within: _Within) -> Sequence[models.CheckpointRecord]:
    rows = models.CheckpointRecord
    query = select(rows).where(rows.job == job, rows.attempt == within.attempt)
    query = query.where(rows.iteration.between(within.first, within.last)).order_by(rows.iteration)
    return session.scalars(query.limit(MOST_ROWS + 1)).all()


def _stalls_of(session: Session, job: str, within: _Within) -> Sequence[models.StallRecord]:
    rows = models.StallRecord
    query = select(rows).where(rows.job == job, rows.at.between(within.begin, within.end))
    query = query.where(rows.iteration.between(within.first, within.last)).order_by(rows.at)
    return session.scalars(query.limit(MOST_ROWS + 1)).all()


def _paced_of(session: Session, job: str, within: _Within) -> list[IntervalInfo]:
    reach = timeline_annotations.TimelineWindow("iteration", within.first, within.last, MAX_POINTS, MAX_MARKS)
    if (within.first, within.last) == (0, MAX_ITERATION):
        reach = timeline_annotations.TimelineWindow("time", within.begin, within.end, MAX_POINTS, MAX_MARKS)
    ancestry = ancestry_of(session, find_job(session, job))
    found = timeline_annotations.paced(session, job, reach, ancestry)
    return [row for row in found if within.lasts(row.at) and within.first <= row.iteration <= within.last]


def _names(job: str, attempt: int) -> Iterator[Event]:
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"{job}, attempt {attempt}, rank 0"}}
    for number, name in enumerate(TRACKS, 1):
        yield {"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": name}}


def _span(track: str, name: str, start_us: float, seconds: float, **args: Any) -> Event:
    number = TRACKS.index(track) + 1
    event = {"ph": "X", "pid": 1, "tid": number, "name": name, "ts": start_us, "dur": round(1e6 * seconds, 1)}
    return event | {"args": args}


def _iterations(found: _Found, within: _Within) -> Iterator[Event]:
    """Yield each iteration, or groups of iterations if there are too many."""
    for plan in found.plans:
        if (made := buckets_of(plan, found.contents, MAX_POINTS)) is None:
            continue
        names, buckets = made
        columns = zip(
            buckets.first.tolist(),
            buckets.last.tolist(),
            buckets.rows.tolist(),
            buckets.stats[:, AT, LAST].tolist(),
            buckets.stats[:, SECONDS, SUM].tolist(),
            buckets.finite[:, SECONDS].tolist(),
            strict=True,
        )
        for first, last, count, at, seconds, measured in columns:
            name = f"iteration {last:,}" if first == last else f"iterations {first:,}–{last:,}"
            about = {"lineage": plan.lineage, "iterations": count}
            if measured:
                yield _span("iterations", name, within.us(at - seconds), seconds, **about)
        if "loss" in names:
            yield from _losses(buckets, len(BUILT_IN) + names.index("loss"), within)


def _losses(buckets: Rollup, column: int, within: _Within) -> Iterator[Event]:
    times, sums = buckets.stats[:, AT, LAST].tolist(), buckets.stats[:, column, SUM].tolist()
    for at, loss, count in zip(times, sums, buckets.finite[:, column].tolist(), strict=True):
        if count:
            yield {"ph": "C", "pid": 1, "name": "loss", "ts": within.us(at), "args": {"loss": loss / count}}


def _checkpoints(taken: Iterable[models.CheckpointRecord], within: _Within) -> Iterator[Event]:
    for row in taken:
        about = {
            "kind": row.kind,
            "state": row.state,
            "bytes": row.payload_bytes,
            "reused_bytes": row.reused_bytes,
            "raw_bytes": row.raw_bytes,
            "blocking_seconds": row.stall_seconds,
        }
        name = f"checkpoint {row.iteration:,}"
        begin = row.at if row.snapshot_started_at is None else row.snapshot_started_at
        if row.snapshot_seconds is not None:
            yield _span("snapshot", name, within.us(begin), row.snapshot_seconds, **about)
        if row.persist_seconds is not None:
            written = begin + (row.snapshot_seconds or 0.0)
            start = written if row.persist_started_at is None else row.persist_started_at
            yield _span("persist", name, within.us(start), row.persist_seconds, **about)


def _stalls(waited: Iterable[models.StallRecord], within: _Within) -> Iterator[Event]:
    for row in waited:
        yield _span("stalls", row.kind, within.us(row.at - row.seconds), row.seconds, iteration=row.iteration)


def _orders(found: _Found, within: _Within) -> Iterator[Event]:
    moments = [(edit.applied_at, f"v{edit.version} {edit.summary}", edit.who) for edit in found.edits]
    moments += [
        (order.created_at, f"restore to {order.iteration:,}: {order.state}", order.who) for order in found.orders
    ]
    for at, name, who in moments:
        if at is not None and within.lasts(at):
            number = TRACKS.index("orders") + 1
            instant = {"ph": "i", "s": "p", "pid": 1, "tid": number, "name": name, "ts": within.us(at)}
            yield instant | {"args": {"who": who}}
    for row in found.paced:
        if row.measured_overhead is not None:
            counted = {"ph": "C", "pid": 1, "name": "overhead", "ts": within.us(row.at)}
            yield counted | {"args": {"measured": row.measured_overhead, "budget": row.budget}}
