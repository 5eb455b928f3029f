"""Reading what a timeline asks for: stretches, chunks and roll-ups. Rank 0 speaks for the job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice

from sqlalchemy import ColumnElement, Select, and_, bindparam, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_server import models
from holdfast_server.models import StretchRecord
from holdfast_server.samples import rollups
from holdfast_server.samples.read_plan import Segment
from holdfast_server.samples.rollups import LEVELS
from holdfast_server.samples.series import AT, Contents, Rolled

READS_AT_ONCE = 50


async def stretches(session: AsyncSession, job: str) -> Sequence[StretchRecord]:
    return (await session.scalars(_of_stretches(), {"job": job})).all()


@cache
def _of_stretches() -> Select[StretchRecord]:
    return select(StretchRecord).where(StretchRecord.job == bindparam("job"), StretchRecord.rank == 0)


async def iterations_between(
    session: AsyncSession, stretch: StretchRecord, since: float, until: float, *, began: float
) -> tuple[int, int] | None:
    """Which iterations of a stretch ended between two times: at each end up to a bucket more, never less.

    `began`: no iteration of it ended before. None: none did between them.
    """
    if stretch.last_at < since or began > until:
        return None
    first, last = stretch.first_iteration, stretch.last_iteration
    if began < since:
        first, _ = await _bucket_at(session, stretch, since)
    if stretch.last_at > until:
        _, last = await _bucket_at(session, stretch, until)
    return first, last


async def _bucket_at(session: AsyncSession, stretch: StretchRecord, at: float) -> tuple[int, int]:
    """The first bucket that ended no earlier: a coarse one, then the finer ones within it. Their times ascend."""
    rows = models.RollupRecord
    low, high = stretch.first_iteration, stretch.last_iteration
    for level in reversed(LEVELS):
        query = (
            select(rows.first_iteration, rows.last_iteration, rows.columns)
            .where(rows.stretch == stretch.id, rows.level == level)
            .where(rows.bucket.between(low >> level, high >> level))
            .order_by(rows.bucket)
        )
        for first, last, columns in await session.execute(query):
            if rollups.last_of(columns, AT) >= at:
                low, high = max(low, first), min(high, last)
                break
            low = last + 1  # it lies in a later one, which may not be stored before it is whole
    return min(low, high), high


async def contents(session: AsyncSession, job: str, reads: Sequence[Segment]) -> Contents:
    whole = [read for read in reads if read.level == 0]
    coarse = [read for read in reads if read.level > 0]
    return Contents(await _chunks(session, job, whole), await _rolled(session, coarse))


async def _chunks(session: AsyncSession, job: str, reads: Sequence[Segment]) -> dict[int, list[bytes]]:
    rows = models.ChunkRecord
    numbers = {(read.stretch.lineage, read.stretch.uid): read.stretch.id for read in reads}
    found: dict[int, tuple[int, bytes]] = {}
    for some in _some(reads):
        query = select(rows.id, rows.lineage, rows.uid, rows.columns).where(
            rows.job == job, rows.rank == 0, or_(*map(_reaches, some))
        )
        for chunk, lineage, uid, columns in await session.execute(query):
            found[chunk] = (numbers[lineage, uid], columns)
    made: dict[int, list[bytes]] = {}
    for _, (stretch, columns) in sorted(found.items()):
        made.setdefault(stretch, []).append(columns)
    return made


def _reaches(read: Segment) -> ColumnElement[bool]:
    rows, stretch = models.ChunkRecord, read.stretch
    return and_(
        rows.lineage == stretch.lineage,
        rows.uid == stretch.uid,
        # None of its chunks is wider, so that the index finds where to begin.
        rows.first_iteration.between(read.first - stretch.widest, read.last),
        rows.last_iteration >= read.first,
    )


async def _rolled(session: AsyncSession, reads: Sequence[Segment]) -> dict[tuple[int, int], list[Rolled]]:
    """Core, and no ORM: a wide window is a thousand rows."""
    rows = models.table(models.RollupRecord).c
    made: dict[tuple[int, int], dict[int, Rolled]] = {}
    connection = await session.connection()
    for some in _some(reads):
        query = select(
            rows.stretch,
            rows.level,
            rows.bucket,
            rows.first_iteration,
            rows.last_iteration,
            rows.rows,
            rows.columns,
        ).where(or_(*map(_lies, some)))
        # all at once: one by one, the rows take as long as the question
        for stretch, level, bucket, first, last, count, columns in (await connection.execute(query)).all():
            made.setdefault((stretch, level), {})[bucket] = (first, last, count, columns)
    return {place: [buckets[bucket] for bucket in sorted(buckets)] for place, buckets in made.items()}


def _lies(read: Segment) -> ColumnElement[bool]:
    rows, level = models.RollupRecord, read.level
    buckets = rows.bucket.between(read.first >> level, read.last >> level)
    return and_(rows.stretch == read.stretch.id, rows.level == level, buckets)


def _some(reads: Sequence[Segment]) -> Iterator[list[Segment]]:
    left = iter(reads)
    while some := list(islice(left, READS_AT_ONCE)):
        yield some
