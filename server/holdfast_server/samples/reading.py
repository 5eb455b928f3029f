"""Queries for the series, chunks and roll-ups of a timeline. Rank 0 reports the job's samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice

from sqlalchemy import ColumnElement, Select, and_, bindparam, or_, select
from sqlalchemy.orm import Session

from holdfast_server import models
from holdfast_server.models import SampleSeriesRecord
from holdfast_server.samples import rollups
from holdfast_server.samples.limits import MACHINE_RANK
from holdfast_server.samples.read_plan import Segment
from holdfast_server.samples.rollups import LEVELS
from holdfast_server.samples.series import AT, Rolled, TimelineData

READS_AT_ONCE = 50


def series_of(session: Session, job: str, rank: int = 0) -> Sequence[SampleSeriesRecord]:
    return session.scalars(_select_series(), {"job": job, "rank": rank}).all()


@cache
def _select_series() -> Select[SampleSeriesRecord]:
    return select(SampleSeriesRecord).where(
        SampleSeriesRecord.job == bindparam("job"), SampleSeriesRecord.rank == bindparam("rank")
    )


def machine_ranks(session: Session, job: str) -> list[int]:
    """Return the ranks whose machines were measured."""
    rows = SampleSeriesRecord
    query = select(rows.rank).where(rows.job == job, rows.rank >= MACHINE_RANK).distinct().order_by(rows.rank)
    return [rank - MACHINE_RANK for rank in session.scalars(query)]


def iterations_between(
    session: Session, series: SampleSeriesRecord, since: float, until: float, *, began: float
) -> tuple[int, int] | None:
    """Return the first and last iteration of a series between two times, with up to a bucket more at each end.

    None if no iteration ended in between. `began`: a time before which no iteration of the series ended.
    """
    if series.last_at < since or began > until:
        return None
    first, last = series.first_iteration, series.last_iteration
    if began < since:
        first, _ = _bucket_at(session, series, since)
    if series.last_at > until:
        _, last = _bucket_at(session, series, until)
    return first, last


def _bucket_at(session: Session, series: SampleSeriesRecord, at: float) -> tuple[int, int]:
    """Return the first finest bucket that ended at a time or later, found from coarse to fine levels."""
    rows = models.RollupRecord
    low, high = series.first_iteration, series.last_iteration
    for level in reversed(LEVELS):
        query = (
            select(rows.first_iteration, rows.last_iteration, rows.columns)
            .where(rows.series == series.id, rows.level == level)
            .where(rows.bucket.between(low >> level, high >> level))
            .order_by(rows.bucket)
        )
        for first, last, columns in session.execute(query):
            if rollups.last_of(columns, AT) >= at:
                low, high = max(low, first), min(high, last)
                break
            low = last + 1  # it is in a later bucket, which is stored only once complete
    return min(low, high), high


def time_of(session: Session, job: str, lineage: int, iteration: int) -> float | None:
    """Return about when an iteration ended; None if no samples of it are stored one by one."""
    rows = models.ChunkRecord
    query = (
        select(rows.first_iteration, rows.last_iteration, rows.first_at, rows.last_at)
        .where(rows.job == job, rows.rank == 0, rows.lineage == lineage, rows.first_iteration <= iteration)
        .order_by(rows.first_iteration.desc(), rows.id.desc())
        .limit(1)
    )
    found = session.execute(query).first()
    if found is None or found.last_iteration < iteration:
        return None
    share = (iteration - found.first_iteration) / max(1, found.last_iteration - found.first_iteration)
    return float(found.first_at + share * (found.last_at - found.first_at))


def contents(session: Session, job: str, reads: Sequence[Segment], rank: int = 0) -> TimelineData:
    """Read segments of series of one rank."""
    whole = [read for read in reads if read.level == 0]
    coarse = [read for read in reads if read.level > 0]
    return TimelineData(_chunks(session, job, whole, rank), _rolled(session, coarse))


def _chunks(session: Session, job: str, reads: Sequence[Segment], rank: int) -> dict[int, list[bytes]]:
    rows = models.ChunkRecord
    numbers = {(read.series.lineage, read.series.uid): read.series.id for read in reads}
    found: dict[int, tuple[int, bytes]] = {}
    for some in _some(reads):
        query = select(rows.id, rows.lineage, rows.uid, rows.columns).where(
            rows.job == job, rows.rank == rank, or_(*map(_reaches, some))
        )
        for chunk, lineage, uid, columns in session.execute(query):
            found[chunk] = (numbers[lineage, uid], columns)
    made: dict[int, list[bytes]] = {}
    for _, (series, columns) in sorted(found.items()):
        made.setdefault(series, []).append(columns)
    return made


def _reaches(read: Segment) -> ColumnElement[bool]:
    rows, series = models.ChunkRecord, read.series
    return and_(
        rows.lineage == series.lineage,
        rows.uid == series.uid,
        # No chunk of the series is wider, so the index finds where to begin.
        rows.first_iteration.between(read.first - series.widest_chunk, read.last),
        rows.last_iteration >= read.first,
    )


def _rolled(session: Session, reads: Sequence[Segment]) -> dict[tuple[int, int], list[Rolled]]:
    """Read buckets without the ORM: a wide window has a thousand rows."""
    rows = models.table(models.RollupRecord).c
    made: dict[tuple[int, int], dict[int, Rolled]] = {}
    connection = session.connection()
    for some in _some(reads):
        query = select(
            rows.series,
            rows.level,
            rows.bucket,
            rows.first_iteration,
            rows.last_iteration,
            rows.rows,
            rows.columns,
        ).where(or_(*map(_is_in, some)))
        # all at once: fetching rows one by one takes as long as the query
        for series, level, bucket, first, last, count, columns in connection.execute(query).all():
            made.setdefault((series, level), {})[bucket] = (first, last, count, columns)
    return {place: [buckets[bucket] for bucket in sorted(buckets)] for place, buckets in made.items()}


def _is_in(read: Segment) -> ColumnElement[bool]:
    rows, level = models.RollupRecord, read.level
    buckets = rows.bucket.between(read.first >> level, read.last >> level)
    return and_(rows.series == read.series.id, rows.level == level, buckets)


def _some(reads: Sequence[Segment]) -> Iterator[list[Segment]]:
    left = iter(reads)
    while some := list(islice(left, READS_AT_ONCE)):
        yield some
