"""Merge small chunks into large ones once they are settled: a slow job's batches hold a few iterations each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from holdfast_server import columns, models, stretches
from holdfast_server.db import Database

EVERY_SECONDS = 120.0
SMALL_ROWS = 1024
MERGED_ROWS = 4096
SETTLED_SECONDS = 600.0
"""What came so long ago is not written to any more."""
STRETCHES_AT_ONCE, MERGES_AT_ONCE = 50, 200
"""Looked after in one go; the rest in the next."""


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
            await db.write_rows(partial(merge, stretch=stretch.id, ids=ids), job=stretch.job)
            merges += 1
            if merges == MERGES_AT_ONCE:
                return


async def _scattered(db: Database) -> Sequence[models.Stretch]:
    rows = models.Stretch
    async with db.read() as session:
        query = (
            select(rows)
            .where(rows.chunks * SMALL_ROWS > rows.rows, rows.chunks > 1)
            .order_by(rows.chunks.desc())
            .limit(STRETCHES_AT_ONCE)
        )
        return (await session.scalars(query)).all()


async def _small(db: Database, stretch: models.Stretch, *, before: float) -> list[_Piece]:
    rows = models.Chunk
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


def merge(connection: Connection, stretch: int, ids: Sequence[int]) -> None:
    """Chunks of a stretch become one; nothing, where one of them is gone."""
    chunk, row = models.table(models.Chunk), models.table(models.Stretch)
    found = connection.execute(select(chunk).where(chunk.c.id.in_(ids)).order_by(chunk.c.id)).all()
    if len(found) < max(2, len(ids)):
        return
    tables = [columns.unpack(one.columns) for one in found]
    names = tuple(dict.fromkeys(name for table in tables for name in table.metrics))
    whole = columns.joined(tables, names)
    last = found[-1]
    place = stretches.Place(last.job, last.uid, last.attempt, last.rank, last.sequence, last.lineage)
    packed = columns.pack(whole)
    connection.execute(insert(chunk), stretches.chunk_row(place, whole, packed))
    connection.execute(delete(chunk).where(chunk.c.id.in_(ids)))
    width = int(whole.iteration[-1] - whole.iteration[0])
    saved = sum(len(one.columns) for one in found) - len(packed)
    grown = update(row).where(row.c.id == bindparam("stretch"), row.c.widest < bindparam("width"))
    connection.execute(grown.values(widest=bindparam("width")), {"stretch": stretch, "width": width})
    fewer = {"chunks": row.c.chunks - len(found) + 1, "chunk_bytes": row.c.chunk_bytes - saved}
    connection.execute(update(row).where(row.c.id == stretch).values(fewer))
