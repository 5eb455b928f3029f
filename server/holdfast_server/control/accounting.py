"""The background job that keeps the account: it sums the hours that reports have changed since its last run.

An hour is computed anew until all reports about it have arrived, and again if a restart or a restore discards
iterations of it. What is stored follows from the reports alone, so that an interrupted run is simply repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, and_, delete, exists, func, insert, literal, select
from sqlalchemy.orm import Session

from holdfast_server import models
from holdfast_server.db import Database, DatabaseClosed, DatabaseUnavailable
from holdfast_server.db import insert as insert_into
from holdfast_server.queries.account_hours import (
    DAY,
    DOWN_SECONDS,
    FIGURES,
    HOUR,
    AccountGroup,
    JobHours,
    StoredBytes,
    account_hours,
    stored_bytes,
    stores_of,
)
from holdfast_server.records import store_disks
from holdfast_server.records.job_status import current_attempt
from holdfast_server.records.rank_totals import bucket_of

EVERY_SECONDS = 300.0
KEPT_HOURS_SECONDS, KEPT_DAYS_SECONDS = 3 * DAY, 40 * DAY
"""How long hours and days are kept. Changes before the latter are ignored."""
LATE_SECONDS = 3600.0
"""How long after a report an earlier one of the same job may still arrive."""
CLOCK_SECONDS = 86400.0
"""Tolerated difference between the clocks of two hosts of a job."""
DELETION = "job.delete"
"""What the audit log calls a deletion."""
JOBS_AT_ONCE, JOB_HOURS_AT_ONCE = 200, 10_000
"""Most jobs, and about the most hours of jobs, that are computed together."""
SPREAD_SECONDS = 6 * 3600.0
"""Most difference between the hours from which on jobs are computed together."""
MOST_OF_HOUR = 2**50
"""Largest figure of an hour: a sum of all hours of a month fits 64 bits, whatever a job reports."""
MOST_LONG_JOBS = 1000
"""Most jobs of which a run computes more than `KEPT_HOURS_SECONDS`; the next runs continue."""

logger = logging.getLogger(__name__)

_groups, _periods = models.AccountGroupRecord, models.AccountPeriodRecord
_marks = models.AccountJobRecord


@dataclass(frozen=True, slots=True)
class _Due:
    job: str
    begins_at: float


def keep_account(db: Database, now: float) -> None:
    """Bring the account of all jobs up to date, and delete old periods."""
    with db.read() as session:
        due = sorted(_due_jobs(session, now=now), key=lambda one: (-one.begins_at, one.job))
    recent = [one for one in due if one.begins_at >= now - KEPT_HOURS_SECONDS]
    for some in _parts([*recent, *due[len(recent) :][:MOST_LONG_JOBS]], now=now):
        try:
            _account(db, some, now)
        except (DatabaseClosed, DatabaseUnavailable):
            raise
        except Exception:  # what a job reports must not end the account of the others
            logger.exception("computing the account of %d jobs from %s failed", len(some), some[0].job)
    db.write(partial(_delete_old, now=now))


def account_job(db: Database, job: str, *, now: float) -> None:
    """Bring the account of one job up to date, before its reports are deleted."""
    with db.read() as session:
        due = list(_due_jobs(session, now=now, job=job))
    for some in _parts(due, now=now):
        _account(db, some, now)


def _parts(due: Sequence[_Due], *, now: float) -> Iterator[list[_Due]]:
    part: list[_Due] = []
    for one in due:
        most = min(JOBS_AT_ONCE, JOB_HOURS_AT_ONCE * HOUR / (now - one.begins_at + HOUR))
        if part and (len(part) >= most or abs(part[0].begins_at - one.begins_at) > SPREAD_SECONDS):
            yield part
            part = []
        part.append(one)
    if part:
        yield part


# ---- which hours to compute -------------------------------------------------------------------------


def _due_jobs(session: Session, *, now: float, job: str | None = None) -> Iterator[_Due]:
    """Yield the jobs whose account may have changed, each with the first such hour."""
    jobs, attempt = models.JobRecord, models.AttemptRecord
    query = (
        select(jobs.name, jobs.uid, jobs.lineage, func.length(attempt.versions).label("versions"), _marks)
        .outerjoin(attempt, current_attempt())
        .outerjoin(_marks, _marks.job == jobs.name)
        .where(_is_whole())
    )
    if job is not None:
        query = query.where(jobs.name == job)
    else:
        changed = jobs.last_contact_at >= _marks.accounted_at - DOWN_SECONDS - LATE_SECONDS
        query = query.where(_marks.job.is_(None) | changed)
    oldest = now - KEPT_DAYS_SECONDS
    for row in session.execute(query).all():
        mark: models.AccountJobRecord | None = row[4]
        begins_at = oldest
        if mark is not None:
            same = (row.uid, row.lineage, bool(row.versions)) == (mark.uid, mark.lineage, mark.has_begun)
            begins_at = mark.settled_at if same else _discarded_from(session, row.name, row.uid, mark, oldest)
        begins_at = max(oldest, begins_at)
        unit = HOUR if begins_at >= now - KEPT_HOURS_SECONDS + DAY else DAY
        yield _Due(row.name, begins_at // unit * unit)


def _discarded_from(session: Session, job: str, uid: str, mark: models.AccountJobRecord, oldest: float) -> float:
    """Return the time since which restarts and restores may have discarded iterations after the last account."""
    attempts, lineages, totals = models.AttemptRecord, models.LineageRecord, models.RankTotalsRecord
    started = select(attempts.uid, attempts.iteration, func.length(attempts.versions).label("versions")).where(
        attempts.job == job, attempts.started_at >= mark.started_at - CLOCK_SECONDS
    )
    known = session.execute(started).all()
    if uid not in {one.uid for one in known}:
        return oldest  # its clock is unlike that of the attempt before
    restored = select(lineages.iteration).where(lineages.job == job, lineages.lineage > mark.lineage)
    starts = [one.iteration for one in known if one.versions and not (mark.has_begun and one.uid == mark.uid)]
    starts += session.scalars(restored)
    if not starts:
        return mark.settled_at
    first = select(func.min(totals.begins_at)).where(
        totals.job == job, totals.rank == 0, totals.bucket >= bucket_of(oldest),
        totals.last_iteration > min(starts),
    )  # fmt: skip
    discarded = session.scalar(first)
    return mark.settled_at if discarded is None else min(mark.settled_at, discarded)


def _is_whole() -> ColumnElement[bool]:
    """Return whether no deletion of a job has begun, which removes its reports in steps."""
    log, jobs = models.AuditEntryRecord, models.JobRecord
    begun = exists().where(log.job == jobs.name, log.action == DELETION, log.at > jobs.last_contact_at)
    return ~begun


# ---- computing and storing --------------------------------------------------------------------------


def _account(db: Database, due: Sequence[_Due], now: float) -> None:
    begins_at = min(one.begins_at for one in due)
    with db.read() as session:
        query = select(models.JobRecord).where(models.JobRecord.name.in_([one.job for one in due]), _is_whole())
        rows = session.scalars(query).all()
        hours = account_hours(session, rows, begins_at, now=now)
        marks = _new_marks(session, rows, hours, stored_bytes(session, rows), now=now)
    db.write(partial(_store, hours=hours, marks=marks, begins_at=int(begins_at)))


def _new_marks(
    session: Session,
    jobs: Sequence[models.JobRecord],
    hours: Mapping[str, JobHours],
    stored: Mapping[str, StoredBytes],
    *,
    now: float,
) -> list[dict[str, Any]]:
    names = [job.name for job in jobs]
    marks = {mark.job: mark for mark in session.scalars(select(_marks).where(_marks.job.in_(names)))}
    query = select(models.AttemptRecord).join(models.JobRecord, current_attempt())
    attempts = {row.job: row for row in session.scalars(query.where(models.JobRecord.name.in_(names)))}
    made = []
    for job in jobs:
        attempt, mark = attempts.get(job.name), marks.get(job.name)
        started_at = attempt.started_at if attempt else job.created_at
        last = hours[job.name].last_iteration_at
        known_upto = min(job.last_contact_at, started_at if last is None else last)
        settled_at, pending_at, pending_since = known_upto, known_upto, now
        if mark is not None:
            settled_at, pending_at, pending_since = mark.settled_at, mark.pending_at, mark.pending_since
            if now - pending_since >= LATE_SECONDS:
                settled_at, pending_at, pending_since = pending_at, known_upto, now
        one = stored[job.name]
        one.store, one.backing_store = (*(stores_of(attempt) if attempt else []), "", "")[:2]
        made.append(
            {
                "job": job.name, "accounted_at": now, "uid": job.uid, "started_at": started_at,
                "has_begun": bool(attempt and attempt.versions), "lineage": job.lineage,
                "settled_at": settled_at, "pending_at": pending_at, "pending_since": pending_since,
                "store": one.store, "stored_bytes": one.stored_bytes, "backing_store": one.backing_store,
                "backing_bytes": one.backing_bytes, "is_estimate": one.is_estimate,
                "unsized_checkpoints": one.unsized_checkpoints,
            }
        )  # fmt: skip
    return made


def _store(
    session: Session, *, hours: Mapping[str, JobHours], marks: Sequence[Mapping[str, Any]], begins_at: int
) -> None:
    """Replace the hours of jobs since a time, and recompute their days. Deleted jobs keep their last account."""
    jobs = models.JobRecord
    names = set(session.scalars(select(jobs.name).where(jobs.name.in_(hours))))
    ids = _group_ids(session, {group: hour for name in names for group, hour in hours[name].figures})
    same = and_(jobs.name == _groups.job, jobs.created_at == _groups.created_at)
    of_jobs = select(_groups.id).join(jobs, same).where(_groups.job.in_(names))
    day = begins_at // DAY * DAY
    for seconds, since in ((HOUR, begins_at), (DAY, day)):
        old = delete(_periods).where(
            _periods.group_id.in_(of_jobs), _periods.seconds == seconds, _periods.begins_at >= since
        )
        session.execute(old, execution_options={"synchronize_session": False})
    rows = [
        {
            "group_id": ids[group],
            "seconds": HOUR,
            "begins_at": hour,
            **{name: max(-MOST_OF_HOUR, min(figures[name], MOST_OF_HOUR)) for name in FIGURES},
        }
        for name in names
        for (group, hour), figures in hours[name].figures.items()
        if hour >= begins_at
    ]
    if rows:
        session.execute(insert(_periods), rows)
    of_day = (_periods.begins_at // DAY * DAY).label("begins_at")
    sums = [func.sum(getattr(_periods, name)) for name in FIGURES]
    days = (
        select(_periods.group_id, literal(DAY), of_day, *sums)
        .where(_periods.group_id.in_(of_jobs), _periods.seconds == HOUR, _periods.begins_at >= day)
        .group_by(_periods.group_id, of_day)
    )
    session.execute(insert(_periods).from_select(["group_id", "seconds", "begins_at", *FIGURES], days))
    _upsert(session, _marks, [mark for mark in marks if mark["job"] in names], ["job"])


def _upsert(
    session: Session,
    table: type[models.Base],
    rows: Sequence[Mapping[str, Any]],
    key: list[str],
    *,
    newer: str | None = None,
) -> None:
    """Insert or replace rows; with `newer`, only those with a larger value in that column."""
    if rows:
        made = insert_into(session, table)
        changed = {name: made.excluded[name] for name in rows[0] if name not in key}
        where = None if newer is None else made.excluded[newer] >= getattr(table, newer)
        session.execute(made.on_conflict_do_update(index_elements=key, set_=changed, where=where), rows)


def _group_ids(session: Session, newest: Mapping[AccountGroup, int]) -> dict[AccountGroup, int]:
    """Return the ids of groups, which are added if they are new. `newest`: the last hour of each."""
    by_digest = {_digest(group): group for group in newest}
    if not by_digest:
        return {}
    rows = [
        {
            **asdict(group),
            "digest": digest,
            "last_at": newest[group],
        }
        for digest, group in by_digest.items()
    ]
    _upsert(session, _groups, rows, ["digest"], newer="last_at")
    found = session.execute(select(_groups.digest, _groups.id).where(_groups.digest.in_(by_digest)))
    return {by_digest[digest]: number for digest, number in found}


def _digest(group: AccountGroup) -> bytes:
    return blake2b(msgspec.json.encode(astuple(group)), digest_size=16).digest()


def _delete_old(session: Session, *, now: float) -> None:
    quietly = {"synchronize_session": False}
    for seconds, kept in ((HOUR, KEPT_HOURS_SECONDS), (DAY, KEPT_DAYS_SECONDS)):
        old = delete(_periods).where(_periods.seconds == seconds, _periods.begins_at < now - kept - DAY)
        session.execute(old, execution_options=quietly)
    session.execute(
        delete(_groups).where(_groups.last_at < now - KEPT_DAYS_SECONDS - DAY), execution_options=quietly
    )
    store_disks.delete_old(session, now=now)
