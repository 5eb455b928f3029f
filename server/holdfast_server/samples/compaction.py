"""Merging of small chunks, and downsampling of old samples to roll-ups.

Batches of a slow job hold a few iterations each, and are merged once no more of them arrive. Downsampling removes
chunks first, then roll-ups of the finest level; coarser roll-ups stay. The iterations from which on a series has
chunks, or finest roll-ups, are multiples of a bucket's width, so that no bucket is partly removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from sqlalchemy import ColumnElement, Row, ScalarSelect, case, delete, func, insert, select, update
from sqlalchemy.orm import Session

from holdfast_server import models
from holdfast_server.db import Database
from holdfast_server.samples import rollups, sample_codec, sample_series
from holdfast_server.samples.rollups import LEVELS
from holdfast_server.samples.series import AT

EVERY_SECONDS = 120.0
SMALL_ROWS = 1024
MERGED_ROWS = 4096
SETTLED_SECONDS = 600.0
"""Age from which on chunks are merged."""
SERIES_AT_ONCE, MERGES_AT_ONCE = 50, 200
"""Limits of one run; the next run continues."""

_FINEST, _SECOND = LEVELS[:2]
WIDTH = 1 << _FINEST
QUIETLY = {"synchronize_session": False}


def compact(db: Database, now: float) -> None:
    """Merge small chunks, in small transactions so that reports do not wait."""
    merges = 0
    for series in _fragmented_series(db):
        for ids in _grouped(_small_chunks(db, series, before=now - SETTLED_SECONDS)):
            db.write(partial(_merge, series=series.id, ids=ids), job=series.job, samples_only=True)
            merges += 1
            if merges == MERGES_AT_ONCE:
                return


def _fragmented_series(db: Database) -> Sequence[models.SampleSeriesRecord]:
    rows = models.SampleSeriesRecord
    with db.read() as session:
        query = (
            select(rows)
            .where(rows.chunks * SMALL_ROWS > rows.rows, rows.chunks > 1)
            .order_by(rows.chunks.desc())
            .limit(SERIES_AT_ONCE)
        )
        return session.scalars(query).all()


def _small_chunks(db: Database, series: models.SampleSeriesRecord, *, before: float) -> Sequence[Row[int, int]]:
    rows = models.ChunkRecord
    query = (
        select(rows.id, rows.rows)
        .where(*chunks_of(series), rows.rows < SMALL_ROWS, rows.last_at < before)
        .order_by(rows.first_iteration, rows.id)
    )
    with db.read() as session:
        return session.execute(query).all()


def _grouped(chunks: Iterable[Row[int, int]]) -> Iterator[list[int]]:
    """Group the ids of neighboring chunks to about the size of a merged chunk."""
    ids, size = list[int](), 0
    for chunk, rows in chunks:
        ids.append(chunk)
        size += rows
        if size >= MERGED_ROWS:
            yield ids
            ids, size = [], 0
    if size >= SMALL_ROWS:
        yield ids


def _merge(session: Session, series: int, ids: Sequence[int]) -> None:
    """Merge chunks of a series into one, unless one of them is gone."""
    chunk, row = models.table(models.ChunkRecord), models.SampleSeriesRecord
    found = session.execute(select(chunk).where(chunk.c.id.in_(ids)).order_by(chunk.c.id)).all()
    if len(found) < max(2, len(ids)):
        return
    tables = [sample_codec.unpack(one.columns) for one in found]
    names = tuple(dict.fromkeys(name for table in tables for name in table.metrics))
    whole = sample_codec.concatenated(tables, names)
    packed = sample_codec.pack(whole)
    place = {name: getattr(found[-1], name) for name in ("job", "uid", "attempt", "rank", "sequence", "lineage")}
    session.execute(insert(chunk), sample_series.chunk_row(place, whole, packed))
    session.execute(delete(chunk).where(chunk.c.id.in_(ids)))
    width = int(whole.iteration[-1] - whole.iteration[0])
    saved = sum(len(one.columns) for one in found) - len(packed)
    _change(
        session,
        series,
        widest_chunk=case((row.widest_chunk < width, width), else_=row.widest_chunk),
        chunks=row.chunks - len(found) + 1,
        chunk_bytes=row.chunk_bytes - saved,
    )


def first_ended_at() -> ScalarSelect[float]:
    """Return a subquery for the end of a series' first chunk, to be used in a query of series."""
    rows, of = models.ChunkRecord, models.SampleSeriesRecord
    same = (rows.job == of.job, rows.rank == of.rank, rows.lineage == of.lineage, rows.uid == of.uid)
    query = select(rows.last_at).where(*same).order_by(rows.first_iteration).limit(1)
    return query.correlate(of).scalar_subquery()


