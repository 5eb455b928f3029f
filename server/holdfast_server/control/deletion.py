"""Deleting a job with everything that is stored of it, in transactions small enough for reports to pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sqlalchemy import ColumnElement, Table, delete, func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_server import models
from holdfast_server.core.errors import NotPossible
from holdfast_server.db import Database
from holdfast_server.queries.summaries import find_job
from holdfast_server.records import audit
from holdfast_server.records.job_status import status_of

ROWS_AT_ONCE = 500
"""Rows that go in one transaction, behind which reports wait."""

_jobs = models.table(models.JobRecord)


async def delete_job(db: Database, job: str, *, who: str, now: float) -> None:
    """Remove a job and all rows of it; its store and its rows in the audit log stay.

    A later report under the same name begins a new job.

    Raises:
        UnknownJob.
        NotPossible: it is running, or it reported while it was being deleted.
    """
    heard_at = await db.write(partial(_begin, job=job, who=who, now=now), job=job)
    for table in _tables():
        some = partial(_delete_some, table=table, job=job, heard_at=heard_at)
        while await db.write(some, job=job) == ROWS_AT_ONCE:
            pass
    await db.write(partial(_end, job=job, heard_at=heard_at), job=job, at_once=True)


async def _begin(session: AsyncSession, *, job: str, who: str, now: float) -> float:
    """When the job was last heard of. The audit log has the deletion before the first row goes."""
    row = await find_job(session, job)
    attempt = await session.get(models.AttemptRecord, (job, row.uid))
    status = status_of(row, attempt, now=now)
    if attempt is not None and status.alive:
        raise NotPossible(
            f"job {job!r} is {status.status}, and its next report would bring it back: stop it first, or revoke "
            "the key that it reports with"
        )
    attempts = models.AttemptRecord
    count = await session.scalar(select(func.count()).where(attempts.job == job))
    before = {"attempts": count, "iteration": row.iteration, "created_at": row.created_at}
    await audit.record(session, who=who, action="job.delete", now=now, job=job, project=row.project, before=before)
    return row.last_contact_at


async def _require_silent(session: AsyncSession, job: str, heard_at: float) -> None:
    """NotPossible for a job that reported again, or that another deletion removed and a report began anew."""
    row = await find_job(session, job)
    if row.last_contact_at != heard_at:
        raise NotPossible(
            f"job {job!r} reported again while it was being deleted: part of what it had reported before is gone; "
            "stop it, and delete it again"
        )


async def _end(session: AsyncSession, *, job: str, heard_at: float) -> None:
    await _require_silent(session, job, heard_at)
    # usually nothing: only rows that came in between, of an attempt that is not the current one
    for table in _tables():
        await session.execute(delete(table).where(_of_job(table, job)))
    await session.execute(delete(_jobs).where(_jobs.c.name == job))


async def _delete_some(session: AsyncSession, *, table: Table, job: str, heard_at: float) -> int:
    await _require_silent(session, job, heard_at)
    key = list(table.primary_key.columns)
    some = select(*key).where(_of_job(table, job)).limit(ROWS_AT_ONCE)
    gone = delete(table).where((key[0] if len(key) == 1 else tuple_(*key)).in_(some))
    found = await session.execute(gone, execution_options={"synchronize_session": False})
    return int(found.rowcount)  # type: ignore[attr-defined]


def _tables() -> list[Table]:
    """Those that hold rows of jobs, so that what refers to a row goes before it does."""
    return [
        table
        for table in reversed(models.Base.metadata.sorted_tables)
        if table is not _jobs and _references(table)
    ]


def _of_job(table: Table, job: str) -> ColumnElement[bool]:
    """Which rows of a table are a job's: by its name, or by the row of the job that they refer to."""
    column, parent = _references(table)[0]
    if parent is _jobs:
        return column == job
    (key,) = parent.primary_key.columns
    return column.in_(select(key).where(parent.c.job == job))


def _references(table: Table) -> Sequence[tuple[ColumnElement[str], Table]]:
    """Its columns that refer to a job, and then those that refer to a row of one."""
    found = [(key.parent, key.column.table) for key in table.foreign_keys]
    direct = [(column, parent) for column, parent in found if parent is _jobs]
    indirect = [
        (column, parent)
        for column, parent in found
        if any(key.column.table is _jobs for key in parent.foreign_keys)
    ]
    return direct + indirect
