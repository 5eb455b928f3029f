"""Which job a job was forked from, and which were forked from it."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.answers import Family, ForkRow, ForkSource
from holdfast.protocol import parse_checkpoint_id
from holdfast_server import models
from holdfast_server.db import Database
from holdfast_server.summaries import find_job

MOST_FORKS = 200


async def family(db: Database, job: str, *, visible: Collection[str] | None = None) -> Family:
    """Where a job comes from, and its forks, the newest first.

    `visible`: the projects of which names may be told; None: of all. Raises UnknownJob.
    """
    async with db.read() as session:
        await find_job(session, job)
        found = Family(origin=await _origin(session, job), forks=await _forks(session, job, visible))
    return found if visible is None else _as_seen(found, visible)


async def _origin(session: AsyncSession, job: str) -> ForkSource | None:
    rows, jobs = models.Lineage, models.Job
    query = (
        select(rows.from_job, rows.from_checkpoint, rows.from_digest, jobs.project)
        .outerjoin(jobs, jobs.name == rows.from_job)
        .where(rows.job == job, rows.from_job.is_not(None))
        .order_by(rows.lineage)
        .limit(1)
    )
    found = (await session.execute(query)).first()
    if found is None:
        return None
    name, checkpoint, digest, project = found
    assert checkpoint is not None  # the three are written together
    iteration, lineage = parse_checkpoint_id(checkpoint)
    return ForkSource(
        job=name, project=project, checkpoint=checkpoint, iteration=iteration, lineage=lineage, digest=digest or ""
    )


async def _forks(session: AsyncSession, job: str, visible: Collection[str] | None) -> list[ForkRow]:
    rows, jobs = models.Lineage, models.Job
    query = (
        select(rows, jobs.project)
        .join(jobs, jobs.name == rows.job)
        .where(rows.from_job == job)
        .order_by(rows.at.desc(), rows.job)
        .limit(MOST_FORKS)
    )
    if visible is not None:
        query = query.where(jobs.project.in_(visible))
    return [
        ForkRow(
            job=row.job, project=project, checkpoint=row.from_checkpoint or "", iteration=row.iteration,
            lineage=row.lineage, at=row.at,
        )
        for row, project in await session.execute(query)
    ]  # fmt: skip


def _as_seen(found: Family, visible: Collection[str]) -> Family:
    """What is in another project is not named: not even that it is there, but for that this one comes from it."""
    origin = found.origin
    if origin is not None and origin.project is not None and origin.project not in visible:
        origin = msgspec.structs.replace(origin, job=None, project=None)
    return Family(origin=origin, forks=found.forks)
