"""Projects: jobs that belong together, and who may do what with them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_server import models
from holdfast_server.core.errors import InvalidSetting, NotPossible, UnknownProject
from holdfast_server.core.principal import Principal, Role
from holdfast_server.db import Database
from holdfast_server.queries.summaries import find_job
from holdfast_server.records import audit

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectRow:
    name: str
    created_at: float
    jobs: int
    members: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRow:
    person: str
    role: str


async def rows(db: Database, asker: Principal, *, role: Role = Role.viewer) -> list[ProjectRow]:
    """Those in which the asker may do what the role may, by name."""
    projects, jobs, members = models.ProjectRecord, models.JobRecord, models.MembershipRecord
    of_jobs = select(func.count()).where(jobs.project == projects.name).scalar_subquery()
    of_members = select(func.count()).where(members.project == projects.name).scalar_subquery()
    query = select(projects.name, projects.created_at, of_jobs, of_members).order_by(projects.name)
    visible = asker.projects_as(role)
    if visible is not None:
        query = query.where(projects.name.in_(visible))
    async with db.read() as session:
        return [
            ProjectRow(name=name, created_at=created_at, jobs=jobs, members=members)
            for name, created_at, jobs, members in await session.execute(query)
        ]


async def members(db: Database, project: str) -> list[MemberRow]:
    """By name. Raises UnknownProject."""
    table = models.MembershipRecord
    async with db.read() as session:
        if await session.get(models.ProjectRecord, project) is None:
            raise UnknownProject(project)
        found = await session.scalars(select(table).where(table.project == project).order_by(table.person))
        return [MemberRow(person=row.person, role=row.role) for row in found]


async def add(db: Database, name: str, *, who: str, now: float) -> str:
    """The name as it is kept. Raises InvalidSetting, NotPossible."""
    name = name.strip().lower()
    if _NAME.fullmatch(name) is None:
        reason = (
            "a project's name has 1 to 63 letters a to z, digits and . _ -, and begins with a letter or a digit"
        )
        raise InvalidSetting("name", reason)

    async def work(session: AsyncSession) -> str:
        if await session.get(models.ProjectRecord, name) is not None:
            raise NotPossible(f"there is a project {name!r} already")
        session.add(models.ProjectRecord(name=name, created_at=now))
        await session.flush()
        await audit.record(session, who=who, action="project.add", now=now, project=name)
        return name

    return await db.write(work)


async def move_job(db: Database, job: str, project: str, *, who: str, now: float) -> None:
    """Who has rights in the project has them on the job from then on. Raises UnknownJob, UnknownProject."""

    async def work(session: AsyncSession) -> None:
        row = await find_job(session, job)
        if await session.get(models.ProjectRecord, project) is None:
            raise UnknownProject(project)
        if row.project == project:
            return
        before, row.project = row.project, project
        await session.flush()
        # What was told of the job goes where the job is: else people who may not see it any more still would.
        alerts = models.AlertRecord
        await session.execute(update(alerts).where(alerts.job == job).values(project=project))
        await audit.record(
            session, who=who, action="job.move", now=now, job=job, project=project,
            before={"project": before}, after={"project": project},
        )  # fmt: skip

    await db.write(work, job=job)
