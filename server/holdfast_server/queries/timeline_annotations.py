"""Annotations of a timeline: checkpoints, stalls, interval decisions and gaps, or their density."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from sqlalchemy import BigInteger, ColumnElement, Integer, Select, bindparam, case, cast, func, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from holdfast.protocol.jobs import Annotation
from holdfast.protocol.timeline import (
    CheckpointDensity,
    IntervalInfo,
    PauseInfo,
    SampleGapInfo,
    StallDensity,
    StallInfo,
    TroubleInfo,
)
from holdfast.protocol.wire import StallKind
from holdfast_server import models
from holdfast_server.core.encoding import answer_from
from holdfast_server.records.ancestry import END, Ancestry
from holdfast_server.records.checkpoints import DURABLE, taken_at

Axis = Literal["iteration", "time"]
Moment = ColumnElement[float] | InstrumentedAttribute[float]

BAR_PX = 3
"""Smallest useful width of a bar."""
FAILED = ("failed", "torn", "damaged")
_TELLING = (*FAILED, "snapshot", "persisting")
"""States of checkpoints that are shown one by one, if possible, even where others are dense."""
_MS = 1000


@dataclass(frozen=True, slots=True)
class TimelineWindow:
    """A window of a timeline: iterations, or seconds since the epoch, both ends inclusive."""

    axis: Axis
    first: float
    last: float
    points: int
    """Resolution of the window in pixels."""
    marks: int
    """Most rows of a kind that are shown one by one."""
    digits: int | None = None
    """Significant digits of the values in density columns; `None`: all."""

    def values(self, job: str) -> dict[str, Any]:
        """Return the parameters of queries; see `_held`."""
        ends = (self.first, self.last) if self.axis == "time" else (int(self.first), int(self.last))
        return {"job": job, "first": ends[0], "last": ends[1], "most": self.marks}

    @property
    def bar(self) -> float:
        """Return the width of one density bar, constant while the window grows little."""
        bars = max(1, self.points // BAR_PX)
        if self.axis == "time":
            return max(1, -(-int((self.last - self.first) * _MS) // bars)) / _MS
        return float(1 << max(0, -(-int(self.last - self.first + 1) // bars) - 1).bit_length())

    def bucket(self, iteration: InstrumentedAttribute[int], at: Moment) -> ColumnElement[int]:
        """Return the number of a row's bar, by integer division, which is alike in all databases."""
        if self.axis == "time":
            return cast((at - self.first) * _MS, BigInteger) // round(self.bar * _MS)
        return iteration // int(self.bar)

    def start(self, bucket: int) -> float:
        return round(bucket * self.bar + self.first, 3) if self.axis == "time" else int(bucket * self.bar)

    def figure(self, value: float | None) -> float:
        return float(f"{value or 0.0:.{self.digits or 17}g}")


def totals(session: Session, job: str, reach: TimelineWindow) -> tuple[int, int]:
    """Count the checkpoints and stalls in the window."""
    checkpoints, stalls = session.execute(_of_totals(reach.axis), reach.values(job)).one()
    return checkpoints, stalls


@cache
def _of_totals(axis: Axis) -> Select[int, int]:
    checkpoints = select(func.count()).where(*_held(axis, models.CheckpointRecord, taken_at()))
    stalls = select(func.count()).where(*_held(axis, models.StallRecord))
    return select(checkpoints.scalar_subquery(), stalls.scalar_subquery())


