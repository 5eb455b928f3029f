"""Queries for a job's timeline, checkpoints, orders, edits and notices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from sqlalchemy import Select, bindparam, func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.protocol.jobs import CheckpointInfo, Edit, NoticeInfo, Order
from holdfast.protocol.messages import MOST_RANK_SPANS, parse_checkpoint_id
from holdfast.protocol.questions import CheckpointDetail
from holdfast.protocol.timeline import (
    AttemptInfo,
    CheckpointDensity,
    LineageInfo,
    MachineSeries,
    MachineTimeline,
    Series,
    Timeline,
)
from holdfast_server import models
from holdfast_server.core.errors import InvalidSetting
from holdfast_server.db import Database
from holdfast_server.queries import timeline_annotations
from holdfast_server.queries.summaries import find_job
from holdfast_server.queries.timeline_annotations import Axis, TimelineWindow, as_view
from holdfast_server.records import checkpoints, desired_state, restore_orders, verifications
from holdfast_server.records.ancestry import Ancestry, ancestry_of, lineages_of
from holdfast_server.records.checkpoints import DURABLE, IN_STORE, as_row, taken_at
from holdfast_server.records.job_status import status_of
from holdfast_server.samples import read_plan, reading, series
from holdfast_server.samples.limits import MACHINE_RANK
from holdfast_server.samples.sample_series import names_of

MAX_POINTS = 2000
MAX_MARKS, MAX_CHECKPOINTS = 500, 1000
"""Most stalls and decisions, and most checkpoints, that a window returns one by one; of more, a selection."""
MAX_RANKS, MAX_CHECKPOINTS_WITH_RANKS = 8, 60
"""Ranks whose times a checkpoint shows, the slowest, in a window of at most so many checkpoints."""
MAX_ROWS = 200
MAX_ORDERS = 20
"""Restore orders that the detail of a checkpoint shows."""


async def restore_points(
    db: Database, job: str, *, limit: int = 50, before: str | None = None, in_store: bool = False
) -> list[CheckpointInfo]:
    """List the checkpoints of all lineages and states, the last taken first.

    `in_store`: only those that are in the store, even damaged, or being written to it. `before`: the last id of
    the previous page.

    Raises:
        UnknownJob.
        InvalidSetting: there is no checkpoint `before`.
    """
    rows = models.CheckpointRecord
    async with db.read() as session:
        found = await find_job(session, job)
        order = (taken_at(), rows.iteration, rows.lineage)
        query = select(rows).where(rows.job == job).order_by(*(part.desc() for part in order))
        if in_store:
            query = query.where(rows.state.in_(IN_STORE))
        if before is not None:
            last = (await session.execute(select(*order).where(rows.job == job, rows.id == before))).first()
            if last is None:
                raise InvalidSetting("before", f"no checkpoint {before!r}: give the last id of the previous page")
            query = query.where(tuple_(*order) < tuple_(*last))
        ancestry = await ancestry_of(session, found)
        found_rows = await session.scalars(query.limit(min(limit, MAX_MARKS)))
        return [as_row(row, ancestry) for row in found_rows]


async def checkpoint(db: Database, job: str, checkpoint: str) -> CheckpointInfo | None:
    async with db.read() as session:
        found = await find_job(session, job)
        row = await session.get(models.CheckpointRecord, (job, checkpoint))
        return as_row(row, await ancestry_of(session, found)) if row else None


async def orders(db: Database, job: str, *, limit: int = 20) -> list[Order]:
    async with db.read() as session:
        await find_job(session, job)
        return await restore_orders.order_rows(session, job, limit=min(limit, MAX_ROWS))


async def order(db: Database, job: str, order: str) -> Order:
    """Raises UnknownOrder."""
    async with db.read() as session:
        await find_job(session, job)
        return await restore_orders.find(session, job, order)


async def edits(db: Database, job: str, *, limit: int = 20) -> list[Edit]:
    async with db.read() as session:
        await find_job(session, job)
        return await desired_state.edit_rows(session, job, limit=min(limit, MAX_ROWS))


async def notices(db: Database, job: str, *, limit: int = 20) -> list[NoticeInfo]:
    rows = models.NoticeRecord
    async with db.read() as session:
        await find_job(session, job)
        query = select(rows).where(rows.job == job).order_by(rows.id.desc())
        query = query.limit(min(limit, MAX_ROWS))
        return [as_view(NoticeInfo, row) for row in await session.scalars(query)]


async def story(db: Database, job: str, checkpoint: str) -> CheckpointDetail:
    """Return the detail of a checkpoint.

    Raises:
        UnknownJob.
        CheckpointNotFound: with the nearest earlier one.
        InvalidSetting: it is not a checkpoint id.
    """
    async with db.read() as session:
        row = await find_job(session, job)
        found = await checkpoints.find(session, row, checkpoint)
        begun = await lineages_of(session, job)
        here = Ancestry(begun, row.lineage)
        lineages = {one.lineage: here.as_row(one) for one in begun}
        return CheckpointDetail(
            checkpoint=as_row(found, here, ranks=MOST_RANK_SPANS),
            lineage=_descent(lineages, found.lineage),
            begun_here=[one for one in lineages.values() if one.parent == found.id],
            orders=await restore_orders.order_rows(session, job, checkpoint=found.id, limit=MAX_ORDERS),
            before=await _neighbour(session, found, here, later=False),
            after=await _neighbour(session, found, here, later=True),
            edit=await _edit(session, found),
            verification=await verifications.find(session, job, found.id),
        )


def _descent(lineages: dict[int, LineageInfo], number: int) -> list[LineageInfo]:
    found: list[LineageInfo] = []
    while (row := lineages.get(number)) is not None and row not in found:
        found.append(row)
        number = parse_checkpoint_id(row.parent)[1] if row.parent else 0
    return found


async def _neighbour(
    session: AsyncSession, point: models.CheckpointRecord, here: Ancestry, *, later: bool
) -> CheckpointInfo | None:
    rows = models.CheckpointRecord
    query = select(rows).where(rows.job == point.job, rows.lineage == point.lineage, rows.state == DURABLE)
    if later:
        query = query.where(rows.iteration > point.iteration).order_by(rows.iteration)
    else:
        query = query.where(rows.iteration < point.iteration).order_by(rows.iteration.desc())
    found = (await session.scalars(query.limit(1))).first()
    return None if found is None else as_row(found, here)


async def _edit(session: AsyncSession, point: models.CheckpointRecord) -> Edit | None:
    """Find the edit that applied to a checkpoint, by time: checkpoints have no version."""
    versions = models.SettingsVersionRecord
    query = (
        select(versions)
        .where(versions.job == point.job, versions.who != desired_state.AGENT)
        .where(versions.applied_at <= (point.snapshot_started_at or point.at))
        .order_by(versions.version.desc())
        .limit(1)
    )
    found = (await session.scalars(query)).first()
    return None if found is None else desired_state.as_edit(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineQuery:
    """Parameters of a timeline."""

    start: float | None = None
    """First iteration, or time; `None`: the start of the job."""
    end: float | None = None
    """Last iteration, or time; `None`: the current position."""
    axis: Axis = "iteration"
    points: int = 1200
    """Most points of a series."""
    metrics: Sequence[str] | None = None
    """Names of the metrics, `None` for all; unknown names are ignored."""
    marks: int = MAX_MARKS
    """About the most checkpoints, stalls and decisions that are returned one by one."""
    checkpoints: int | None = None
    """Most checkpoints that are all returned one by one, where that is not `marks`."""
    digits: int | None = None
    """Significant digits of the values; `None`: all."""
    machine_rank: int | None = None
    """Rank whose machine is included; `None` for none."""


async def timeline(
    db: Database, job: str, asked: TimelineQuery | None = None, *, now: float | None = None
) -> Timeline:
    asked = TimelineQuery() if asked is None else asked
    now = time.time() if now is None else now
    axis = asked.axis
    async with db.read() as session:
        found = await find_job(session, job)
        begun = await lineages_of(session, job)
        ancestry = Ancestry(begun, found.lineage)
        all_series = await reading.series_of(session, job)
        starts = await _starts(session, job)
        attempts = [as_view(AttemptInfo, row) for row in starts]
        extent, times = _extent(begun, all_series), await _times(session, job, all_series, starts)
        first, last = _bounds(times if axis == "time" else extent, asked.start, asked.end)
        reach = TimelineWindow(
            axis, first, last, max(2, min(asked.points, MAX_POINTS)), min(asked.marks, MAX_MARKS), asked.digits
        )
        plans = await _plans(session, found, all_series, attempts, reach)
        contents = await reading.contents(session, job, [read for plan in plans for read in plan.segments])
        machine = await _machine(session, found, attempts, reach, asked.machine_rank)
        total, stalled = await timeline_annotations.totals(session, job, reach)
        many = total > (min(asked.checkpoints or 0, MAX_CHECKPOINTS) or reach.marks)
        rows, density = await _checkpoints(session, found, reach, total, many=many)
        many_stalls = stalled > reach.marks
        shown_ranks = MAX_RANKS if total <= MAX_CHECKPOINTS_WITH_RANKS else 0
        answer = Timeline(
            job=job,
            lineage=found.lineage,
            extent=extent,
            window=(int(first), int(last)) if extent and axis == "iteration" else None,
            times=times,
            time_window=(first, last) if extent and axis == "time" else None,
            silent_since=await _silent_since(session, found, starts, now=now),
            now=now,
            metrics=list(dict.fromkeys(name for one in all_series for name in names_of(one.metrics))),
            lineages=[ancestry.as_row(one) for one in begun],
            checkpoints=[as_row(row, ancestry, ranks=shown_ranks) for row in rows],
            checkpoints_total=total,
            checkpoint_density=density,
            stalls=await timeline_annotations.stalls(session, job, reach, ancestry) if stalled else [],
            stalls_total=stalled,
            stall_density=await timeline_annotations.stall_density(session, job, reach) if many_stalls else [],
            attempts=attempts,
            edits=await desired_state.edit_rows(session, job, limit=MAX_ROWS),
            orders=await restore_orders.order_rows(session, job, limit=MAX_ROWS),
            paced=await timeline_annotations.paced(session, job, reach, ancestry),
            gaps=await timeline_annotations.gaps(session, job, reach),
            annotations=await timeline_annotations.annotation_rows(session, job, reach, ancestry),
            troubles=await timeline_annotations.troubles(session, job, reach, ancestry),
        )
    drawn = {"metrics": asked.metrics, "digits": asked.digits, "times": answer.time_window}
    # Off the event loop: a window may have many thousands of numbers.
    return await asyncio.to_thread(_with_series, answer, plans, contents, machine, reach.points, drawn)


def _with_series(
    answer: Timeline, plans: list[read_plan.PlannedRead], contents: series.TimelineData,
    machine: _MachineData | None, points: int, drawn: dict[str, Any],
) -> Timeline:  # fmt: skip
    """Return a timeline with the series of what was read."""
    made = _series(plans, contents, points, drawn)
    stands = {row.lineage: row.stands_until for row in answer.lineages}
    found_series = [
        msgspec.structs.replace(one, stands_until=-1 if one.lost else stands.get(one.lineage, -1))
        for one, _ in made
    ]
    return msgspec.structs.replace(
        answer,
        series=found_series,
        bucketed=any(coarse for _, coarse in made),
        machine=None if machine is None else _machine_timeline(machine, points, drawn | {"metrics": None}, stands),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSeries:
    """The samples of a job in a window, without annotations."""

    lineage: int
    """Current lineage."""
    times: tuple[float, float] | None
    """Start of the job and end of its newest known iteration, in seconds since the epoch."""
    metrics: list[str]
    """Names of all its metrics."""
    lineages: list[LineageInfo]
    series: list[Series]


async def job_series(session: AsyncSession, job: models.JobRecord, asked: TimelineQuery) -> JobSeries:
    """Return the samples of a job as its timeline has them."""
    begun = await lineages_of(session, job.name)
    all_series = await reading.series_of(session, job.name)
    starts = await _starts(session, job.name)
    extent, times = _extent(begun, all_series), await _times(session, job.name, all_series, starts)
    first, last = _bounds(times if asked.axis == "time" else extent, asked.start, asked.end)
    reach = TimelineWindow(asked.axis, first, last, asked.points, asked.marks, asked.digits)
    plans = await _plans(session, job, all_series, [as_view(AttemptInfo, row) for row in starts], reach)
    contents = await reading.contents(session, job.name, [read for plan in plans for read in plan.segments])
    drawn = {"metrics": asked.metrics, "digits": asked.digits, "times": (first, last)}
    if asked.axis == "iteration":
        drawn["times"] = None
    made = await asyncio.to_thread(_series, plans, contents, reach.points, drawn)
    ancestry = Ancestry(begun, job.lineage)
    lineages = [ancestry.as_row(one) for one in begun]
    stands = {row.lineage: row.stands_until for row in lineages}
    return JobSeries(
        lineage=job.lineage,
        times=times,
        metrics=list(dict.fromkeys(name for one in all_series for name in names_of(one.metrics))),
        lineages=lineages,
        series=[
            msgspec.structs.replace(one, stands_until=-1 if one.lost else stands.get(one.lineage, -1))
            for one, _ in made
        ],
    )


async def _checkpoints(
    session: AsyncSession, job: models.JobRecord, reach: TimelineWindow, total: int, *, many: bool
) -> tuple[Sequence[models.CheckpointRecord], CheckpointDensity | None]:
    """Return the checkpoints of the window one by one, or, of too many, a selection and their density."""
    if not total:
        return [], None
    rows = await timeline_annotations.checkpoints(session, job.name, reach, selected=many, lineage=job.lineage)
    return rows, await timeline_annotations.checkpoint_density(session, job.name, reach) if many else None


def _bounds(extent: tuple[float, float] | None, start: float | None, end: float | None) -> tuple[float, float]:
    first, last = extent or (0, 0)
    return (first if start is None else start), (last if end is None else end)


def _extent(
    begun: Sequence[models.LineageRecord], all_series: Sequence[models.SampleSeriesRecord]
) -> tuple[int, int] | None:
    if not all_series or not begun:
        return None
    return min(one.first_iteration for one in all_series), max(one.last_iteration for one in begun)


async def _times(
    session: AsyncSession,
    job: str,
    all_series: Sequence[models.SampleSeriesRecord],
    starts: Sequence[models.AttemptRecord],
) -> tuple[float, float] | None:
    if not starts or not all_series:
        return None
    began = min(one.started_at for one in starts)
    if len(starts) == MAX_ROWS:  # there may be earlier ones
        rows = models.AttemptRecord
        began = await session.scalar(select(func.min(rows.started_at)).where(rows.job == job)) or began
    return began, max(began, *(one.last_at for one in all_series))


async def _silent_since(
    session: AsyncSession, job: models.JobRecord, starts: Sequence[models.AttemptRecord], *, now: float
) -> float | None:
    attempt = next((one for one in starts if one.uid == job.uid), None)
    if attempt is None:
        attempt = await session.get(models.AttemptRecord, (job.name, job.uid))
    return job.last_contact_at if status_of(job, attempt, now=now).status == "silent" else None


async def _plans(
    session: AsyncSession,
    job: models.JobRecord,
    all_series: Sequence[models.SampleSeriesRecord],
    attempts: Sequence[AttemptInfo],
    reach: TimelineWindow,
) -> list[read_plan.PlannedRead]:
    own = (one.last_iteration for one in all_series if (one.lineage, one.uid) == (job.lineage, job.uid))
    # Iterations of its lineage beyond the current attempt's position were lost with an earlier attempt.
    reached = max([job.iteration, *own])
    if reach.axis == "iteration":
        window = read_plan.IterationWindow(int(reach.first), int(reach.last), reach.points)
        found = read_plan.lines(all_series, window, uid=job.uid, lineage=job.lineage, reached=reached)
        return [read_plan.plan(line, reach.points) for line in found]
    began = {one.attempt: one.started_at for one in attempts}
    cuts = {}
    for one in all_series:
        since = began.get(one.attempt, reach.first)
        cut = await reading.iterations_between(session, one, reach.first, reach.last, began=since)
        if cut is not None:
            cuts[one.id] = cut
    found = read_plan.lines_in_time(all_series, cuts, uid=job.uid, lineage=job.lineage, reached=reached)
    # In time the lines are side by side, and share the points.
    rows = sum(line.rows for line in found)
    return [read_plan.plan(line, max(2, round(reach.points * line.rows / rows))) for line in found]


def _series(
    plans: Sequence[read_plan.PlannedRead], contents: series.TimelineData, points: int, drawn: Mapping[str, Any]
) -> list[tuple[Series, bool]]:
    made = (series.series(plan, contents, points, **drawn) for plan in plans)
    return [one for one in made if one is not None]


@dataclass(frozen=True, slots=True)
class _MachineData:
    """What was read of the machine of a rank."""

    rank: int
    ranks: list[int]
    plans: list[read_plan.PlannedRead]
    contents: series.TimelineData


async def _machine(
    session: AsyncSession, job: models.JobRecord, attempts: Sequence[AttemptInfo], reach: TimelineWindow,
    rank: int | None,
) -> _MachineData | None:  # fmt: skip
    if rank is None:
        return None
    stored = MACHINE_RANK + rank
    plans = await _plans(session, job, await reading.series_of(session, job.name, stored), attempts, reach)
    reads = [read for plan in plans for read in plan.segments]
    contents = await reading.contents(session, job.name, reads, stored)
    return _MachineData(rank, await reading.machine_ranks(session, job.name), plans, contents)


def _machine_timeline(
    machine: _MachineData, points: int, drawn: Mapping[str, Any], stands: Mapping[int, int]
) -> MachineTimeline:
    return MachineTimeline(
        rank=machine.rank,
        ranks=machine.ranks,
        series=[
            MachineSeries(
                lineage=one.lineage,
                stands_until=-1 if one.lost else stands.get(one.lineage, -1),
                iteration=one.iteration,
                at=one.at,
                metrics=one.metrics,
            )
            for one, _ in _series(machine.plans, machine.contents, points, drawn)
        ],
    )


async def _starts(session: AsyncSession, job: str) -> list[models.AttemptRecord]:
    """Return the newest attempts, oldest first."""
    return list(reversed((await session.scalars(_of_starts(MAX_ROWS), {"job": job})).all()))


@cache
def _of_starts(most: int) -> Select[models.AttemptRecord]:
    rows = models.AttemptRecord
    return select(rows).where(rows.job == bindparam("job")).order_by(rows.attempt.desc()).limit(most)
