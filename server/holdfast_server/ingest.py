"""Taking in what agents report: each batch once, acknowledged only when it is on the disk."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import msgspec
from sqlalchemy import Connection, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast import protocol
from holdfast.protocol import (
    MAX_ATTEMPT,
    MAX_INTEGER,
    MAX_ITERATION,
    MAX_LINEAGE,
    PLAUSIBLE_STEP,
    Ack,
    Event,
    Gap,
    Lane,
    Samples,
    validate_job,
)
from holdfast_server import batches, checkpoints, columns, events, models, standing
from holdfast_server.db import Database
from holdfast_server.errors import TooManyJobs, UnknownJob
from holdfast_server.samples import MAX_AHEAD_SECONDS, MAX_METRICS, MAX_NAME, is_time
from holdfast_server.settings import MAX_JOBS
from holdfast_server.standing import recent_of as recent_of

MAX_EVENTS = 5000
MAX_GAPS = 1000
MAX_UID = 100
MAX_REASON = 300
"""Characters: some say what was sent, which may be megabytes."""
UNKNOWN_EVENTS = "unknown_events"
METRICS_LEFT_OUT = "metrics_left_out"
OVERLAP_SECONDS = 5.0
"""What an attempt says so shortly after the next one began is still taken: clocks of machines differ."""
ATTEMPTS_RESTARTED = "attempts_restarted"
BATCH_CONFLICT = "batch_conflict"
IMPLAUSIBLE = "implausible_numbers"
REFUSAL_NOTED_SECONDS = 3600.0
"""From one notice of refused numbers to the next: reports come each second."""


class InvalidBatch(ValueError):
    """A batch that can never be stored; sending it again is of no use."""


class Superseded(RuntimeError):
    """It was said after a newer attempt of the job had begun, by one that does not know that."""

    def __init__(self, batch: _Incoming, newest: int) -> None:
        super().__init__(
            f"attempt {newest} of {batch.job} has begun: attempt {batch.attempt} has no more say, end it"
        )


class Implausible(InvalidBatch):
    """A number of a batch lies further beyond the largest known one of its job than training can get."""


class _MoreToIt(Exception):
    """It takes more than adding samples to what is known."""


class _Incoming(msgspec.Struct, kw_only=True):
    """A `protocol.Batch` whose events are still closed: one that we do not know must not cost the others."""

    protocol: int = protocol.PROTOCOL
    job: str
    uid: str
    attempt: int
    rank: int
    lane: Lane = "control"
    sequence: int
    sent_at: float
    iteration: int
    lineage: int
    samples: Samples | None = None
    events: list[msgspec.Raw] = []
    gaps: list[Gap] = []
    dropped_samples: int = 0


@dataclass(frozen=True, slots=True)
class Received:
    """A batch that can be stored, with its events opened."""

    batch: _Incoming
    samples: columns.Taken | None
    events: list[Event]
    unknown_events: int
    digest: bytes

    @property
    def key(self) -> batches.Key:
        batch = self.batch
        return batches.Key(batch.job, batch.uid, batch.rank, batch.lane, batch.sequence)

    @property
    def latest_lineage(self) -> int:
        """The largest lineage number that it would make known."""
        in_samples = [lineage for lineage, _ in (self.samples.tables if self.samples else ())]
        in_events = [getattr(event, "lineage", 0) for event in self.events]
        return max([self.batch.lineage, *in_samples, *in_events, *(gap.lineage for gap in self.batch.gaps)])

    @property
    def empty(self) -> bool:
        """A sign of life and nothing else; hearing it twice changes nothing, so it needs no remembering."""
        return self.samples is None and not (self.batch.events or self.batch.gaps or self.batch.dropped_samples)

    @property
    def plain(self) -> bool:
        """Samples and nothing else that takes more than adding them, as long as all goes well."""
        left_out = self.samples is not None and self.samples.left_out
        return not (self.batch.events or self.batch.gaps or self.batch.dropped_samples or left_out)

    def said(self) -> standing.Said:
        batch = self.batch
        return standing.Said(
            job=batch.job,
            uid=batch.uid,
            attempt=batch.attempt,
            rank=batch.rank,
            lane=batch.lane,
            sequence=batch.sequence,
            sent_at=batch.sent_at,
            iteration=batch.iteration,
            lineage=batch.lineage,
            samples=self.samples,
            gaps=batch.gaps,
            empty=self.empty,
        )


_msgpack, _json = msgspec.msgpack.Decoder(_Incoming), msgspec.json.Decoder(_Incoming, strict=False)
# JSON has no nan: there, a number may be the string "nan".
_msgpack_event, _json_event = msgspec.msgpack.Decoder(Event), msgspec.json.Decoder(Event, strict=False)


def decode(body: bytes, encoding: Literal["msgpack", "json"], *, now: float) -> Received:
    """InvalidBatch, in words that name the field, for what is not one.

    A sending time that is no time becomes `now`: the agent can do nothing about it but send it again. One beyond
    the server's clock by more than a tolerance comes from a clock that is ahead: all times of the batch move back
    by the difference.
    """
    try:
        batch = (_msgpack if encoding == "msgpack" else _json).decode(body)
        _validate(batch)
        batch.uid = batch.uid.replace("\0", "\ufffd")  # as tables write it
        if not is_time(batch.sent_at):
            batch.sent_at = now
        latest = now + MAX_AHEAD_SECONDS
        ahead = batch.sent_at - now if batch.sent_at > latest else 0.0
        batch.sent_at -= ahead
        found = batch.samples if batch.samples is not None and batch.samples.iteration else None
        taken = (
            columns.take(found, lineage=batch.lineage, at=batch.sent_at, ahead=ahead, latest=latest)
            if found is not None
            else None
        )
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidBatch(f"this is not a batch: {str(error)[:MAX_REASON]}") from None
    decoder: events.EventDecoder = _msgpack_event if encoding == "msgpack" else _json_event
    opened = (events.decode(raw, decoder, ahead=ahead, latest=latest) for raw in batch.events)
    known = [event for event in opened if event is not None]
    return Received(
        batch=batch,
        samples=taken,
        events=known,
        unknown_events=len(batch.events) - len(known),
        digest=batches.digest_of(body),
    )


def _validate(batch: _Incoming) -> None:
    if batch.protocol > protocol.PROTOCOL:
        raise ValueError(
            f"protocol {batch.protocol} is newer than this server's {protocol.PROTOCOL}: update the server"
        )
    validate_job(batch.job)
    if not 1 <= len(batch.uid) <= MAX_UID:
        raise ValueError(f"uid has 1 to {MAX_UID} characters")
    _within(batch, "rank", "sequence", "dropped_samples")
    _within(batch, "iteration", most=MAX_ITERATION)
    _within(batch, "attempt", most=MAX_ATTEMPT)
    _within(batch, "lineage", most=MAX_LINEAGE)
    if len(batch.events) > MAX_EVENTS:
        raise ValueError(f"{len(batch.events)} events: send at most {MAX_EVENTS} at once")
    if len(batch.gaps) > MAX_GAPS:
        raise ValueError(f"{len(batch.gaps)} gaps: send at most {MAX_GAPS} at once")
    for gap in batch.gaps:
        _within(gap, "dropped")
        _within(gap, "first_iteration", "last_iteration", most=MAX_ITERATION)
        _within(gap, "lineage", most=MAX_LINEAGE)


def _within(part: msgspec.Struct, *names: str, most: int = MAX_INTEGER) -> None:
    for name in names:
        if not 0 <= getattr(part, name) <= most:
            raise ValueError(f"{name} {getattr(part, name)} is outside 0 to {most}")


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
    if received.plain:
        with suppress(_MoreToIt):
            return await db.write_rows(
                lambda rows: _store_plain(rows, received, project=project, now=now), job=job
            )

    async def work(session: AsyncSession) -> Ack:
        return await _store(session, received, project=project, max_jobs=max_jobs, now=now)

    try:
        return await db.write(work, job=job)
    except Implausible as error:
        notice = _notice(received.batch, "warning", IMPLAUSIBLE, str(error), now)
        await db.write(lambda session: _notice_refusal(session, job, notice), job=job)
        raise


def _store_plain(connection: Connection, received: Received, *, project: str | None, now: float) -> Ack:
    said = received.said()
    found = standing.find(connection, said.job, said.uid)
    if found is None or found.attempt_uid is None or project not in (None, found.project):
        raise _MoreToIt
    if found.uid != said.uid:
        raise _MoreToIt
    if _implausible(received, found.attempt, found.latest_lineage, found.last_contact_at, now=now):
        raise _MoreToIt
    if not received.empty:
        stored = batches.known(connection, received.key, received.digest)
        if stored:
            return Ack(acked=said.sequence, version=found.version)
        if stored is None:
            raise _MoreToIt
        batches.remember(connection, received.key, received.digest, now=now)
    moved = standing.move_on(connection, found, said, now=now)
    if moved.left_out:
        raise _MoreToIt
    return Ack(acked=said.sequence, version=found.version)


async def _store(
    session: AsyncSession, received: Received, *, project: str | None, max_jobs: int, now: float
) -> Ack:
    batch = received.batch
    job = await _job(session, batch, project=project, max_jobs=max_jobs, now=now)
    acknowledged = Ack(acked=batch.sequence, version=job.version)
    connection = await session.connection()
    if not received.empty:
        stored = await connection.run_sync(batches.known, received.key, received.digest)
        if stored is None:
            await _conflict(session, batch, now=now)
        if stored or stored is None:
            return acknowledged
        await connection.run_sync(lambda rows: batches.remember(rows, received.key, received.digest, now=now))
    refusal = _implausible(received, job.attempt, job.latest_lineage, job.last_contact_at, now=now)
    if refusal and job.uid:
        raise Implausible(refusal)
    await _require_current(session, job, batch)
    await _attempt(session, job, batch, now=now)
    await session.flush()
    moved = await connection.run_sync(lambda rows: _move_on(rows, received, now=now))
    job = await session.get_one(models.Job, batch.job, populate_existing=True)
    attempt = await session.get_one(models.Attempt, (batch.job, batch.uid), populate_existing=True)
    source = events.Source(session, job, attempt, batch.rank, batch.sequence, moved.ahead, now)
    for event in received.events:
        await events.record(source, event)
    await _notices(source, received, left_out=moved.left_out)
    return acknowledged


def _move_on(connection: Connection, received: Received, *, now: float) -> standing.Moved:
    said = received.said()
    found = standing.find(connection, said.job, said.uid)
    assert found is not None
    return standing.move_on(connection, found, said, now=now)


async def _job(
    session: AsyncSession, batch: _Incoming, *, project: str | None, max_jobs: int, now: float
) -> models.Job:
    job = await session.get(models.Job, batch.job)
    if job is None:
        belongs = models.DEFAULT_PROJECT if project is None else project
        count = await session.scalar(select(func.count()).where(models.Job.project == belongs))
        if (count or 0) >= max_jobs:
            raise TooManyJobs(belongs, max_jobs)
        job = models.Job(name=batch.job, project=belongs, created_at=now, last_contact_at=now)
        session.add(job)
        await session.flush()
    elif project not in (None, job.project):
        raise UnknownJob(batch.job)
    return job


def _implausible(
    received: Received, attempt: int, lineage: int, last_contact_at: float, *, now: float
) -> str | None:
    """Why the numbers of a batch cannot be those of its job, whose largest known ones are given; None: they can.

    One report with a huge attempt number would fence the attempt that runs, and one with a huge lineage number
    would use up the numbers. A job may have gone on without this server, whose database may be an old copy: for
    each second since the job was last heard of, one more attempt and one more lineage is plausible. So the server
    refuses no real job for ever, and a running job is held to the step alone. Smaller numbers are always taken: a
    deleted store begins at 1.
    """
    unheard = max(0, int(now - last_contact_at))
    for name, value, known in (
        ("attempt", received.batch.attempt, attempt),
        ("lineage", received.latest_lineage, lineage),
    ):
        if value > known + PLAUSIBLE_STEP + unheard:
            return (
                f"{name} {value} lies more than {PLAUSIBLE_STEP + unheard} beyond {known}, the largest known "
                f"{name} of job {received.batch.job!r}: if it is right, an admin raises that with "
                f"`holdfast reset-numbers {received.batch.job} --{name} {value}`"
            )
    return None


async def _notice_refusal(session: AsyncSession, job: str, notice: protocol.Notice) -> None:
    """Note the refusal of implausible numbers, unless the newest such note of the job is recent."""
    rows = models.Notice
    query = select(func.max(rows.at)).where(rows.job == job, rows.code == notice.code)
    noted_at = await session.scalar(query)
    if noted_at is None or notice.at - noted_at >= REFUSAL_NOTED_SECONDS:
        events.notice(session, job, notice)


async def _require_current(session: AsyncSession, job: models.Job, batch: _Incoming) -> None:
    """Superseded, for an attempt that was known before a newer one began, and goes on as if it had not.

    The spool of one that is dead was written before.
    """
    own = None if batch.uid == job.uid else await session.get(models.Attempt, (batch.job, batch.uid))
    if own is None:
        return
    attempts = models.Attempt
    newer = (attempts.job == batch.job, attempts.attempt > own.attempt, attempts.started_at > own.started_at)
    query = select(attempts).where(*newer).order_by(attempts.started_at).limit(1)
    first = (await session.scalars(query)).first()
    if first is not None and batch.sent_at > first.started_at + OVERLAP_SECONDS:
        raise Superseded(batch, first.attempt)


async def _attempt(session: AsyncSession, job: models.Job, batch: _Incoming, *, now: float) -> None:
    if await session.get(models.Attempt, (batch.job, batch.uid)) is not None:
        return
    session.add(
        models.Attempt(
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
    await _register(session, job, batch, now=now)


async def _register(session: AsyncSession, job: models.Job, batch: _Incoming, *, now: float) -> None:
    """The attempt that registers last is the current one, unless it is an earlier one's spool that comes now."""
    current = await session.get(models.Attempt, (job.name, job.uid))
    if current is not None and batch.attempt <= current.attempt:
        if batch.sent_at <= current.started_at:
            return
        text = (
            f"attempt {batch.attempt} started after another attempt {current.attempt}, and is the current one "
            f"now: was the job's store deleted? (uid {batch.uid})"
        )
        await _notice_once(session, _notice(batch, "warning", ATTEMPTS_RESTARTED, text, now), job.name)
        await checkpoints.forget_who_spoke(session, job.name)
    job.uid, job.attempt = batch.uid, max(job.attempt, batch.attempt)
    job.sequence = job.samples_sequence = -1
    job.progressed_at = now


