"""Ingest of agents' batches: each is stored once, and acknowledged only when it is on disk."""

from __future__ import annotations

from functools import partial
from typing import Literal

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from holdfast.protocol import wire
from holdfast.protocol.field_types import MAX_NAME
from holdfast.protocol.store_shares import StoreReport
from holdfast.protocol.wire import PLAUSIBLE_STEP, Ack, Batch
from holdfast_server import models
from holdfast_server.core.errors import RequestRefused, TooManyJobs, UnknownJob
from holdfast_server.core.settings import MAX_JOBS
from holdfast_server.db import Database, on_connection
from holdfast_server.ingest import events, position
from holdfast_server.ingest.batches import InvalidBatch, Received
from holdfast_server.ingest.position import JobPosition
from holdfast_server.records import checkpoints, job_status, store_shares
from holdfast_server.samples.limits import MAX_METRICS

UNKNOWN_EVENTS = "unknown_events"
METRICS_LEFT_OUT = "metrics_left_out"
OVERLAP_SECONDS = 5.0
"""How long after the start of the next attempt a batch is still accepted: clocks of machines differ."""
ATTEMPTS_RESTARTED = "attempts_restarted"
BATCH_CONFLICT = "batch_conflict"
IMPLAUSIBLE = "implausible_numbers"
REFUSAL_NOTICE_SECONDS = 3600.0
"""Shortest time between two notices of refused numbers of a job, which reports every second."""


class Superseded(RequestRefused):
    """It was said after a newer attempt of the job had begun, by one that does not know that."""

    code = "fenced"
    message = "attempt {1} of {0.job} has superseded attempt {0.attempt}: stop the superseded one"


class Implausible(InvalidBatch):
    """An attempt or lineage number of a batch lies implausibly far beyond the largest known one of its job."""

    code = "implausible_numbers"


async def store(
    db: Database,
    received: Received,
    *,
    project: str | None = None,
    max_jobs: int = MAX_JOBS,
    now: float,
) -> Ack:
    """Store a batch and return its acknowledgement.

    Args:
        project: project that its job must belong to, and that a new job is added to. None accepts a job of any
            project, and adds a new one to the default project.
        max_jobs: how many jobs the project may have.

    Raises:
        UnknownJob: the job belongs to another project.
        TooManyJobs: its job is new, and the project has `max_jobs`.
        Superseded: it was sent after a newer attempt had started.
        Implausible: its attempt or lineage number is far beyond the known ones of the job.
    """
    job = received.batch.job
    work = partial(_store, received=received, project=project, max_jobs=max_jobs, now=now)
    try:
        acknowledged = await db.stored(work, job=job, samples_only=received.samples_only)
    except Implausible as error:
        warn = partial(
            _warn,
            batch=received.batch,
            code=IMPLAUSIBLE,
            text=str(error),
            now=now,
            repeat_seconds=REFUSAL_NOTICE_SECONDS,
        )
        await db.stored(warn, job=job)
        raise
    if reports := [event for event in received.batch.events if isinstance(event, StoreReport)]:
        await store_shares.follow_reports(db, reports, now=now)
    return acknowledged


def _store(session: Session, received: Received, *, project: str | None, max_jobs: int, now: float) -> Ack:
    """Store a batch in the caller's transaction.

    Nearly every batch adds samples to a known attempt, for which compiled statements suffice: no ORM there.
    """
    batch = received.batch
    found = on_connection(session, position.find, batch.job, batch.uid)
    if found is None:
        _begin_job(session, batch, project=project, max_jobs=max_jobs, now=now)
        found = on_connection(session, position.get, batch.job, batch.uid)
    elif project not in (None, found.project):
        raise UnknownJob(batch.job)
    acknowledged = Ack(acked=batch.sequence, version=found.version)
    if not received.empty:
        stored = on_connection(session, position.find_stored, received)
        if stored is None:
            text = (
                f"rank {batch.rank} of attempt {batch.attempt} sent different batches under one sequence number, "
                "and the server keeps the first: does another copy of it run, or was its spool changed? "
                f"(uid {batch.uid})"
            )
            _warn(session, batch, BATCH_CONFLICT, text, now=now)
        if stored is not False:
            return acknowledged
        on_connection(session, position.remember_name, received, now=now)
    if found.uid and (refusal := _implausible(received, found, now=now)):
        raise Implausible(refusal)
    if found.attempt_uid is None:
        _begin_attempt(session, batch, now=now)
        found = on_connection(session, position.get, batch.job, batch.uid)
    elif batch.uid != found.uid:
        _require_current(session, batch)
    effect = on_connection(session, position.advance, found, received, now=now)
    if batch.events:
        job = session.get_one(models.JobRecord, batch.job, populate_existing=True)
        attempt = session.get_one(models.AttemptRecord, (batch.job, batch.uid), populate_existing=True)
        source = events.EventSource(session, job, attempt, batch.rank, batch.sequence, effect.ahead, now)
        for event in batch.events:
            events.record(source, event)
    _add_notices(session, received, left_out=effect.left_out, now=now)
    return acknowledged


