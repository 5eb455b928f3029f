"""Taking in what agents report: each batch once, acknowledged only when it is on the disk."""

from __future__ import annotations

from typing import Literal

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.protocol import messages
from holdfast.protocol.messages import PLAUSIBLE_STEP, Ack, Batch
from holdfast_server import models
from holdfast_server.core.errors import TooManyJobs, UnknownJob
from holdfast_server.core.settings import MAX_JOBS
from holdfast_server.db import Database, on_connection
from holdfast_server.ingest import events
from holdfast_server.records import checkpoints, job_position
from holdfast_server.records.job_position import JobPosition
from holdfast_server.samples.batches import InvalidBatch, Received
from holdfast_server.samples.limits import MAX_METRICS, MAX_NAME

UNKNOWN_EVENTS = "unknown_events"
METRICS_LEFT_OUT = "metrics_left_out"
OVERLAP_SECONDS = 5.0
"""What an attempt says so shortly after the next one began is still taken: clocks of machines differ."""
ATTEMPTS_RESTARTED = "attempts_restarted"
BATCH_CONFLICT = "batch_conflict"
IMPLAUSIBLE = "implausible_numbers"
REFUSAL_NOTED_SECONDS = 3600.0
"""From one notice of refused numbers to the next: reports come each second."""


class Superseded(RuntimeError):
    """It was said after a newer attempt of the job had begun, by one that does not know that."""

    def __init__(self, batch: Batch, newest: int) -> None:
        super().__init__(
            f"attempt {newest} of {batch.job} has begun: attempt {batch.attempt} has no more say, end it"
        )


class Implausible(InvalidBatch):
    """A number of a batch lies further beyond the largest known one of its job than training can get."""


async def store(
    db: Database,
    received: Received,
    *,
    project: str | None = None,
    max_jobs: int = MAX_JOBS,
    now: float,
) -> Ack:
    """Acknowledge a batch, once it is stored and not before.

    Args:
        db: where it is stored.
        received: the batch.
        project: the one that a new job belongs to, and that a known one has to belong to; None: any, and for a new
            job the default one.
        max_jobs: how many jobs the project may have.
        now: seconds since the epoch.

    Raises:
        UnknownJob: the job belongs to another project.
        TooManyJobs: it would begin a new job, and the project has as many as it may.
        Superseded: a newer attempt had begun when it was said.
        Implausible: it numbers an attempt or a lineage far beyond what is known of the job.
    """
    job = received.batch.job

    async def work(session: AsyncSession) -> Ack:
        return await _store(session, received, project=project, max_jobs=max_jobs, now=now)

    try:
        return await db.write(work, job=job, samples_only=received.samples_only)
    except Implausible as error:
        notice = _notice(received.batch, "warning", IMPLAUSIBLE, str(error), now)
        await db.write(lambda session: _notice_refusal(session, job, notice), job=job)
        raise


async def _store(
    session: AsyncSession, received: Received, *, project: str | None, max_jobs: int, now: float
) -> Ack:
    """Nearly every batch adds samples to an attempt that is known: compiled statements alone, without the ORM."""
    batch = received.batch
    found = await on_connection(session, job_position.find, batch.job, batch.uid)
    if found is None:
        await _begin_job(session, batch, project=project, max_jobs=max_jobs, now=now)
        found = await on_connection(session, job_position.found, batch.job, batch.uid)
    elif project not in (None, found.project):
        raise UnknownJob(batch.job)
    acknowledged = Ack(acked=batch.sequence, version=found.version)
    if not received.empty:
        stored = await on_connection(session, job_position.known, received)
        if stored is None:
            await _conflict(session, batch, now=now)
        if stored is not False:
            return acknowledged
        await on_connection(session, job_position.remember, received, now=now)
    if found.uid and (refusal := _implausible(received, found, now=now)):
        raise Implausible(refusal)
    if found.attempt_uid is None:
        await _begin_attempt(session, batch, now=now)
        found = await on_connection(session, job_position.found, batch.job, batch.uid)
    elif batch.uid != found.uid:
        await _require_current(session, batch)
    moved = await on_connection(session, job_position.move_on, found, received, now=now)
    if batch.events:
        job = await session.get_one(models.JobRecord, batch.job, populate_existing=True)
        attempt = await session.get_one(models.AttemptRecord, (batch.job, batch.uid), populate_existing=True)
        source = events.Source(session, job, attempt, batch.rank, batch.sequence, moved.ahead, now)
        for event in batch.events:
            await events.record(source, event)
    await _notices(session, received, left_out=moved.left_out, now=now)
    return acknowledged


async def _begin_job(
    session: AsyncSession, batch: Batch, *, project: str | None, max_jobs: int, now: float
) -> None:
    belongs = models.DEFAULT_PROJECT if project is None else project
    count = await session.scalar(select(func.count()).where(models.JobRecord.project == belongs))
    if (count or 0) >= max_jobs:
        raise TooManyJobs(belongs, max_jobs)
    session.add(models.JobRecord(name=batch.job, project=belongs, created_at=now, last_contact_at=now))
    await session.flush()


