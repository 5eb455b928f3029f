"""Ancestry of lineages: which iterations stand between a job's start and its current position."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from sqlalchemy import (
    CTE,
    BigInteger,
    BindParameter,
    Row,
    Select,
    and_,
    bindparam,
    case,
    cast,
    func,
    literal,
    select,
)
from sqlalchemy.orm import Session

from holdfast.protocol.ids import checkpoint_id, parse_checkpoint_id
from holdfast.protocol.timeline import LineageInfo
from holdfast.protocol.wire import LeftOutData
from holdfast_server import models
from holdfast_server.core.encoding import answer_from
from holdfast_server.db import named_jobs

LineageStart = Row[str, int, int, str | None, str | None, str | None, str | None]
"""Columns job, lineage, iteration, parent, inexact, left_out and from_job of a lineage."""
END = sys.maxsize
_LINEAGE_AT = len(checkpoint_id(0, 0))
"""Position of the lineage number in a checkpoint id, counted from 1 as SQL does."""
_rows = models.LineageRecord
_LINEAGE_STARTS = select(
    _rows.job, _rows.lineage, _rows.iteration, _rows.parent, _rows.inexact, _rows.left_out, _rows.from_job
).where(_rows.job.in_(named_jobs()))
_left_out = msgspec.json.Decoder(tuple[LeftOutData, ...])
_LINEAGES = select(_rows).where(_rows.job == bindparam("job")).order_by(_rows.lineage)


class Ancestry:
    """The lineages from a job's start to one lineage, each with its last iteration that still stands."""

    def __init__(self, lineages: Iterable[LineageStart | models.LineageRecord], lineage: int) -> None:
        known = {start.lineage: start for start in lineages}
        self.inexact = {number: start.inexact for number, start in known.items()}
        """The checkpoint whose degraded restore a lineage descends from, by number; None if it is exact."""
        start = known.get(lineage)
        self.left_out = _left_out.decode(start.left_out) if start is not None and start.left_out else ()
        """Data that was left out on the way to the lineage."""
        self.upto: dict[int, int] = {}
        end = END
        while lineage not in self.upto:
            self.upto[lineage] = end
            start = known.get(lineage)
            if start is None or start.parent is None:
                break
            lineage = parse_checkpoint_id(start.parent)[1]
            end = min(end, start.iteration)

    def __contains__(self, place: tuple[int, int]) -> bool:
        iteration, lineage = place
        return iteration <= self.upto.get(lineage, -1)

    def lineage_at(self, iteration: int) -> int:
        """Return the lineage that trained an iteration of this path."""
        return min((end, lineage) for lineage, end in self.upto.items() if end >= iteration)[1]

    def fork(self, other: Ancestry, limit: int) -> int:
        """Return the last iteration, up to `limit`, that both ancestries share; 0 when they share none."""
        shared = (min(end, other.upto.get(lineage, 0)) for lineage, end in self.upto.items())
        return min(limit, max(shared, default=0))

    def as_row(self, row: models.LineageRecord) -> LineageInfo:
        upto = self.upto.get(row.lineage)
        until = -1 if upto is None else min(upto, row.last_iteration)
        left_out = _left_out.decode(row.left_out) if row.left_out else ()
        return answer_from(
            row, LineageInfo, order=row.order_id, abandoned=upto is None, stands_until=until, left_out=left_out
        )


def ancestry_of(session: Session, job: models.JobRecord, lineage: int | None = None) -> Ancestry:
    """Return the ancestry of a lineage, by default of the job's current one."""
    found = lineage_starts(session, [job.name])
    return Ancestry(found.get(job.name, []), job.lineage if lineage is None else lineage)


def lineage_starts(session: Session, jobs: list[str]) -> dict[str, list[LineageStart]]:
    """Return by job where each of its lineages begins, and from which checkpoint."""
    found: dict[str, list[LineageStart]] = {}
    for row in session.execute(_LINEAGE_STARTS, {"jobs": jobs}):
        found.setdefault(row.job, []).append(row)
    return found


def lineages_of(session: Session, job: str) -> Sequence[models.LineageRecord]:
    return session.scalars(_LINEAGES, {"job": job}).all()


def ancestries(jobs: BindParameter[Any] | Select[str]) -> CTE:
    """Select the ancestries of many jobs in one statement, as rows of (job, lineage, upto).

    `jobs`: `db.named_jobs()`, or a query that selects their names.
    """
    job, lineage = models.JobRecord, models.LineageRecord
    ancestry = (
        select(job.name.label("job"), job.lineage.label("lineage"), literal(END, BigInteger).label("upto"))
        .where(job.name.in_(jobs))
        .cte("ancestry", recursive=True)
    )
    parent = cast(func.substr(lineage.parent, _LINEAGE_AT), BigInteger)
    upto = case((lineage.iteration < ancestry.c.upto, lineage.iteration), else_=ancestry.c.upto)
    here = and_(lineage.job == ancestry.c.job, lineage.lineage == ancestry.c.lineage)
    # UNION, not UNION ALL: the recursion ends even where reported parents form a cycle.
    return ancestry.union(
        select(ancestry.c.job, parent, upto).join(lineage, here).where(lineage.parent.is_not(None))
    )