def _held(axis: Axis, rows: Any, at: Moment | None = None) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions for the rows of a job in a window, with job and ends as bound parameters."""
    place: Any = rows.iteration if axis == "iteration" else rows.at if at is None else at
    return rows.job == bindparam("job"), place >= bindparam("first"), place <= bindparam("last")


def checkpoints(session: Session, job: str, reach: TimelineWindow) -> Sequence[models.CheckpointRecord]:
    """Return the checkpoints in the window."""
    rows = models.CheckpointRecord
    query = select(rows).where(*_held(reach.axis, rows, taken_at())).order_by(rows.iteration, rows.lineage)
    return session.scalars(query, reach.values(job)).all()


def some_checkpoints(
    session: Session, job: str, reach: TimelineWindow, *, lineage: int, every_durable: bool
) -> Sequence[models.CheckpointRecord]:
    """Return a selection of the checkpoints in the window.

    The selection has the newest checkpoint and the newest durable one of each bar and lineage; those that are
    pinned, labeled or in an unusual state; and all durable ones, or the newest of the current `lineage`.
    """
    rows, values = models.CheckpointRecord, reach.values(job)
    within = _held(reach.axis, rows, taken_at())
    # Ids begin with the iteration, so the largest id of a bar is its newest checkpoint.
    bar = replace(reach, points=reach.marks * BAR_PX).bucket(rows.iteration, taken_at()).label("bar")
    is_durable = case((rows.state == DURABLE, 1), else_=0).label("is_durable")
    chosen = select(bar, rows.lineage, is_durable, func.max(rows.id).label("id")).where(*within)
    newest = chosen.group_by(bar, rows.lineage, is_durable).subquery()
    standing = case((newest.c.lineage == lineage, 0), else_=1)
    some = select(rows).join(newest, newest.c.id == rows.id).where(rows.job == job)
    some = some.order_by(newest.c.is_durable.desc(), standing, rows.iteration.desc()).limit(2 * reach.marks)
    durable = select(rows).where(*within, rows.state == DURABLE)
    if not every_durable:
        durable = durable.where(rows.lineage == lineage).order_by(rows.iteration.desc()).limit(1)
    kept = or_(rows.pinned_at.is_not(None), rows.label.is_not(None), rows.kind == "safety")
    odd = select(rows).where(*within, or_(kept, rows.state.in_(_TELLING)))
    odd = odd.order_by(case((kept, 0), else_=1), rows.iteration.desc()).limit(reach.marks // 2)
    found = {row.id: row for query in (some, odd, durable) for row in session.scalars(query, values)}
    return sorted(found.values(), key=lambda row: (row.iteration, row.lineage))


def checkpoint_density(session: Session, job: str, reach: TimelineWindow) -> CheckpointDensity:
    rows = models.CheckpointRecord
    bucket = reach.bucket(rows.iteration, taken_at()).label("bucket")
    query = (
        select(
            bucket,
            func.count(),
            _count(rows.state == DURABLE),
            _count(rows.state.in_(FAILED)),
            func.max(rows.snapshot_seconds),
            func.max(rows.persist_seconds),
        )
        .where(*_held(reach.axis, rows, taken_at()))
        .group_by(bucket)
        .order_by(bucket)
    )
    found = session.execute(query, reach.values(job))
    columns: list[list[Any]] = [list(column) for column in zip(*found, strict=True)]
    starts, count, durable, failed, snapshot, persist = columns
    return CheckpointDensity(
        width=reach.bar,
        start=[reach.start(bucket) for bucket in starts],
        count=count,
        durable=durable,
        failed=failed,
        snapshot_seconds=[*map(reach.figure, snapshot)],
        persist_seconds=[*map(reach.figure, persist)],
    )


def stalls(session: Session, job: str, reach: TimelineWindow, ancestry: Ancestry) -> list[StallInfo]:
    """Return the longest stalls in the order of their times."""
    rows = models.StallRecord
    query = select(rows).where(*_held(reach.axis, rows)).order_by(rows.seconds.desc()).limit(reach.marks)
    found = [
        answer_from(row, StallInfo, abandoned=(row.iteration, row.lineage) not in ancestry)
        for row in session.scalars(query, reach.values(job))
    ]
    return sorted(found, key=lambda stall: stall.at)


def stall_density(session: Session, job: str, reach: TimelineWindow) -> list[StallDensity]:
    """Return the density of stalls by kind."""
    rows = models.StallRecord
    bucket = reach.bucket(rows.iteration, rows.at).label("bucket")
    query = (
        select(rows.kind, bucket, func.count(), func.sum(rows.seconds), func.max(rows.seconds))
        .where(*_held(reach.axis, rows))
        .group_by(rows.kind, bucket)
        .order_by(rows.kind, bucket)
    )
    made: dict[str, StallDensity] = {}
    for kind, number, count, seconds, longest in session.execute(query, reach.values(job)):
        one = made.setdefault(kind, StallDensity(kind=typing.cast("StallKind", kind), width=reach.bar))
        one.start.append(reach.start(number))
        one.count.append(count)
        one.seconds.append(reach.figure(seconds))
        one.longest_seconds.append(reach.figure(longest))
    return list(made.values())


def paced(session: Session, job: str, reach: TimelineWindow, ancestry: Ancestry) -> list[IntervalInfo]:
    """Return the decisions in the window and the one before; of too many, the changes and every n-th."""
    values = reach.values(job)
    within = session.scalars(_first_paced(reach.axis), {**values, "most": reach.marks + 1}).all()
    if len(within) > reach.marks:
        within = session.scalars(_paced_in(reach.axis, reach.marks), values).all()
    before = session.scalars(_paced_before(reach.axis), values)
    found = (*before, *within)
    stands = _standing(found, ancestry)
    return [answer_from(row, IntervalInfo, stands=row.id in stands) for row in found]


def annotation_rows(session: Session, job: str, reach: TimelineWindow, ancestry: Ancestry) -> list[Annotation]:
    """Return the newest annotations in the window, oldest first."""
    newest = session.scalars(_of_annotations(reach.axis), reach.values(job)).all()
    return [
        answer_from(row, Annotation, abandoned=(row.iteration, row.lineage) not in ancestry)
        for row in reversed(newest)
    ]


@cache
def _of_annotations(axis: Axis) -> Select[models.AnnotationRecord]:
    rows = models.AnnotationRecord
    return select(rows).where(*_held(axis, rows)).order_by(rows.id.desc()).limit(bindparam("most", type_=Integer))


def troubles(session: Session, job: str, reach: TimelineWindow, ancestry: Ancestry) -> list[TroubleInfo]:
    """Return the newest alerts about iterations, oldest first."""
    rows = models.AlertRecord
    query = select(rows).where(rows.job == job, rows.iteration.is_not(None), rows.fired_at.is_not(None))
    newest = session.scalars(query.order_by(rows.id.desc()).limit(reach.marks)).all()
    return [
        answer_from(
            row, TroubleInfo, alert=row.id, at=row.fired_at, lineage=row.lineage or 0,
            abandoned=(row.iteration or 0, row.lineage or 0) not in ancestry,
        )
        for row in reversed(newest)
    ]  # fmt: skip


def pauses(session: Session, job: str, reach: TimelineWindow, ancestry: Ancestry) -> list[PauseInfo]:
    """Return the newest pauses of training, oldest first."""
    rows = models.TrainingPauseRecord
    newest = session.scalars(select(rows).where(rows.job == job).order_by(rows.at.desc()).limit(reach.marks)).all()
    return [
        answer_from(row, PauseInfo, abandoned=(row.iteration, row.lineage) not in ancestry)
        for row in reversed(newest)
    ]


def _standing(rows: Iterable[models.IntervalDecisionRecord], ancestry: Ancestry) -> set[int]:
    """Return the decisions that stand; of repeated iterations the newer ones."""
    found: set[int] = set()
    earliest = END
    for row in sorted(rows, key=lambda row: row.at, reverse=True):
        if (row.iteration, row.lineage) in ancestry and row.iteration < earliest:
            found.add(row.id)
            earliest = row.iteration
    return found


@cache
def _first_paced(axis: Axis) -> Select[models.IntervalDecisionRecord]:
    rows = models.IntervalDecisionRecord
    return select(rows).where(*_held(axis, rows)).order_by(rows.id).limit(bindparam("most", type_=Integer))


@cache
def _paced_before(axis: Axis) -> Select[models.IntervalDecisionRecord]:
    rows = models.IntervalDecisionRecord
    earlier = rows.at < bindparam("first") if axis == "time" else rows.iteration < bindparam("first")
    query = select(rows).where(rows.job == bindparam("job"), earlier)
    return query.order_by(rows.at.desc(), rows.id.desc()).limit(1)


def _paced_in(axis: Axis, marks: int) -> Any:
    rows = models.IntervalDecisionRecord
    order = rows.id
    numbered = (
        select(
            rows.id,
            func.row_number().over(order_by=order.desc()).label("place"),
            func.count().over().label("total"),
            or_(
                rows.interval.is_distinct_from(func.lag(rows.interval).over(order_by=order)),
                rows.interval_seconds.is_distinct_from(func.lag(rows.interval_seconds).over(order_by=order)),
            ).label("paced_anew"),
            rows.budget.is_distinct_from(func.lag(rows.budget).over(order_by=order)).label("budgeted_anew"),
        )
        .where(*_held(axis, rows))
        .subquery()
    )
    c = numbered.c
    chosen = (
        select(
            c.id, func.row_number().over(order_by=c.id.desc()).label("place"), func.count().over().label("total")
        )
        .where(or_(_nth(c, marks), c.paced_anew, c.budgeted_anew))
        .subquery()
    )
    some = select(rows).join(chosen, chosen.c.id == rows.id).where(_nth(chosen.c, 2 * marks))
    return some.order_by(order)


def _nth(columns: Any, most: int) -> ColumnElement[bool]:
    """Return the condition for every n-th row, with at most `most` rows and the newest among them."""
    kept: ColumnElement[bool] = (columns.place - 1) % ((columns.total + most - 1) // most) == 0
    return kept


def gaps(session: Session, job: str, reach: TimelineWindow) -> list[SampleGapInfo]:
    """Return the largest gaps in the order of iterations; in a window of time all gaps, which have no time."""
    found = [answer_from(row, SampleGapInfo) for row in session.scalars(_of_gaps(reach.axis), reach.values(job))]
    return sorted(found, key=lambda gap: (gap.lineage, gap.first_iteration))


@cache
def _of_gaps(axis: Axis) -> Select[models.GapRecord]:
    rows = models.GapRecord
    query = select(rows).where(rows.job == bindparam("job"), rows.rank == 0)
    if axis == "iteration":
        query = query.where(rows.first_iteration <= bindparam("last"), rows.last_iteration >= bindparam("first"))
    return query.order_by(rows.dropped.desc()).limit(bindparam("most", type_=Integer))


def _count(condition: ColumnElement[bool]) -> ColumnElement[int]:
    return func.sum(case((condition, 1), else_=0))