def _begin_job(session: Session, batch: Batch, *, project: str | None, max_jobs: int, now: float) -> None:
    belongs = models.DEFAULT_PROJECT if project is None else project
    count = session.scalar(select(func.count()).where(models.JobRecord.project == belongs))
    if (count or 0) >= max_jobs:
        raise TooManyJobs(belongs, max_jobs)
    session.add(models.JobRecord(name=batch.job, project=belongs, created_at=now, last_contact_at=now))
    session.flush()


def _implausible(received: Received, found: JobPosition, *, now: float) -> str | None:
    """Return why the numbers of a batch cannot be those of its job; None if they can.

    A report with a huge attempt number would fence the running attempt, and one with a huge lineage number would
    use up the numbers. A job may have run without this server, whose database may be an old copy: each second
    since the last contact allows one more attempt and one more lineage, so that the server refuses no real job
    forever. Smaller numbers are always accepted, because a deleted store begins at 1.
    """
    silent_seconds = max(0, int(now - found.last_contact_at))
    for name, value, known in (
        ("attempt", received.batch.attempt, found.attempt),
        ("lineage", received.latest_lineage, found.latest_lineage),
    ):
        if value > known + PLAUSIBLE_STEP + silent_seconds:
            return (
                f"{name} {value} is more than {PLAUSIBLE_STEP + silent_seconds} above {known}, the largest known "
                f"{name} of job {received.batch.job!r}: if it is correct, an administrator raises the limit with "
                f"`holdfast reset-numbers {received.batch.job} --{name} {value}`"
            )
    return None


def _require_current(session: Session, batch: Batch) -> None:
    """Raise `Superseded` for a batch that an attempt sent after a newer attempt had started.

    A dead attempt's spool was written earlier, and is accepted.
    """
    own = session.get_one(models.AttemptRecord, (batch.job, batch.uid))
    attempts = models.AttemptRecord
    newer = (attempts.job == batch.job, attempts.attempt > own.attempt, attempts.started_at > own.started_at)
    query = select(attempts).where(*newer).order_by(attempts.started_at).limit(1)
    first = session.scalars(query).first()
    if first is not None and batch.sent_at > first.started_at + OVERLAP_SECONDS:
        raise Superseded(batch, first.attempt)


def _begin_attempt(session: Session, batch: Batch, *, now: float) -> None:
    """Add an attempt, and make it the current one unless the batch is from the spool of an earlier attempt."""
    attempt = models.AttemptRecord(
        job=batch.job,
        uid=batch.uid,
        attempt=batch.attempt,
        started_at=batch.sent_at,
        iteration=batch.iteration,
        lineage=batch.lineage,
        last_iteration=batch.iteration,
        iterations=0,
    )
    session.add(attempt)
    job = session.get_one(models.JobRecord, batch.job)
    current = session.get(models.AttemptRecord, (job.name, job.uid))
    goes_on = current is None or batch.attempt > current.attempt
    if current is not None and not goes_on and batch.sent_at > current.started_at:
        text = (
            f"attempt {batch.attempt} started after another attempt {current.attempt} and supersedes it: was the "
            f"job's store deleted? (uid {batch.uid})"
        )
        _warn(session, batch, ATTEMPTS_RESTARTED, text, now=now)
        checkpoints.reset_report_order(session, job.name)
        goes_on = True
    if goes_on:
        if current is not None:
            job_status.continue_restart(attempt, current)
        job.uid, job.attempt = batch.uid, max(job.attempt, batch.attempt)
        job.sequence = job.samples_sequence = -1
        job.progressed_at = now
    session.flush()


def _add_notices(session: Session, received: Received, *, left_out: bool, now: float) -> None:
    batch = received.batch
    dropped = sum(gap.dropped for gap in batch.gaps)
    if dropped:
        text = f"the agent dropped {dropped} samples while it could not reach a server"
        events.notice(session, batch.job, _notice(batch, "info", "dropped_samples", text, now))
    if left_out or (received.samples is not None and received.samples.left_out):
        text = (
            f"the job reports more than {MAX_METRICS} metrics, or metric names over {MAX_NAME} characters: the "
            "server keeps the first metrics and shortens the names"
        )
        _warn(session, batch, METRICS_LEFT_OUT, text, now=now)
    if received.unknown_events:
        text = "the agent reports events that this server does not know, and the server ignores them: update it"
        _warn(session, batch, UNKNOWN_EVENTS, text, now=now)


def _warn(
    session: Session, batch: Batch, code: str, text: str, *, now: float, repeat_seconds: float | None = None
) -> None:
    """Add a warning, unless the job has the same one, or, given `repeat_seconds`, a recent one of its code."""
    rows = models.NoticeRecord
    repeated = rows.message == text if repeat_seconds is None else rows.at > now - repeat_seconds
    found = select(rows.id).where(rows.job == batch.job, rows.code == code, repeated).limit(1)
    if session.scalar(found) is None:
        events.notice(session, batch.job, _notice(batch, "warning", code, text, now))


def _notice(batch: Batch, level: Literal["info", "warning"], code: str, message: str, now: float) -> wire.Notice:
    return wire.Notice(
        at=now, iteration=batch.iteration, lineage=batch.lineage, level=level, code=code, message=message
    )
