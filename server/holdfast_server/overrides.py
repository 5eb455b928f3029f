"""Intervals that were ordered for a while: when it is over, the policy decides again."""

from __future__ import annotations

from functools import partial

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.answers import DesiredChanges
from holdfast_server import audit, desired, models
from holdfast_server.db import Database

EVERY_SECONDS = 10.0
SERVER = "the server"


async def end(db: Database, now: float) -> None:
    """End the intervals whose time is over."""
    jobs = models.Job
    async with db.read() as session:
        found = (await session.scalars(select(jobs.name).where(jobs.every_until <= now))).all()
    for job in found:
        await db.write(partial(_end, job=job, now=now), job=job, at_once=True)


async def _end(session: AsyncSession, *, job: str, now: float) -> None:
    row = await session.get(models.Job, job)
    if row is None or row.every_until is None or row.every_until > now:
        return  # somebody has ordered another one meanwhile
    made = desired.change(row, DesiredChanges(every=None), now=now)
    desired.bump(session, row, made, who=SERVER, now=now)
    await session.flush()
    await audit.record(
        session, who=SERVER, action="settings.edit", now=now, job=job, project=row.project,
        before={"interval": made[0].before}, after={"interval": made[0].after, "version": row.version},
    )  # fmt: skip