def first_since(session: Session, series: models.SampleSeriesRecord, at: float) -> int:
    """Return the first iteration of a series' chunks that ended at a time or later."""
    rows = models.ChunkRecord
    first = session.scalar(select(func.min(rows.first_iteration)).where(*chunks_of(series), rows.last_at >= at))
    return series.last_iteration + 1 if first is None else first


def begin_of(series: models.SampleSeriesRecord, iteration: int) -> int:
    """Return from where a series has chunks after removal of those that end before an iteration's bucket."""
    everything = iteration > series.last_iteration
    return -(-iteration // WIDTH) * WIDTH if everything else iteration // WIDTH * WIDTH


def thin_upto(session: Session, *, series_id: int, iteration: int) -> None:
    """Remove the chunks of a series that end before an iteration's bucket."""
    rows, series = models.ChunkRecord, session.get_one(models.SampleSeriesRecord, series_id)
    begin = begin_of(series, iteration)
    if begin <= series.chunks_from:
        return
    gone = (*chunks_of(series), rows.last_iteration < begin)
    count, size = session.execute(
        select(func.count(), func.coalesce(func.sum(func.length(rows.columns)), 0)).where(*gone)
    ).one()
    session.execute(delete(rows).where(*gone), execution_options=QUIETLY)
    left = {"chunks": series.chunks - count, "chunk_bytes": series.chunk_bytes - size}
    _change(session, series.id, chunks_from=begin, **left)


def fine_since(session: Session, series: models.SampleSeriesRecord, at: float) -> int:
    """Return from where a series has finest roll-ups after removal of those that ended before a time."""
    rows = models.RollupRecord
    low, high = series.finest_from >> _SECOND, (series.chunks_from >> _SECOND) - 1
    begin = series.finest_from
    if low > high:
        return begin
    query = (
        select(rows.bucket, rows.columns)
        .where(rows.series == series.id, rows.level == _SECOND, rows.bucket.between(low, high))
        .order_by(rows.bucket)
    )
    for bucket, encoded in session.execute(query):
        end = (bucket + 1) << _SECOND
        if end > series.last_iteration + 1 or rollups.last_of(encoded, AT) >= at:
            break
        begin = end
    return begin


def coarsen_upto(session: Session, *, series_id: int, begin: int) -> None:
    """Remove the finest roll-ups of a series before an iteration, a multiple of the second level's width."""
    series = session.get_one(models.SampleSeriesRecord, series_id)
    if begin <= series.finest_from:
        return
    rows = models.RollupRecord
    fine = (rows.series == series.id, rows.level == _FINEST, rows.bucket < begin >> _FINEST)
    session.execute(delete(rows).where(*fine), execution_options=QUIETLY)
    _change(session, series.id, finest_from=begin)


def chunks_of(series: models.SampleSeriesRecord) -> tuple[ColumnElement[bool], ...]:
    rows = models.ChunkRecord
    of_rank = (rows.job == series.job, rows.rank == series.rank)
    return (*of_rank, rows.lineage == series.lineage, rows.uid == series.uid)


def _change(session: Session, series: int, **values: object) -> None:
    rows = models.SampleSeriesRecord
    session.execute(update(rows).where(rows.id == series).values(**values), execution_options=QUIETLY)
