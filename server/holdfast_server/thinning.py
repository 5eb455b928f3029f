"""Taking away what was stored of samples, so that what is left of it is read as roll-ups.

Chunks go before roll-ups of the finest level, and roll-ups of the others stay. Where a stretch begins to be whole,
or fine, is a multiple of a bucket's width, so that a bucket is never half of one and half of the other.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_server import models, rollups
from holdfast_server.rollups import LEVELS
from holdfast_server.series import AT

_FINEST, _SECOND = LEVELS[:2]
WIDTH = 1 << _FINEST
QUIETLY = {"synchronize_session": False}


async def thin_before(session: AsyncSession, stretch: models.Stretch, at: float) -> None:
    """Of a stretch, the chunks that had ended before a time."""
    rows = models.Chunk
    first = await session.scalar(select(func.min(rows.first_iteration)).where(*_of(stretch), rows.last_at >= at))
    await thin_upto(session, stretch, stretch.last_iteration + 1 if first is None else first)


async def thin_upto(session: AsyncSession, stretch: models.Stretch, iteration: int) -> None:
    """Of a stretch, all chunks that end before an iteration, or before the beginning of its bucket."""
    rows = models.Chunk
    everything = iteration > stretch.last_iteration

    begin = -(-iteration // WIDTH) * WIDTH if everything else iteration // WIDTH * WIDTH
    if begin <= stretch.whole_from or not stretch.rolled_up:
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


async def coarsen_before(session: AsyncSession, stretch: models.Stretch, at: float) -> None:
    """Of a stretch, the finest roll-ups that had ended before a time, where no chunk is left either."""
    rows = models.Rollup
    query = (
        select(rows.bucket, rows.columns)
        .where(rows.stretch == stretch.id, rows.level == _SECOND, rows.bucket < stretch.whole_from >> _SECOND)
        .order_by(rows.bucket)
    )
    begin = stretch.fine_from
    for bucket, columns in await session.execute(query):
        if rollups.last_of(columns, AT) >= at:
            break
        begin = (bucket + 1) << _SECOND
    if begin <= stretch.fine_from:
        return
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
