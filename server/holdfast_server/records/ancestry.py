"""Lineages: which iterations stand, on the way from a job's start to where it is."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import CTE, BigInteger, BindParameter, Select, and_, bindparam, case, cast, func, literal, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.protocol.messages import checkpoint_id, parse_checkpoint_id
from holdfast.protocol.timeline import LineageRow
from holdfast_server import models
from holdfast_server.db import named_jobs

END = sys.maxsize
_LINEAGE_AT = len(checkpoint_id(0, 0))
"""Where the lineage begins in a checkpoint's id, counted from 1 as SQL does."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Where a lineage begins, and on which other one."""

    lineage: int
    iteration: int
    parent: str | None


class Ancestry:
    """The way to one lineage: each lineage on it, with its last iteration that belongs to the way."""

    def __init__(self, branches: Iterable[Branch | models.LineageRecord], lineage: int) -> None:
        known = {branch.lineage: branch for branch in branches}
        self.upto: dict[int, int] = {}
        end = END
        while lineage not in self.upto:
            self.upto[lineage] = end
            branch = known.get(lineage)
            if branch is None or branch.parent is None:
                break
            lineage = parse_checkpoint_id(branch.parent)[1]
            end = min(end, branch.iteration)

    def __contains__(self, place: tuple[int, int]) -> bool:
        iteration, lineage = place
        return iteration <= self.upto.get(lineage, -1)

    def fork(self, other: Ancestry, limit: int) -> int:
        """The last iteration, up to `limit`, that both ways share; 0 when they share none."""
        shared = (min(end, other.upto.get(lineage, 0)) for lineage, end in self.upto.items())
        return min(limit, max(shared, default=0))

    def as_row(self, row: models.LineageRecord) -> LineageRow:
        upto = self.upto.get(row.lineage)
        return LineageRow(
            lineage=row.lineage,
            iteration=row.iteration,
            parent=row.parent,
            order=row.order_id,
            at=row.at,
            last_iteration=row.last_iteration,
            abandoned=upto is None,
            stands_until=-1 if upto is None else min(upto, row.last_iteration),
        )


async def ancestry_of(session: AsyncSession, job: models.JobRecord, lineage: int | None = None) -> Ancestry:
    """The way to where the job is now, or to one of its lineages."""
    found = await branches(session, [job.name])
    return Ancestry(found.get(job.name, []), job.lineage if lineage is None else lineage)


async def branches(session: AsyncSession, jobs: list[str]) -> dict[str, list[Branch]]:
    found: dict[str, list[Branch]] = {}
    for job, lineage, iteration, parent in await session.execute(_of_branches(), {"jobs": jobs}):
        found.setdefault(job, []).append(Branch(lineage, iteration, parent))
    return found


@cache
def _of_branches() -> Select[str, int, int, str | None]:
    rows = models.LineageRecord
    return select(rows.job, rows.lineage, rows.iteration, rows.parent).where(rows.job.in_(named_jobs()))


async def lineages_of(session: AsyncSession, job: str) -> Sequence[models.LineageRecord]:
    return (await session.scalars(_of_lineages(), {"job": job})).all()


@cache
def _of_lineages() -> Select[models.LineageRecord]:
    rows = models.LineageRecord
    return select(rows).where(rows.job == bindparam("job")).order_by(rows.lineage)


def ancestries(jobs: BindParameter[Any] | Select[str]) -> CTE:
    """What `Ancestry` is for one job, of many jobs in one statement: rows (job, lineage, upto).

    `jobs`: `db.named_jobs()`, or a question that finds them.
    """
    job, lineage = models.JobRecord, models.LineageRecord
    way = (
        select(job.name.label("job"), job.lineage.label("lineage"), literal(END, BigInteger).label("upto"))
        .where(job.name.in_(jobs))
        .cte("way", recursive=True)
    )
    parent = cast(func.substr(lineage.parent, _LINEAGE_AT), BigInteger)
    upto = case((lineage.iteration < way.c.upto, lineage.iteration), else_=way.c.upto)
    here = and_(lineage.job == way.c.job, lineage.lineage == way.c.lineage)
    # UNION, not UNION ALL: reports that lead in a circle come to an end.
    return way.union(select(way.c.job, parent, upto).join(lineage, here).where(lineage.parent.is_not(None)))
