"""Which project a job belongs to, as it was a moment ago: rights go by it, at each request."""

from __future__ import annotations

import time
from collections.abc import Callable

from sqlalchemy import select

from holdfast_server import models
from holdfast_server.accounts.auth_backends import REMEMBERED_SECONDS, Remembered
from holdfast_server.core.errors import UnknownJob
from holdfast_server.core.principal import Principal
from holdfast_server.db import Database


class Belonging:
    """One for an application; a job that was moved elsewhere is known there within seconds."""

    def __init__(self, db: Database, *, seconds: Callable[[], float] = time.monotonic) -> None:
        self._db = db
        self._projects: Remembered[str, str] = Remembered(REMEMBERED_SECONDS, seconds)

    async def project_of(self, job: str) -> str | None:
        """None for a job that nobody has heard of: it may report in a moment."""
        if job in self._projects:
            return self._projects[job]
        async with self._db.read() as session:
            found = await session.scalar(select(models.JobRecord.project).where(models.JobRecord.name == job))
        if found is not None:
            self._projects[job] = found
        return found

    async def hidden(self, asker: Principal, job: str) -> bool:
        """Whether a job is of a project in which the asker has no rights, so that they must not learn of it."""
        project = await self.project_of(job)
        return project not in (None, asker.project) and asker.role_in(str(project)) is None

    async def reporting(self, asker: Principal, job: str) -> str | None:
        """The project that a report of this job is for; None for one who may report of any.

        Raises:
            UnknownJob: it is not the asker's to report of.
        """
        if asker.admin and asker.kind == "person":
            return None
        if asker.job not in (None, job) or await self.project_of(job) not in (None, asker.project):
            raise UnknownJob(job)
        return asker.project
