"""Questions asked of what was ingested."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TypeVar

import msgspec
from sqlalchemy import func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_server import desired, models, samples
from holdfast_server import orders as restore_orders
from holdfast_server.checkpoints import IN_STORE, ancestry_of, as_row, taken_at
from holdfast_server.db import Database
from holdfast_server.errors import InvalidSetting
from holdfast_server.summaries import find_job
from holdfast_server.summaries import fleet as fleet
from holdfast_server.summaries import job_summary as job_summary
from holdfast_server.views import (
    AttemptRow,
    CheckpointRow,
    Edit,
    LineageRow,
    NoticeRow,
    Order,
    PacedRow,
    Series,
    StallRow,
    Timeline,
)

MAX_POINTS = 5000
MAX_MARKS = 500
"""Most checkpoints, stalls and intervals drawn in one window; of more, an even selection."""
MAX_ROWS = 200

View = TypeVar("View", bound=msgspec.Struct)


async def restore_points(
    db: Database, job: str, *, limit: int = 50, before: str | None = None, in_store: bool = False
) -> list[CheckpointRow]:
    """On all lineages and in every state, the last taken first: after a restore, what goes on from there.

    `in_store`: only those that are in the store or on their way there, damaged ones too; neither those that
    failed nor those that are gone. `before`: the id that the page before ended with. Raises UnknownJob;
    InvalidSetting for another `before`.
    """
    rows = models.Checkpoint
    async with db.read() as session:
        found = await find_job(session, job)
        order = (taken_at(), rows.iteration, rows.lineage)
        query = select(rows).where(rows.job == job).order_by(*(part.desc() for part in order))
        if in_store:
            query = query.where(rows.state.in_(IN_STORE))
        if before is not None:
            last = (await session.execute(select(*order).where(rows.job == job, rows.id == before))).first()
            if last is None:
                raise InvalidSetting("before", f"no checkpoint {before!r}: give the id that a page ended with")
            query = query.where(tuple_(*order) < tuple_(*last))
        ancestry = await ancestry_of(session, found)
        found_rows = await session.scalars(query.limit(min(limit, MAX_MARKS)))
        return [as_row(row, ancestry) for row in found_rows]


async def checkpoint(db: Database, job: str, checkpoint: str) -> CheckpointRow | None:
    async with db.read() as session:
        found = await find_job(session, job)
        row = await session.get(models.Checkpoint, (job, checkpoint))
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
        return await desired.edit_rows(session, job, limit=min(limit, MAX_ROWS))


async def notices(db: Database, job: str, *, limit: int = 20) -> list[NoticeRow]:
    rows = models.Notice
    async with db.read() as session:
        await find_job(session, job)
        query = select(rows).where(rows.job == job).order_by(rows.id.desc()).limit(min(limit, MAX_ROWS))
        return [_as(NoticeRow, row) for row in await session.scalars(query)]


async def timeline(
    db: Database,
    job: str,
    *,
    start: int | None = None,
    end: int | None = None,
    points: int = 1200,
    now: float | None = None,
) -> Timeline:
    """What happened between two iterations, inclusive; without them, from the first to the last known."""
    async with db.read() as session:
        found = await find_job(session, job)
        ancestry = await ancestry_of(session, found)
        extent = await _extent(session, job)
        first, last = _bounds(extent, start, end)
        chunks = await _chunks(session, job, first, last)
        rows = await _checkpoints(session, job, first, last)
        reached = await _reached(session, found)
        answer = Timeline(
            job=job,
            extent=extent,
            window=(first, last) if extent else None,
            now=time.time() if now is None else now,
            bucketed=False,
            series=[],
            lineages=await _lineages(session, found),
            checkpoints=[as_row(row, ancestry) for row in rows],
            checkpoints_total=await _checkpoints_total(session, job, first, last),
            stalls=await _stalls(session, job, first, last),
            attempts=await _attempts(session, job),
            edits=await desired.edit_rows(session, job, limit=MAX_ROWS),
            orders=await restore_orders.order_rows(session, job, limit=MAX_ROWS),
            paced=await _paced(session, job, first, last),
        )
    window = samples.Window(first, last, max(2, min(points, MAX_POINTS)))
    # Off the event loop: a long run's window is millions of numbers to look at.
    series, bucketed = await asyncio.to_thread(_series, chunks, (found.lineage, reached), window)
    return msgspec.structs.replace(answer, series=series, bucketed=bucketed)


def _bounds(extent: tuple[int, int] | None, start: int | None, end: int | None) -> tuple[int, int]:
    first, last = extent or (0, 0)
    return (first if start is None else start), (last if end is None else end)


async def _extent(session: AsyncSession, job: str) -> tuple[int, int] | None:
    first = await session.scalar(select(func.min(models.Chunk.first_iteration)).where(models.Chunk.job == job))
    last = await session.scalar(select(func.max(models.Lineage.last_iteration)).where(models.Lineage.job == job))
    return None if first is None or last is None else (first, last)


async def _chunks(session: AsyncSession, job: str, first: int, last: int) -> dict[int, list[bytes]]:
    """By lineage, oldest first. Rank 0 speaks for the job: all ranks take the same steps."""
    rows = models.Chunk
    query = (
        select(rows.lineage, rows.columns)
        .where(rows.job == job, rows.rank == 0, rows.first_iteration <= last, rows.last_iteration >= first)
        .join(models.Job, models.Job.name == rows.job)
        .order_by(rows.lineage, rows.uid == models.Job.uid, rows.attempt, rows.id)
    )
    found: dict[int, list[bytes]] = {}
    for lineage, columns in await session.execute(query):
        found.setdefault(lineage, []).append(columns)
    return found


async def _reached(session: AsyncSession, job: models.Job) -> int:
    """The last iteration of the current attempt; what its lineage has beyond was lost with an earlier one."""
    rows = models.Chunk
    own = (rows.job == job.name, rows.rank == 0, rows.lineage == job.lineage, rows.uid == job.uid)
    return max(job.iteration, await session.scalar(select(func.max(rows.last_iteration)).where(*own)) or 0)


def _series(
    chunks: dict[int, list[bytes]], standing: tuple[int, int], window: samples.Window
) -> tuple[list[Series], bool]:
    """`standing`: lineage and iteration of the job."""
    current, reached = standing
    made = []
    for lineage, columns in chunks.items():
        if lineage != current or reached >= window.end:
            made.append(samples.series(lineage, columns, window, abandoned=lineage != current))
            continue
        behind = samples.Window(window.start, reached, window.points)
        ahead = samples.Window(max(window.start, reached + 1), window.end, window.points)
        made.append(samples.series(lineage, columns, behind, abandoned=False))
        made.append(samples.series(lineage, columns, ahead, abandoned=True, lost=True))
    kept = [one for one in made if one is not None]
    return [series for series, _ in kept], any(bucketed for _, bucketed in kept)


async def _checkpoints(session: AsyncSession, job: str, first: int, last: int) -> Sequence[models.Checkpoint]:
    """Those in the window; of more than can be drawn every n-th, counted back from the newest."""
    rows = models.Checkpoint
    within = (rows.job == job, rows.iteration >= first, rows.iteration <= last)
    step = -(-await _checkpoints_total(session, job, first, last) // MAX_MARKS) or 1
    place = func.row_number().over(order_by=(rows.iteration.desc(), rows.lineage.desc())).label("place")
    numbered = select(rows.id, place).where(*within).subquery()
    query = (
        select(rows)
        .join(numbered, numbered.c.id == rows.id)
        .where(rows.job == job, (numbered.c.place - 1) % step == 0)
        .order_by(rows.iteration, rows.lineage)
    )
    return (await session.scalars(query)).all()


async def _checkpoints_total(session: AsyncSession, job: str, first: int, last: int) -> int:
    rows = models.Checkpoint
    query = select(func.count()).where(rows.job == job, rows.iteration >= first, rows.iteration <= last)
    return await session.scalar(query) or 0


async def _stalls(session: AsyncSession, job: str, first: int, last: int) -> list[StallRow]:
    """The longest, in the order in which they happened."""
    rows = models.Stall
    query = (
        select(rows)
        .where(rows.job == job, rows.iteration >= first, rows.iteration <= last)
        .order_by(rows.seconds.desc())
        .limit(MAX_MARKS)
    )
    found = [_as(StallRow, row) for row in await session.scalars(query)]
    return sorted(found, key=lambda stall: stall.at)


async def _paced(session: AsyncSession, job: str, first: int, last: int) -> list[PacedRow]:
    """The newest in the window, and the one that was in force when it begins."""
    rows = models.Pacing
    within = select(rows).where(rows.job == job, rows.iteration >= first, rows.iteration <= last)
    before = select(rows).where(rows.job == job, rows.iteration < first)
    found = [
        *await session.scalars(before.order_by(rows.id.desc()).limit(1)),
        *reversed((await session.scalars(within.order_by(rows.id.desc()).limit(MAX_MARKS))).all()),
    ]
    return [_as(PacedRow, row) for row in found]


async def _lineages(session: AsyncSession, job: models.Job) -> list[LineageRow]:
    rows = models.Lineage
    found = await session.scalars(select(rows).where(rows.job == job.name).order_by(rows.lineage))
    return [
        LineageRow(
            lineage=row.lineage,
            iteration=row.iteration,
            parent=row.parent,
            order=row.order_id,
            at=row.at,
            last_iteration=row.last_iteration,
            abandoned=row.lineage != job.lineage,
        )
        for row in found
    ]


async def _attempts(session: AsyncSession, job: str) -> list[AttemptRow]:
    rows = models.Attempt
    query = select(rows).where(rows.job == job).order_by(rows.attempt.desc()).limit(MAX_ROWS)
    return [_as(AttemptRow, row) for row in reversed((await session.scalars(query)).all())]


def _as(view: type[View], row: models.Base) -> View:
    return view(**{name: getattr(row, name) for name in view.__struct_fields__})
