"""Projects: groups of jobs, and the people who have roles in them."""

from __future__ import annotations

import re

from msgspec import Struct
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from holdfast_server import models
from holdfast_server.core.encoding import answer_from
from holdfast_server.core.errors import InvalidSetting, NotPossible, UnknownProject
from holdfast_server.core.principal import Principal, Role
from holdfast_server.db import Database, job_transaction, transaction
from holdfast_server.queries.job_view import find_job
from holdfast_server.records import audit

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


class ProjectSummary(Struct, frozen=True, kw_only=True):
    name: str
    created_at: float
    jobs: int
    members: int


class ProjectMember(Struct, frozen=True, kw_only=True):
    person: str
    role: str


def list_projects(db: Database, asker: Principal, *, role: Role = Role.viewer) -> list[ProjectSummary]:
    """List the projects in which the asker has the role or a higher one, by name."""
    projects, jobs, members = models.ProjectRecord, models.JobRecord, models.MembershipRecord
    job_count = select(func.count()).where(jobs.project == projects.name).scalar_subquery()
    member_count = select(func.count()).where(members.project == projects.name).scalar_subquery()
    query = select(
        projects.name, projects.created_at, job_count.label("jobs"), member_count.label("members")
    ).order_by(projects.name)
    visible = asker.projects_with_role(role)
    if visible is not None:
        query = query.where(projects.name.in_(visible))
    with db.read() as session:
        return [answer_from(row, ProjectSummary) for row in session.execute(query)]


def list_members(db: Database, project: str) -> list[ProjectMember]:
    """List a project's members by name. Raises UnknownProject."""
    table = models.MembershipRecord
    with db.read() as session:
        require_project(session, project)
        found = session.scalars(select(table).where(table.project == project).order_by(table.person))
        return [answer_from(row, ProjectMember) for row in found]


def require_project(session: Session, project: str) -> None:
    """Raises UnknownProject."""
    if session.get(models.ProjectRecord, project) is None:
        raise UnknownProject(project)


@transaction
def add(session: Session, name: str, *, who: str, now: float) -> str:
    """Add a project and return its name as it is stored. Raises InvalidSetting, NotPossible."""
    name = name.strip().lower()
    if _NAME.fullmatch(name) is None:
        reason = "use 1 to 63 letters a to z, digits and . _ -, starting with a letter or a digit"
        raise InvalidSetting("name", reason)
    if session.get(models.ProjectRecord, name) is not None:
        raise NotPossible(f"project {name!r} exists already")
    session.add(models.ProjectRecord(name=name, created_at=now))
    session.flush()
    audit.record(session, who=who, action="project.add", now=now, project=name)
    return name


@job_transaction
def move_job(session: Session, job: str, project: str, *, who: str, now: float) -> None:
    """Move a job, so that roles in the project apply to it. Raises UnknownJob, UnknownProject."""
    row = find_job(session, job)
    require_project(session, project)
    if row.project == project:
        return
    before, row.project = row.project, project
    session.flush()
    # Alerts move with the job: otherwise people who may no longer see the job would still see them.
    alerts = models.AlertRecord
    session.execute(update(alerts).where(alerts.job == job).values(project=project))
    audit.record(
        session, who=who, action="job.move", now=now, job=job, project=project,
        before={"project": before}, after={"project": project},
    )  # fmt: skip
