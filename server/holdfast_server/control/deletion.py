"""Deletion of a job and all its rows, in transactions small enough for reports to be stored in between."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sqlalchemy import ColumnElement, Table, delete, exists, func, select, tuple_
from sqlalchemy.orm import Session

from holdfast_server import models
from holdfast_server.control.accounting import DELETION, account_job
from holdfast_server.core.errors import NotPossible
from holdfast_server.db import Database
from holdfast_server.queries.job_view import find_job
from holdfast_server.records import audit
from holdfast_server.records.job_status import status_of

ROWS_AT_ONCE = 500
"""Rows deleted in one transaction, for which reports wait."""

_jobs = models.table(models.JobRecord)


def delete_job(db: Database, job: str, *, who: str, now: float) -> None:
    """Delete a job and all its rows, except those of the audit log and the account; its checkpoint store stays.

    A later report under the same name creates a new job.

    Raises:
        UnknownJob.
        NotPossible: it is running, is protected, or reported during the deletion.
    """
    account_job(db, job, now=now)
    last_contact_at = db.write(partial(_begin, job=job, who=who, now=now), job=job)
    some = partial(_delete_some, job=job, last_contact_at=last_contact_at)
    while db.write(some, job=job) == ROWS_AT_ONCE:
        pass
    db.write(partial(_end, job=job, last_contact_at=last_contact_at), job=job, at_once=True)


def _begin(session: Session, *, job: str, who: str, now: float) -> float:
    """Record the deletion in the audit log, and return the time of the job's last contact.

    Requests that delete the job at the same time, or go on with an interrupted deletion, share one record.
    """
    row = find_job(session, job)
    if row.protected:  # a start under its name would be a job without protection
        raise NotPossible(f"job {job!r} is protected: remove the protection first, which a second person approves")
    attempt = session.get(models.AttemptRecord, (job, row.uid))
    status = status_of(row, attempt, now=now)
    if attempt is not None and status.alive:
        raise NotPossible(
            f"job {job!r} is {status.status}, and its next report would create it again: stop it first, or revoke "
            "its API key"
        )
    log = models.AuditEntryRecord
    begun = select(log.id).where(log.job == job, log.action == DELETION, log.at > row.last_contact_at).limit(1)
    if session.scalar(begun) is not None:
        return row.last_contact_at
    attempts = models.AttemptRecord
    count = session.scalar(select(func.count()).where(attempts.job == job))
    before = {"attempts": count, "iteration": row.iteration, "created_at": row.created_at}
    audit.record(session, who=who, action=DELETION, now=now, job=job, project=row.project, before=before)
    return row.last_contact_at


def _require_silent(session: Session, job: str, last_contact_at: float) -> None:
    """Raise `NotPossible` for a job that reported again, or that a report created again after another deletion."""
    row = find_job(session, job)
    if row.last_contact_at != last_contact_at:
        raise NotPossible(
            f"job {job!r} reported again during its deletion, which has removed part of its earlier reports: "
            "stop it, and delete it again"
        )


def _end(session: Session, *, job: str, last_contact_at: float) -> None:
    _require_silent(session, job, last_contact_at)
    # rows that a superseded attempt added in between: usually none
    for table in _tables():
        session.execute(delete(table).where(_of_job(table, job)))
    session.execute(delete(_jobs).where(_jobs.c.name == job))
    writers, stores = models.StoreWriterRecord, models.StoreRecord
    session.execute(delete(stores).where(~exists().where(writers.store == stores.id)))


def _delete_some(session: Session, *, job: str, last_contact_at: float) -> int:
    """Delete at most `ROWS_AT_ONCE` rows, and return their number.

    It begins with the first table each time: rows may have been added since, as by an alert that fires meanwhile.
    """
    _require_silent(session, job, last_contact_at)
    deleted = 0
    for table in _tables():
        key = list(table.primary_key.columns)
        some = select(*key).where(_of_job(table, job)).limit(ROWS_AT_ONCE - deleted)
        gone = delete(table).where((key[0] if len(key) == 1 else tuple_(*key)).in_(some))
        found = session.execute(gone, execution_options={"synchronize_session": False})
        deleted += int(found.rowcount)  # type: ignore[attr-defined]
        if deleted == ROWS_AT_ONCE:
            break
    return deleted


def _tables() -> list[Table]:
    """Return the tables that hold rows of jobs, each before the tables that it refers to."""
    return [
        table
        for table in reversed(models.Base.metadata.sorted_tables)
        if table is not _jobs and _references(table)
    ]


def _of_job(table: Table, job: str) -> ColumnElement[bool]:
    """Return the condition for a job's rows of a table, which refer to the job or to another of its rows."""
    column, parent = _references(table)[0]
    if parent is _jobs:
        return column == job
    (key,) = parent.primary_key.columns
    return column.in_(select(key).where(parent.c.job == job))


def _references(table: Table) -> Sequence[tuple[ColumnElement[str], Table]]:
    """Return the columns that refer to a job, then those that refer to another table with rows of jobs."""
    found = [(key.parent, key.column.table) for key in table.foreign_keys]
    direct = [(column, parent) for column, parent in found if parent is _jobs]
    indirect = [
        (column, parent)
        for column, parent in found
        if any(key.column.table is _jobs for key in parent.foreign_keys)
    ]
    return direct + indirect