def _implausible(received: Received, found: JobPosition, *, now: float) -> str | None:
    """Why the numbers of a batch cannot be those of its job, None where they can.

    One report with a huge attempt number would fence the attempt that runs, and one with a huge lineage number
    would use up the numbers. A job may have gone on without this server, whose database may be an old copy: for
    each second since the job was last heard of, one more attempt and one more lineage is plausible. So the server
    refuses no real job for ever, and a running job is held to the step alone. Smaller numbers are always taken: a
    deleted store begins at 1.
    """
    unheard = max(0, int(now - found.last_contact_at))
    for name, value, known in (
        ("attempt", received.batch.attempt, found.attempt),
        ("lineage", received.latest_lineage, found.latest_lineage),
    ):
        if value > known + PLAUSIBLE_STEP + unheard:
            return (
                f"{name} {value} lies more than {PLAUSIBLE_STEP + unheard} beyond {known}, the largest known "
                f"{name} of job {received.batch.job!r}: if it is right, an admin raises that with "
                f"`holdfast reset-numbers {received.batch.job} --{name} {value}`"
            )
    return None


async def _notice_refusal(session: AsyncSession, job: str, notice: messages.Notice) -> None:
    """Note the refusal of implausible numbers, unless the newest such note of the job is recent."""
    rows = models.NoticeRecord
    query = select(func.max(rows.at)).where(rows.job == job, rows.code == notice.code)
    noted_at = await session.scalar(query)
    if noted_at is None or notice.at - noted_at >= REFUSAL_NOTED_SECONDS:
        events.notice(session, job, notice)


async def _require_current(session: AsyncSession, batch: Batch) -> None:
    """Superseded, for an attempt that was known before a newer one began, and goes on as if it had not.

    The spool of one that is dead was written before.
    """
    own = await session.get_one(models.AttemptRecord, (batch.job, batch.uid))
    attempts = models.AttemptRecord
    newer = (attempts.job == batch.job, attempts.attempt > own.attempt, attempts.started_at > own.started_at)
    query = select(attempts).where(*newer).order_by(attempts.started_at).limit(1)
    first = (await session.scalars(query)).first()
    if first is not None and batch.sent_at > first.started_at + OVERLAP_SECONDS:
        raise Superseded(batch, first.attempt)


async def _begin_attempt(session: AsyncSession, batch: Batch, *, now: float) -> None:
    """The attempt that registers last is the current one, unless it is an earlier one's spool that comes now."""
    session.add(
        models.AttemptRecord(
            job=batch.job,
            uid=batch.uid,
            attempt=batch.attempt,
            started_at=batch.sent_at,
            iteration=batch.iteration,
            lineage=batch.lineage,
            last_iteration=batch.iteration,
            iterations=0,
        )
    )
    job = await session.get_one(models.JobRecord, batch.job)
    current = await session.get(models.AttemptRecord, (job.name, job.uid))
    goes_on = current is None or batch.attempt > current.attempt
    if current is not None and not goes_on and batch.sent_at > current.started_at:
        text = (
            f"attempt {batch.attempt} started after another attempt {current.attempt}, and is the current one "
            f"now: was the job's store deleted? (uid {batch.uid})"
        )
        await _notice_once(session, _notice(batch, "warning", ATTEMPTS_RESTARTED, text, now), job.name)
        await checkpoints.forget_who_spoke(session, job.name)
        goes_on = True
    if goes_on:
        job.uid, job.attempt = batch.uid, max(job.attempt, batch.attempt)
        job.sequence = job.samples_sequence = -1
        job.progressed_at = now
    await session.flush()


async def _notices(session: AsyncSession, received: Received, *, left_out: bool, now: float) -> None:
    batch = received.batch
    dropped = sum(gap.dropped for gap in batch.gaps)
    if dropped:
        text = f"{dropped} samples were thinned away while no server answered"
        events.notice(session, batch.job, _notice(batch, "info", "dropped_samples", text, now))
    if left_out or (received.samples is not None and received.samples.left_out):
        text = (
            f"the job reports more than {MAX_METRICS} metrics, or names of them over {MAX_NAME} "
            "characters: the first are kept, and the names are cut"
        )
        notice = _notice(batch, "warning", METRICS_LEFT_OUT, text, now)
        await _notice_once(session, notice, batch.job)
    if received.unknown_events:
        text = "this agent reports things that this server does not know, and leaves out: update the server"
        await _notice_once(session, _notice(batch, "warning", UNKNOWN_EVENTS, text, now), batch.job)


async def _conflict(session: AsyncSession, batch: Batch, *, now: float) -> None:
    """Two processes share one name, or a spool was written to: the first batch stands, and a person is told."""
    text = (
        f"rank {batch.rank} of attempt {batch.attempt} has sent different reports under one name, of which the "
        f"first are kept: is a copy of it running, or was its spool changed? (uid {batch.uid})"
    )
    await _notice_once(session, _notice(batch, "warning", BATCH_CONFLICT, text, now), batch.job)


async def _notice_once(session: AsyncSession, notice: messages.Notice, job: str) -> None:
    """Unless the same was said of this job before."""
    rows = models.NoticeRecord
    same = (rows.job == job, rows.code == notice.code, rows.message == notice.message)
    if await session.scalar(select(rows.id).where(*same).limit(1)) is None:
        events.notice(session, job, notice)


def _notice(
    batch: Batch, level: Literal["info", "warning"], code: str, message: str, now: float
) -> messages.Notice:
    return messages.Notice(
        at=now, iteration=batch.iteration, lineage=batch.lineage, level=level, code=code, message=message
    )
