"""A job as one read sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_server import models
from holdfast_server.core.errors import UnknownJob
from holdfast_server.db import Database
from holdfast_server.records.ancestry import Ancestry, LineageStart, lineage_starts


class JobView:
    """A job, found once, in the session of one read: queries about the job take it, and pages pass it on.

    All answers from one view are consistent. Lineages are read when the first query needs them.
    """

    def __init__(self, session: AsyncSession, job: models.JobRecord, *, now: float) -> None:
        self.session = session
        self.job = job
        self.name = job.name
        self.now = now
        """Time of the request in seconds since the epoch."""
        self._lineages: list[LineageStart] | None = None

    async def lineages(self) -> list[LineageStart]:
        """Return where each lineage begins, and from which checkpoint."""
        if self._lineages is None:
            self._lineages = (await lineage_starts(self.session, [self.name])).get(self.name, [])
        return self._lineages

    async def ancestry(self, lineage: int | None = None) -> Ancestry:
        """Return the ancestry of a lineage, by default of the current one."""
        return Ancestry(await self.lineages(), self.job.lineage if lineage is None else lineage)


async def find_job(session: AsyncSession, job: str) -> models.JobRecord:
    row = await session.get(models.JobRecord, job)
    if row is None:
        raise UnknownJob(job)
    return row


@asynccontextmanager
async def view_job(db: Database, job: str, *, now: float) -> AsyncIterator[JobView]:
    """Open a read session and find a job. Raises UnknownJob."""
    async with db.read() as session:
        yield JobView(session, await find_job(session, job), now=now)
