"""The archive: ended jobs that lists leave out until a user asks for them, or until they start again."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from sqlalchemy.orm import Session

from holdfast_server.db import Database
from holdfast_server.queries.job_view import find_job
from holdfast_server.records import audit


class _Reported(Protocol):
    @property
    def archived_at(self) -> float | None: ...
    @property
    def last_contact_at(self) -> float: ...


def is_archived(job: _Reported) -> bool:
    """Return whether a job is archived. A later report is a new start, which unarchives it."""
    return job.archived_at is not None and job.archived_at >= job.last_contact_at


def mark(db: Database, job: str, *, archived: bool, who: str, now: float) -> None:
    """Archive or unarchive a job, with a row of the audit log.

    Raises:
        UnknownJob.
    """
    db.write(partial(_mark, job=job, archived=archived, who=who, now=now), job=job)


def _mark(session: Session, *, job: str, archived: bool, who: str, now: float) -> None:
    row = find_job(session, job)
    row.archived_at = max(now, row.last_contact_at) if archived else None
    action = "job.archive" if archived else "job.unarchive"
    audit.record(session, who=who, action=action, now=now, job=job, project=row.project)
