"""Queries for a job's timeline, checkpoints, orders, edits and notices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
from sqlalchemy import and_, bindparam, func, select, tuple_
from sqlalchemy.orm import Session

from holdfast.protocol.analyses import CheckpointDetail
from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.protocol.jobs import CheckpointInfo, Edit, NoticeInfo, Order
from holdfast.protocol.timeline import (
    AttemptInfo,
    CheckpointDensity,
    LastGoodInfo,
    LineageInfo,
    MachineSeries,
    MachineTimeline,
    Series,
    Timeline,
)
from holdfast.protocol.wire import MOST_RANK_SPANS
from holdfast_server import models
from holdfast_server.core.encoding import answer_from, round_row
from holdfast_server.core.errors import InvalidSetting
from holdfast_server.db import Database
from holdfast_server.queries import timeline_annotations
from holdfast_server.queries.job_view import JobView, find_job
from holdfast_server.queries.timeline_annotations import Axis, TimelineWindow
from holdfast_server.records import checkpoints, desired_state, last_good, restore_orders, verifications
from holdfast_server.records.ancestry import Ancestry, lineages_of
from holdfast_server.records.checkpoints import DURABLE, IN_STORE, as_row, taken_at
from holdfast_server.records.job_status import status_of
from holdfast_server.samples import read_plan, reading, series
from holdfast_server.samples.limits import MACHINE_RANK
from holdfast_server.samples.sample_series import names_of

MAX_POINTS = 2000
MAX_MARKS, MAX_CHECKPOINTS = 500, 1000
"""Most stalls and decisions, and most checkpoints, that a window returns one by one; of more, a selection. It has
all durable checkpoints if they are not more."""
MAX_RANKS, MAX_CHECKPOINTS_WITH_RANKS = 8, 60
"""Ranks whose times a checkpoint shows, the slowest, in a window of at most so many checkpoints."""
MAX_ROWS = 200
MAX_ORDERS = 20
"""Restore orders that the detail of a checkpoint shows."""
_ROUNDED_ROWS = ("lineages", "checkpoints", "stalls", "attempts", "paced")
"""Rows of a timeline of which there may be hundreds."""

_attempts = models.AttemptRecord
_STARTS = (
    select(_attempts).where(_attempts.job == bindparam("job")).order_by(_attempts.attempt.desc()).limit(MAX_ROWS)
)


def restore_points(
    view: JobView, *, limit: int = 50, before: str | None = None, in_store: bool = False
) -> list[CheckpointInfo]:
    """List the checkpoints of all lineages and states, the last taken first.

    `in_store`: only those that are in the store, even damaged, or being written to it. `before`: the last id of
    the previous page. Raises InvalidSetting: there is no checkpoint `before`.
    """
    rows, checks, session, job = models.CheckpointRecord, models.VerificationRecord, view.session, view.name
    order = (taken_at(), rows.iteration, rows.lineage)
    query = (
        select(rows, checks.verdict, checks.verified_at)
        .outerjoin(checks, and_(checks.job == rows.job, checks.checkpoint == rows.id))
        .where(rows.job == job)
        .order_by(*(part.desc() for part in order))
    )
    if in_store:
        query = query.where(rows.state.in_(IN_STORE))
    if before is not None:
        last = session.execute(select(*order).where(rows.job == job, rows.id == before)).first()
        if last is None:
            raise InvalidSetting("before", f"no checkpoint {before!r}: give the last id of the previous page")
        query = query.where(tuple_(*order) < tuple_(*last))
    ancestry = view.ancestry()
    return [
        as_row(row, ancestry, changed=True, verdict=verdict, verified_at=verified_at, metrics=True)
        for row, verdict, verified_at in session.execute(query.limit(min(limit, MAX_MARKS)))
    ]


def orders(view: JobView, *, limit: int = 20) -> list[Order]:
    return restore_orders.order_rows(
        view.session, view.name, limit=min(limit, MAX_ROWS), current={view.name: view.attempt}
    )


def order(view: JobView, order: str) -> Order:
    """Raises UnknownOrder."""
    return restore_orders.find(view.session, view.name, order)


def edits(view: JobView, *, limit: int = 20) -> list[Edit]:
    return desired_state.edit_rows(view.session, view.name, limit=min(limit, MAX_ROWS))


def notices(view: JobView, *, limit: int = 20) -> list[NoticeInfo]:
    rows = models.NoticeRecord
    query = select(rows).where(rows.job == view.name).order_by(rows.id.desc()).limit(min(limit, MAX_ROWS))
    return [answer_from(row, NoticeInfo) for row in view.session.scalars(query)]


def story(view: JobView, checkpoint: str) -> CheckpointDetail:
    """Return the detail of a checkpoint. Raises CheckpointNotFound and InvalidSetting."""
    session, job = view.session, view.name
    found = checkpoints.find(session, view.job, checkpoint)
    begun = lineages_of(session, job)
    here = Ancestry(begun, view.job.lineage)
    lineages = {one.lineage: here.as_row(one) for one in begun}
    return CheckpointDetail(
        checkpoint=as_row(found, here, ranks=MOST_RANK_SPANS, changed=True),
        lineage=_descent(lineages, found.lineage),
        begun_here=[one for one in lineages.values() if one.parent == found.id],
        orders=restore_orders.order_rows(session, job, checkpoint=found.id, limit=MAX_ORDERS),
        before=_neighbour(session, found, here, later=False),
        after=_neighbour(session, found, here, later=True),
        edit=_edit(session, found),
        verification=verifications.find(session, job, found.id),
    )


def _descent(lineages: dict[int, LineageInfo], number: int) -> list[LineageInfo]:
    found: list[LineageInfo] = []
    while (row := lineages.get(number)) is not None and row not in found:
        found.append(row)
        number = parse_checkpoint_id(row.parent)[1] if row.parent else 0
    return found


def _neighbour(
    session: Session, point: models.CheckpointRecord, here: Ancestry, *, later: bool
) -> CheckpointInfo | None:
    rows = models.CheckpointRecord
    query = select(rows).where(rows.job == point.job, rows.lineage == point.lineage, rows.state == DURABLE)
    if later:
        query = query.where(rows.iteration > point.iteration).order_by(rows.iteration)
    else:
        query = query.where(rows.iteration < point.iteration).order_by(rows.iteration.desc())
    found = session.scalars(query.limit(1)).first()
    return None if found is None else as_row(found, here)


def _is_of_value(edit: Edit) -> bool:
    """Return whether an edit changed values, which the timeline marks with annotations where they are applied."""
    return all(change.field.startswith("value ") for change in edit.changes)


def _edit(session: Session, point: models.CheckpointRecord) -> Edit | None:
    """Find the edit that applied to a checkpoint, by time: checkpoints have no version."""
    versions = models.SettingsVersionRecord
    query = (
        select(versions)
        .where(versions.job == point.job, versions.who != desired_state.AGENT)
        .where(versions.applied_at <= (point.snapshot_started_at or point.at))
        .order_by(versions.version.desc())
        .limit(1)
    )
    found = session.scalars(query).first()
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
    """Most checkpoints, or of more, most durable ones, that are all returned one by one; by default, `marks`."""
    digits: int | None = None
    """Significant digits of series, lineages, checkpoints, stalls, attempts and decisions, whose times then are in
    milliseconds; `None`: all."""
    machine_rank: int | None = None
    """Rank whose machine is included; `None` for none."""


def timeline(db: Database, job: str, asked: TimelineQuery | None = None, *, now: float | None = None) -> Timeline:
    asked = TimelineQuery() if asked is None else asked
    now = time.time() if now is None else now
    with db.read() as session:
        found = find_job(session, job)
        read = read_series(session, found, asked)
        reach, extent, ancestry = read.reach, read.extent, read.ancestry
        rank = asked.machine_rank
        machine = None if rank is None else _read_machine(session, found, read, rank)
        ranks = [] if rank is None else reading.machine_ranks(session, job)
        total, stalled = timeline_annotations.totals(session, job, reach)
        most = min(asked.checkpoints or 0, MAX_CHECKPOINTS) or reach.marks
        rows, density = _checkpoints(session, found, reach, total, most=most)
        many_stalls = stalled > reach.marks
        shown_ranks = MAX_RANKS if total <= MAX_CHECKPOINTS_WITH_RANKS else 0
        answer = Timeline(
            job=job,
            lineage=found.lineage,
            extent=extent,
            window=(int(reach.first), int(reach.last)) if extent and reach.axis == "iteration" else None,
            times=read.times,
            time_window=(reach.first, reach.last) if extent and reach.axis == "time" else None,
            silent_since=_silent_since(session, found, read.starts, now=now),
            now=now,
            metrics=read.metrics,
            lineages=read.lineages,
            checkpoints=[as_row(row, ancestry, ranks=shown_ranks) for row in rows],
            checkpoints_total=total,
            checkpoint_density=density,
            stalls=timeline_annotations.stalls(session, job, reach, ancestry) if stalled else [],
            stalls_total=stalled,
            stall_density=timeline_annotations.stall_density(session, job, reach) if many_stalls else [],
            attempts=[answer_from(row, AttemptInfo) for row in read.starts],
            edits=[
                edit for edit in desired_state.edit_rows(session, job, limit=MAX_ROWS) if not _is_of_value(edit)
            ],
            orders=restore_orders.order_rows(session, job, limit=MAX_ROWS),
            paced=timeline_annotations.paced(session, job, reach, ancestry),
            gaps=timeline_annotations.gaps(session, job, reach),
            annotations=timeline_annotations.annotation_rows(session, job, reach, ancestry),
            troubles=timeline_annotations.troubles(session, job, reach, ancestry),
            pauses=timeline_annotations.pauses(session, job, reach, ancestry),
            last_good=_last_good(session, found, ancestry),
        )
    if asked.digits is not None:
        answer = _rounded(answer, asked.digits)
    drawn, bucketed = read.draw(asked)
    answer = msgspec.structs.replace(answer, series=drawn, bucketed=bucketed)
    if rank is None or machine is None:
        return answer
    return msgspec.structs.replace(answer, machine=_draw_machine(machine, asked, rank, ranks))


def _last_good(session: Session, job: models.JobRecord, path: Ancestry) -> LastGoodInfo | None:
    found = last_good.find(session, job, path)
    if found is None:
        return None
    checkpoint = None if found.checkpoint is None else found.checkpoint.id
    return LastGoodInfo(iteration=found.iteration, reason=found.reason, checkpoint=checkpoint)


def _rounded(answer: Timeline, digits: int) -> Timeline:
    rows = {name: [round_row(row, digits) for row in getattr(answer, name)] for name in _ROUNDED_ROWS}
    return msgspec.structs.replace(answer, **rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSeries:
    """The samples of a job in a window, as they were read."""

    reach: TimelineWindow
    extent: tuple[int, int] | None
    times: tuple[float, float] | None
    """Start of the job and end of its newest known iteration, in seconds since the epoch."""
    metrics: list[str]
    """Names of all its metrics."""
    ancestry: Ancestry
    lineages: list[LineageInfo]
    starts: list[models.AttemptRecord]
    plans: list[read_plan.PlannedRead]
    contents: series.TimelineData

    def draw(self, asked: TimelineQuery) -> tuple[list[Series], bool]:
        """Return the curves, and whether some points stand for several iterations."""
        # Off the event loop: a window may have many thousands of numbers.
        made = self._drawn(asked)
        stands = {row.lineage: row.stands_until for row in self.lineages}
        curves = [
            msgspec.structs.replace(one, stands_until=-1 if one.lost else stands.get(one.lineage, -1))
            for one, _ in made
        ]
        return curves, any(coarse for _, coarse in made)

    def _drawn(self, asked: TimelineQuery) -> list[tuple[Series, bool]]:
        times = (self.reach.first, self.reach.last) if self.reach.axis == "time" else None
        made = (
            series.series(
                plan, self.contents, self.reach.points, metrics=asked.metrics, digits=asked.digits, times=times
            )
            for plan in self.plans
        )
        return [one for one in made if one is not None]


def read_series(session: Session, job: models.JobRecord, asked: TimelineQuery) -> JobSeries:
    """Read the samples of a job in a window."""
    begun = lineages_of(session, job.name)
    all_series = reading.series_of(session, job.name)
    starts = _starts(session, job.name)
    extent, times = _extent(begun, all_series), _times(session, job.name, all_series, starts)
    first, last = _bounds(times if asked.axis == "time" else extent, asked.start, asked.end)
    reach = TimelineWindow(
        asked.axis, first, last, max(2, min(asked.points, MAX_POINTS)), min(asked.marks, MAX_MARKS), asked.digits
    )
    plans = _plans(session, job, all_series, starts, reach)
    ancestry = Ancestry(begun, job.lineage)
    return JobSeries(
        reach=reach,
        extent=extent,
        times=times,
        metrics=list(dict.fromkeys(name for one in all_series for name in names_of(one.metrics))),
        ancestry=ancestry,
        lineages=[ancestry.as_row(one) for one in begun],
        starts=starts,
        plans=plans,
        contents=reading.contents(session, job.name, [read for plan in plans for read in plan.segments]),
    )


def _read_machine(session: Session, job: models.JobRecord, read: JobSeries, rank: int) -> JobSeries:
    """Read what was measured of the machine of a rank in the same window."""
    stored = MACHINE_RANK + rank
    plans = _plans(session, job, reading.series_of(session, job.name, stored), read.starts, read.reach)
    reads = [segment for plan in plans for segment in plan.segments]
    return replace(read, plans=plans, contents=reading.contents(session, job.name, reads, stored))


def _draw_machine(machine: JobSeries, asked: TimelineQuery, rank: int, ranks: list[int]) -> MachineTimeline:
    curves, _ = machine.draw(replace(asked, metrics=None))
    lines = [answer_from(one, MachineSeries) for one in curves]
    return MachineTimeline(rank=rank, ranks=ranks, series=lines)


def _checkpoints(
    session: Session, job: models.JobRecord, reach: TimelineWindow, total: int, *, most: int
) -> tuple[Sequence[models.CheckpointRecord], CheckpointDensity | None]:
    """Return the checkpoints of the window one by one, or, of more than `most`, a selection and their density."""
    if not total:
        return [], None
    if total <= most:
        return timeline_annotations.checkpoints(session, job.name, reach), None
    density = timeline_annotations.checkpoint_density(session, job.name, reach)
    rows = timeline_annotations.some_checkpoints(
        session, job.name, reach, lineage=job.lineage, every_durable=sum(density.durable) <= most
    )
    return rows, density


def _bounds(extent: tuple[float, float] | None, start: float | None, end: float | None) -> tuple[float, float]:
    first, last = extent or (0, 0)
    return (first if start is None else start), (last if end is None else end)


def _extent(
    begun: Sequence[models.LineageRecord], all_series: Sequence[models.SampleSeriesRecord]
) -> tuple[int, int] | None:
    if not all_series or not begun:
        return None
    return min(one.first_iteration for one in all_series), max(one.last_iteration for one in begun)


def _times(
    session: Session,
    job: str,
    all_series: Sequence[models.SampleSeriesRecord],
    starts: Sequence[models.AttemptRecord],
) -> tuple[float, float] | None:
    if not starts or not all_series:
        return None
    began = min(one.started_at for one in starts)
    if len(starts) == MAX_ROWS:  # there may be earlier ones
        rows = models.AttemptRecord
        began = session.scalar(select(func.min(rows.started_at)).where(rows.job == job)) or began
    return began, max(began, *(one.last_at for one in all_series))


def _silent_since(
    session: Session, job: models.JobRecord, starts: Sequence[models.AttemptRecord], *, now: float
) -> float | None:
    attempt = next((one for one in starts if one.uid == job.uid), None)
    if attempt is None:
        attempt = session.get(models.AttemptRecord, (job.name, job.uid))
    return job.last_contact_at if status_of(job, attempt, now=now).status == "silent" else None


def iteration_plans(
    job: models.JobRecord, all_series: Sequence[models.SampleSeriesRecord], first: int, last: int, points: int
) -> list[read_plan.PlannedRead]:
    """Plan to read some iterations of a job, in at most so many points per lineage."""
    window, reached = read_plan.IterationWindow(first, last, points), _reached(job, all_series)
    found = read_plan.lines(all_series, window, uid=job.uid, lineage=job.lineage, reached=reached)
    return [read_plan.plan(line, points) for line in found]


def _reached(job: models.JobRecord, all_series: Sequence[models.SampleSeriesRecord]) -> int:
    """Return the last iteration of the current attempt; an earlier attempt lost later ones of its lineage."""
    own = (one.last_iteration for one in all_series if (one.lineage, one.uid) == (job.lineage, job.uid))
    return max([job.iteration, *own])


def _plans(
    session: Session,
    job: models.JobRecord,
    all_series: Sequence[models.SampleSeriesRecord],
    attempts: Sequence[models.AttemptRecord],
    reach: TimelineWindow,
) -> list[read_plan.PlannedRead]:
    if reach.axis == "iteration":
        return iteration_plans(job, all_series, int(reach.first), int(reach.last), reach.points)
    began = {one.attempt: one.started_at for one in attempts}
    cuts = {}
    for one in all_series:
        since = began.get(one.attempt, reach.first)
        cut = reading.iterations_between(session, one, reach.first, reach.last, began=since)
        if cut is not None:
            cuts[one.id] = cut
    reached = _reached(job, all_series)
    found = read_plan.lines_in_time(all_series, cuts, uid=job.uid, lineage=job.lineage, reached=reached)
    # In time the lines are side by side, and share the points.
    rows = sum(line.rows for line in found)
    return [read_plan.plan(line, max(2, round(reach.points * line.rows / rows))) for line in found]


def _starts(session: Session, job: str) -> list[models.AttemptRecord]:
    """Return the newest attempts, oldest first."""
    return list(reversed(session.scalars(_STARTS, {"job": job}).all()))
