"""Merge small chunks of samples into large ones, and thin old samples into roll-ups.

A slow job's batches hold a few iterations each: they are merged once they are settled. When old samples are
thinned, chunks go before roll-ups of the finest level, and roll-ups of the others stay. Where a stretch begins to
be whole, or fine, is a multiple of a bucket's width, so that a bucket is never half of one and half of the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from sqlalchemy import ColumnElement, ScalarSelect, case, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_server import models
from holdfast_server.db import Database
from holdfast_server.samples import rollups, sample_codec, sample_series
from holdfast_server.samples.rollups import LEVELS
from holdfast_server.samples.series import AT

EVERY_SECONDS = 120.0
SMALL_ROWS = 1024
MERGED_ROWS = 4096
SETTLED_SECONDS = 600.0
"""What came so long ago is not written to any more."""
STRETCHES_AT_ONCE, MERGES_AT_ONCE = 50, 200
"""Looked after in one go; the rest in the next."""

_FINEST, _SECOND = LEVELS[:2]
WIDTH = 1 << _FINEST
QUIETLY = {"synchronize_session": False}


@dataclass(frozen=True, slots=True)
class _Piece:
    id: int
    rows: int


async def compact(db: Database, now: float) -> None:
    """A chore. In small transactions, so that reports do not wait for it."""
    merges = 0
    for stretch in await _scattered(db):
        for pieces in _groups(await _small(db, stretch, before=now - SETTLED_SECONDS)):
            ids = [piece.id for piece in pieces]
            await db.write(partial(_merge, stretch=stretch.id, ids=ids), job=stretch.job, samples_only=True)
            merges += 1
            if merges == MERGES_AT_ONCE:
                return


async def _scattered(db: Database) -> Sequence[models.StretchRecord]:
    rows = models.StretchRecord
    async with db.read() as session:
        query = (
            select(rows)
            .where(rows.chunks * SMALL_ROWS > rows.rows, rows.chunks > 1)
            .order_by(rows.chunks.desc())
            .limit(STRETCHES_AT_ONCE)
        )
        return (await session.scalars(query)).all()


async def _small(db: Database, stretch: models.StretchRecord, *, before: float) -> list[_Piece]:
    rows = models.ChunkRecord
    query = (
        select(rows.id, rows.rows)
        .where(rows.job == stretch.job, rows.rank == stretch.rank, rows.lineage == stretch.lineage)
        .where(rows.uid == stretch.uid, rows.rows < SMALL_ROWS, rows.last_at < before)
        .order_by(rows.first_iteration, rows.id)
    )
    async with db.read() as session:
        return [_Piece(*row) for row in await session.execute(query)]


def _groups(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Of neighbours, each about as large as a chunk is to be."""
    group: list[_Piece] = []
    for piece in pieces:
        group.append(piece)
        if sum(one.rows for one in group) >= MERGED_ROWS:
            yield group
            group = []
    if sum(one.rows for one in group) >= SMALL_ROWS:
        yield group


async def _merge(session: AsyncSession, stretch: int, ids: Sequence[int]) -> None:
    """Chunks of a stretch become one; nothing, where one of them is gone."""
    chunk, row = models.table(models.ChunkRecord), models.StretchRecord
    found = (await session.execute(select(chunk).where(chunk.c.id.in_(ids)).order_by(chunk.c.id))).all()
    if len(found) < max(2, len(ids)):
        return
    tables = [sample_codec.unpack(one.columns) for one in found]
    names = tuple(dict.fromkeys(name for table in tables for name in table.metrics))
    whole = sample_codec.joined(tables, names)
    packed = sample_codec.pack(whole)
    place = {name: getattr(found[-1], name) for name in ("job", "uid", "attempt", "rank", "sequence", "lineage")}
    await session.execute(insert(chunk), sample_series.chunk_row(place, whole, packed))
    await session.execute(delete(chunk).where(chunk.c.id.in_(ids)))
    width = int(whole.iteration[-1] - whole.iteration[0])
    saved = sum(len(one.columns) for one in found) - len(packed)
    await session.execute(
        update(row)
        .where(row.id == stretch)
        .values(
            widest=case((row.widest < width, width), else_=row.widest),
            chunks=row.chunks - len(found) + 1,
            chunk_bytes=row.chunk_bytes - saved,
        ),
        execution_options=QUIETLY,
    )