async def _notices(source: events.Source, received: Received, *, left_out: bool) -> None:
    batch = received.batch
    dropped = batch.dropped_samples + sum(gap.dropped for gap in batch.gaps)
    if dropped:
        text = f"{dropped} samples were thinned away while no server answered"
        events.notice(source.session, batch.job, _notice(batch, "info", "dropped_samples", text, source.now))
    if left_out or (received.samples is not None and received.samples.left_out):
        text = (
            f"the job reports more than {MAX_METRICS} metrics, or names of them over {MAX_NAME} "
            "characters: the first are kept, and the names are cut"
        )
        notice = _notice(batch, "warning", METRICS_LEFT_OUT, text, source.now)
        await _notice_once(source.session, notice, batch.job)
    if received.unknown_events:
        text = "this agent reports things that this server does not know, and leaves out: update the server"
        await _notice_once(source.session, _notice(batch, "warning", UNKNOWN_EVENTS, text, source.now), batch.job)


async def _conflict(session: AsyncSession, batch: _Incoming, *, now: float) -> None:
    """Two processes share one name, or a spool was written to: the first batch stands, and a person is told."""
    text = (
        f"rank {batch.rank} of attempt {batch.attempt} has sent different reports under one name, of which the "
        f"first are kept: is a copy of it running, or was its spool changed? (uid {batch.uid})"
    )
    await _notice_once(session, _notice(batch, "warning", BATCH_CONFLICT, text, now), batch.job)


async def _notice_once(session: AsyncSession, notice: protocol.Notice, job: str) -> None:
    """Unless the same was said of this job before."""
    rows = models.Notice
    same = (rows.job == job, rows.code == notice.code, rows.message == notice.message)
    if await session.scalar(select(rows.id).where(*same).limit(1)) is None:
        events.notice(session, job, notice)


def _notice(
    batch: _Incoming, level: Literal["info", "warning"], code: str, message: str, now: float
) -> protocol.Notice:
    return protocol.Notice(
        at=now, iteration=batch.iteration, lineage=batch.lineage, level=level, code=code, message=message
    )
