"""Taking away what was stored of samples, so that what is left of it is read as roll-ups.

Chunks go before roll-ups of the finest level, and roll-ups of the others stay. Where a stretch begins to be whole,
or fine, is a multiple of a bucket's width, so that a bucket is never half of one and half of the other.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, ScalarSelect, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_server import models, rollups
from holdfast_server.rollups import LEVELS
from holdfast_server.series import AT

_FINEST, _SECOND = LEVELS[:2]
WIDTH = 1 << _FINEST
QUIETLY = {"synchronize_session": False}


def first_ended_at() -> ScalarSelect[float]:
    """When the first chunk of a stretch ended, for a question about stretches: what is to go has to have begun."""
    rows, of = models.Chunk, models.Stretch
    same = (rows.job == of.job, rows.rank == of.rank, rows.lineage == of.lineage, rows.uid == of.uid)
    query = select(rows.last_at).where(*same).order_by(rows.first_iteration).limit(1)
    return query.correlate(of).scalar_subquery()


async def first_since(session: AsyncSession, stretch: models.Stretch, at: float) -> int:
    """Of a stretch, the first iteration of the chunks that had not ended before a time."""
    rows = models.Chunk
    first = await session.scalar(select(func.min(rows.first_iteration)).where(*_of(stretch), rows.last_at >= at))
    return stretch.last_iteration + 1 if first is None else first


def begin_of(stretch: models.Stretch, iteration: int) -> int:
    """Where a stretch begins to be whole without all chunks that end before an iteration, or before its bucket."""
    everything = iteration > stretch.last_iteration
    return -(-iteration // WIDTH) * WIDTH if everything else iteration // WIDTH * WIDTH


async def thin_upto(session: AsyncSession, stretch: models.Stretch, iteration: int) -> None:
    """Of a stretch, all chunks that end before an iteration, or before the beginning of its bucket."""
    rows = models.Chunk
    begin = begin_of(stretch, iteration)
    if begin <= stretch.whole_from:
        return
    gone = (*_of(stretch), rows.last_iteration < begin)
    count, size = (
        await session.execute(
            select(func.count(), func.coalesce(func.sum(func.length(rows.columns)), 0)).where(*gone)
        )
    ).one()
    await session.execute(delete(rows).where(*gone), execution_options=QUIETLY)
    await session.execute(
        update(models.Stretch)
        .where(models.Stretch.id == stretch.id)
        .values(whole_from=begin, chunks=stretch.chunks - count, chunk_bytes=stretch.chunk_bytes - size),
        execution_options=QUIETLY,
    )


async def fine_since(session: AsyncSession, stretch: models.Stretch, at: float) -> int:
    """Where a stretch begins to be fine without the roll-ups that had ended before a time and have no chunks."""
    rows = models.Rollup
    low, high = stretch.fine_from >> _SECOND, (stretch.whole_from >> _SECOND) - 1
    begin = stretch.fine_from
    if low > high:
        return begin
    query = (
        select(rows.bucket, rows.columns)
        .where(rows.stretch == stretch.id, rows.level == _SECOND, rows.bucket.between(low, high))
        .order_by(rows.bucket)
    )
    for bucket, columns in await session.execute(query):
        end = (bucket + 1) << _SECOND
        if end > stretch.last_iteration + 1 or rollups.last_of(columns, AT) >= at:
            break
        begin = end
    return begin


async def coarsen_upto(session: AsyncSession, stretch: models.Stretch, begin: int) -> None:
    """Of a stretch, the finest roll-ups before an iteration, at which one of the second level begins."""
    if begin <= stretch.fine_from:
        return
    rows = models.Rollup
    fine = (rows.stretch == stretch.id, rows.level == _FINEST, rows.bucket < begin >> _FINEST)
    await session.execute(delete(rows).where(*fine), execution_options=QUIETLY)
    await session.execute(
        update(models.Stretch).where(models.Stretch.id == stretch.id).values(fine_from=begin),
        execution_options=QUIETLY,
    )


def _of(stretch: models.Stretch) -> tuple[ColumnElement[bool], ...]:
    rows = models.Chunk
    return (
        rows.job == stretch.job,
        rows.rank == stretch.rank,
        rows.lineage == stretch.lineage,
        rows.uid == stretch.uid,
    )