def first_ended_at() -> ScalarSelect[float]:
    """When the first chunk of a stretch ended, for a question about stretches: what is to go has to have begun."""
    rows, of = models.ChunkRecord, models.StretchRecord
    same = (rows.job == of.job, rows.rank == of.rank, rows.lineage == of.lineage, rows.uid == of.uid)
    query = select(rows.last_at).where(*same).order_by(rows.first_iteration).limit(1)
    return query.correlate(of).scalar_subquery()


async def first_since(session: AsyncSession, stretch: models.StretchRecord, at: float) -> int:
    """Of a stretch, the first iteration of the chunks that had not ended before a time."""
    rows = models.ChunkRecord
    first = await session.scalar(select(func.min(rows.first_iteration)).where(*_of(stretch), rows.last_at >= at))
    return stretch.last_iteration + 1 if first is None else first


def begin_of(stretch: models.StretchRecord, iteration: int) -> int:
    """Where a stretch begins to be whole without all chunks that end before an iteration, or before its bucket."""
    everything = iteration > stretch.last_iteration
    return -(-iteration // WIDTH) * WIDTH if everything else iteration // WIDTH * WIDTH


async def thin_upto(session: AsyncSession, stretch: models.StretchRecord, iteration: int) -> None:
    """Of a stretch, all chunks that end before an iteration, or before the beginning of its bucket."""
    rows = models.ChunkRecord
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
        update(models.StretchRecord)
        .where(models.StretchRecord.id == stretch.id)
        .values(whole_from=begin, chunks=stretch.chunks - count, chunk_bytes=stretch.chunk_bytes - size),
        execution_options=QUIETLY,
    )


async def fine_since(session: AsyncSession, stretch: models.StretchRecord, at: float) -> int:
    """Where a stretch begins to be fine without the roll-ups that had ended before a time and have no chunks."""
    rows = models.RollupRecord
    low, high = stretch.fine_from >> _SECOND, (stretch.whole_from >> _SECOND) - 1
    begin = stretch.fine_from
    if low > high:
        return begin
    query = (
        select(rows.bucket, rows.columns)
        .where(rows.stretch == stretch.id, rows.level == _SECOND, rows.bucket.between(low, high))
        .order_by(rows.bucket)
    )
    for bucket, encoded in await session.execute(query):
        end = (bucket + 1) << _SECOND
        if end > stretch.last_iteration + 1 or rollups.last_of(encoded, AT) >= at:
            break
        begin = end
    return begin


async def coarsen_upto(session: AsyncSession, stretch: models.StretchRecord, begin: int) -> None:
    """Of a stretch, the finest roll-ups before an iteration, at which one of the second level begins."""
    if begin <= stretch.fine_from:
        return
    rows = models.RollupRecord
    fine = (rows.stretch == stretch.id, rows.level == _FINEST, rows.bucket < begin >> _FINEST)
    await session.execute(delete(rows).where(*fine), execution_options=QUIETLY)
    await session.execute(
        update(models.StretchRecord).where(models.StretchRecord.id == stretch.id).values(fine_from=begin),
        execution_options=QUIETLY,
    )


def _of(stretch: models.StretchRecord) -> tuple[ColumnElement[bool], ...]:
    rows = models.ChunkRecord
    return (
        rows.job == stretch.job,
        rows.rank == stretch.rank,
        rows.lineage == stretch.lineage,
        rows.uid == stretch.uid,
    )
