"""What a timeline draws one by one: checkpoints, stalls, decisions, gaps. Of too many, how dense they lie."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import msgspec
from sqlalchemy import BigInteger, ColumnElement, and_, case, cast, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from holdfast.protocol import StallKind
from holdfast_server import models
from holdfast_server.checkpoints import DURABLE, taken_at
from holdfast_server.views import Density, GapRow, PacedRow, StallDensity, StallRow

Axis = Literal["iteration", "time"]
Moment = ColumnElement[float] | InstrumentedAttribute[float]
View = TypeVar("View", bound=msgspec.Struct)

BAR_PX = 3
"""Narrower than this, a bar says nothing by itself."""
FAILED = ("failed", "torn", "damaged")
_TELLING = (*FAILED, "snapshot", "persisting")
"""States that are drawn one by one, as far as there is room, however dense the others lie."""
_MS = 1000


@dataclass(frozen=True, slots=True)
class Reach:
    """A window of a timeline: iterations, or seconds since the epoch, both ends inclusive."""

    axis: Axis
    first: float
    last: float
    points: int
    """How many of its parts can be told apart: pixels."""
    marks: int
    """Most rows of a kind that are drawn one by one."""
    digits: int | None = None
    """Significant ones of figures that are told by column; None: all."""

    def holds(self, iteration: InstrumentedAttribute[int], at: Moment) -> ColumnElement[bool]:
        if self.axis == "time":
            return and_(at >= self.first, at <= self.last)
        return and_(iteration >= int(self.first), iteration <= int(self.last))

    @property
    def bar(self) -> float:
        """Of what is too dense, the width of one bar; fixed while the window grows by less than it again."""
        bars = max(1, self.points // BAR_PX)
        if self.axis == "time":
            return max(1, -(-int((self.last - self.first) * _MS) // bars)) / _MS
        return float(1 << max(0, -(-int(self.last - self.first + 1) // bars) - 1).bit_length())

    def bucket(self, iteration: InstrumentedAttribute[int], at: Moment) -> ColumnElement[int]:
        """The number of the bar that a row belongs to. In whole numbers, which every database divides alike."""
        if self.axis == "time":
            return cast((at - self.first) * _MS, BigInteger) // round(self.bar * _MS)
        return iteration // int(self.bar)

    def start(self, bucket: int) -> float:
        return round(bucket * self.bar + self.first, 3) if self.axis == "time" else int(bucket * self.bar)

    def figure(self, value: float | None) -> float:
        return float(f"{value or 0.0:.{self.digits or 17}g}")


async def checkpoints_total(session: AsyncSession, job: str, reach: Reach) -> int:
    return await session.scalar(select(func.count()).where(*_checkpoints_in(job, reach))) or 0


async def checkpoints(
    session: AsyncSession, job: str, reach: Reach, total: int, *, lineage: int
) -> Sequence[models.Checkpoint]:
    """Those in the window; of too many, the newest of every stretch and lineage, and what is pinned, labelled
    or not simply durable or gone. `lineage`: where the job is; the newest durable one there is always told."""
    if not total:
        return []
    rows = models.Checkpoint
    within = _checkpoints_in(job, reach)
    query = select(rows).where(*within).order_by(rows.iteration, rows.lineage)
    if total <= reach.marks:
        return (await session.scalars(query)).all()
    # A checkpoint's id begins with its iteration, so that the last of a stretch is its newest.
    stretch = replace(reach, points=reach.marks * BAR_PX).bucket(rows.iteration, taken_at()).label("stretch")
    chosen = select(stretch, rows.lineage, func.max(rows.id).label("id")).where(*within)
    newest = chosen.group_by(stretch, rows.lineage).subquery()
    standing = case((newest.c.lineage == lineage, 0), else_=1)
    some = select(rows).join(newest, newest.c.id == rows.id).where(rows.job == job)
    some = some.order_by(standing, rows.iteration.desc()).limit(2 * reach.marks)
    durable = query.where(rows.lineage == lineage, rows.state == DURABLE).order_by(None)
    last = durable.order_by(rows.iteration.desc()).limit(1)
    named = or_(rows.pinned_at.is_not(None), rows.label.is_not(None))
    odd = or_(rows.state.in_(_TELLING), rows.kind == "safety", named)
    telling = select(rows).where(*within, odd).order_by(rows.iteration.desc()).limit(reach.marks // 2)
    found = {row.id: row for query in (some, telling, last) for row in await session.scalars(query)}
    return sorted(found.values(), key=lambda row: (row.iteration, row.lineage))


async def checkpoint_density(session: AsyncSession, job: str, reach: Reach) -> Density:
    rows = models.Checkpoint
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
        .where(*_checkpoints_in(job, reach))
        .group_by(bucket)
        .order_by(bucket)
    )
    columns: list[list[Any]] = [list(column) for column in zip(*await session.execute(query), strict=True)]
    starts, count, durable, failed, snapshot, persist = columns
    return Density(
        width=reach.bar,
        start=[reach.start(bucket) for bucket in starts],
        count=count,
        durable=durable,
        failed=failed,
        snapshot_seconds=[*map(reach.figure, snapshot)],
        persist_seconds=[*map(reach.figure, persist)],
    )


async def stalls_total(session: AsyncSession, job: str, reach: Reach) -> int:
    return await session.scalar(select(func.count()).where(*_stalls_in(job, reach))) or 0


async def stalls(session: AsyncSession, job: str, reach: Reach) -> list[StallRow]:
    """The longest, in the order in which they happened."""
    rows = models.Stall
    query = select(rows).where(*_stalls_in(job, reach)).order_by(rows.seconds.desc()).limit(reach.marks)
    found = [as_view(StallRow, row) for row in await session.scalars(query)]
    return sorted(found, key=lambda stall: stall.at)


async def stall_density(session: AsyncSession, job: str, reach: Reach) -> list[StallDensity]:
    """By kind."""
    rows = models.Stall
    bucket = reach.bucket(rows.iteration, rows.at).label("bucket")
    query = (
        select(rows.kind, bucket, func.count(), func.sum(rows.seconds), func.max(rows.seconds))
        .where(*_stalls_in(job, reach))
        .group_by(rows.kind, bucket)
        .order_by(rows.kind, bucket)
    )
    made: dict[str, StallDensity] = {}
    for kind, number, count, seconds, longest in await session.execute(query):
        one = made.setdefault(kind, StallDensity(kind=typing.cast("StallKind", kind), width=reach.bar))
        one.start.append(reach.start(number))
        one.count.append(count)
        one.seconds.append(reach.figure(seconds))
        one.longest_seconds.append(reach.figure(longest))
    return list(made.values())


async def paced(session: AsyncSession, job: str, reach: Reach) -> list[PacedRow]:
    """In the window, and the one in force when it begins; of too many, what changed something and every n-th."""
    rows = models.Pacing
    held = reach.holds(rows.iteration, rows.at)
    earlier = rows.at < reach.first if reach.axis == "time" else rows.iteration < int(reach.first)
    before = select(rows).where(rows.job == job, earlier).order_by(rows.at.desc(), rows.id.desc()).limit(1)
    few = select(rows).where(rows.job == job, held).order_by(rows.id).limit(reach.marks + 1)
    within = (await session.scalars(few)).all()
    if len(within) > reach.marks:
        within = (await session.scalars(_paced_in(job, held, reach.marks))).all()
    return [as_view(PacedRow, row) for row in (*await session.scalars(before), *within)]


def _paced_in(job: str, held: ColumnElement[bool], marks: int) -> Any:
    rows = models.Pacing
    order = rows.id
    numbered = (
        select(
            rows.id,
            func.row_number().over(order_by=order.desc()).label("place"),
            func.count().over().label("total"),
            rows.interval.is_distinct_from(func.lag(rows.interval).over(order_by=order)).label("paced_anew"),
            rows.budget.is_distinct_from(func.lag(rows.budget).over(order_by=order)).label("budgeted_anew"),
        )
        .where(rows.job == job, held)
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
    """At most so many, the newest among them."""
    kept: ColumnElement[bool] = (columns.place - 1) % ((columns.total + most - 1) // most) == 0
    return kept


async def gaps(session: AsyncSession, job: str, reach: Reach) -> list[GapRow]:
    """The widest, in the order of their iterations. Of a window in time, all of the job's: they carry no time."""
    rows = models.Gap
    query = select(rows).where(rows.job == job, rows.rank == 0).order_by(rows.dropped.desc()).limit(reach.marks)
    if reach.axis == "iteration":
        query = query.where(rows.first_iteration <= int(reach.last), rows.last_iteration >= int(reach.first))
    found = [as_view(GapRow, row) for row in await session.scalars(query)]
    return sorted(found, key=lambda gap: (gap.lineage, gap.first_iteration))


def as_view(view: type[View], row: models.Base) -> View:
    return view(**{name: getattr(row, name) for name in view.__struct_fields__})


def _checkpoints_in(job: str, reach: Reach) -> tuple[ColumnElement[bool], ...]:
    rows = models.Checkpoint
    return (rows.job == job, reach.holds(rows.iteration, taken_at()))


def _stalls_in(job: str, reach: Reach) -> tuple[ColumnElement[bool], ...]:
    rows = models.Stall
    return (rows.job == job, reach.holds(rows.iteration, rows.at))


def _count(condition: ColumnElement[bool]) -> ColumnElement[int]:
    return func.sum(case((condition, 1), else_=0))
