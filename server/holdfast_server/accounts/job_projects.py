"""The project of each job, cached for a moment: every request's access decision depends on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from sqlalchemy import select

from holdfast_server import models
from holdfast_server.accounts.auth_backends import CACHE_SECONDS, ExpiringCache
from holdfast_server.core.errors import UnknownJob
from holdfast_server.core.principal import Principal
from holdfast_server.db import Database


class JobProjects:
    """Shared by an application's requests. A job that moves is seen in its new project within seconds."""

    def __init__(self, db: Database, *, seconds: Callable[[], float] = time.monotonic) -> None:
        self._db = db
        self._projects: ExpiringCache[str, str] = ExpiringCache(CACHE_SECONDS, seconds)

    async def project_of(self, job: str) -> str | None:
        """Return the job's project, or `None` for an unknown job. That is not cached: it may report in a
        moment."""
        if job in self._projects:
            return self._projects[job]
        found = await self._db.ask("access", partial(self._find, job))
        if found is not None:
            self._projects[job] = found
        return found

    def _find(self, job: str) -> str | None:
        with self._db.read() as session:
            return session.scalar(select(models.JobRecord.project).where(models.JobRecord.name == job))

    async def is_hidden(self, asker: Principal, job: str) -> bool:
        """Return whether the job belongs to a project in which the asker has no rights."""
        if asker.admin:
            return False
        project = await self.project_of(job)
        return project not in (None, asker.project) and asker.role_in(str(project)) is None

    async def project_for_report(self, asker: Principal, job: str) -> str | None:
        """Return the project that a report on the job is stored in, or `None` if the asker may report on any job.

        Raises:
            UnknownJob: the asker may not report on it.
        """
        if asker.admin and asker.kind == "person":
            return None
        if asker.job not in (None, job) or await self.project_of(job) not in (None, asker.project):
            raise UnknownJob(job)
        return asker.project
