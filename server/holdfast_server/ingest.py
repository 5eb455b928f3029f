"""Taking in what agents report: each batch once, acknowledged only when it is on the disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast import protocol
from holdfast.protocol import Ack, Event, Samples, validate_job
from holdfast_server import batches, checkpoints, events, models, samples
from holdfast_server.db import Database

MAX_EVENTS = 5000
MAX_UID = 100
UNKNOWN_EVENTS = "unknown_events"
METRICS_LEFT_OUT = "metrics_left_out"
ATTEMPTS_RESTARTED = "attempts_restarted"
BATCH_CONFLICT = "batch_conflict"


class InvalidBatch(ValueError):
    """A batch that can never be stored; sending it again is of no use."""


class _Incoming(msgspec.Struct, kw_only=True):
    """A `protocol.Batch` whose events are still closed: one that we do not know must not cost the others."""

    protocol: int = protocol.PROTOCOL
    job: str
    uid: str
    attempt: int
    rank: int
    sequence: int
    sent_at: float
    iteration: int
    lineage: int
    samples: Samples | None = None
    events: list[msgspec.Raw] = []
    dropped_samples: int = 0


@dataclass(frozen=True, slots=True)
class Received:
    """A batch that can be stored, with its events opened."""

    batch: _Incoming
    events: list[Event]
    unknown_events: int
    metrics_left_out: bool
    digest: bytes

    @property
    def key(self) -> batches.Key:
        return batches.Key(self.batch.job, self.batch.uid, self.batch.rank, self.batch.sequence)

    @property
    def samples(self) -> Samples | None:
        found = self.batch.samples
        return found if found is not None and found.iteration else None

    @property
    def empty(self) -> bool:
        """A sign of life and nothing else; hearing it twice changes nothing, so it needs no remembering."""
        return self.samples is None and not self.batch.events and not self.batch.dropped_samples


_msgpack, _json = msgspec.msgpack.Decoder(_Incoming), msgspec.json.Decoder(_Incoming, strict=False)
# JSON has no nan: there, a number may be the string "nan".
_msgpack_event, _json_event = msgspec.msgpack.Decoder(Event), msgspec.json.Decoder(Event, strict=False)
_recent = msgspec.msgpack.Decoder(samples.Recent)


def decode(body: bytes, encoding: Literal["msgpack", "json"], *, now: float) -> Received:
    """InvalidBatch, in words that name the field, for what is not one.

    A time that is none becomes `now`: the agent can do nothing about it but send it again.
    """
    try:
        batch = (_msgpack if encoding == "msgpack" else _json).decode(body)
        _validate(batch)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidBatch(f"this is not a batch: {error}") from None
    decoder: events.EventDecoder = _msgpack_event if encoding == "msgpack" else _json_event
    known = [event for raw in batch.events if (event := events.decode(raw, decoder)) is not None]
    unknown = len(batch.events) - len(known)
    if not samples.is_time(batch.sent_at):
        batch.sent_at = now
    return Received(
        batch=batch,
        events=known,
        unknown_events=unknown,
        metrics_left_out=batch.samples is not None and samples.settle(batch.samples, at=batch.sent_at),
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
    for name in ("attempt", "rank", "sequence", "iteration", "lineage", "dropped_samples"):
        if not 0 <= getattr(batch, name) <= samples.MAX_ITERATION:
            raise ValueError(f"{name} {getattr(batch, name)} is outside 0 to {samples.MAX_ITERATION}")
    if len(batch.events) > MAX_EVENTS:
        raise ValueError(f"{len(batch.events)} events: send at most {MAX_EVENTS} at once")
    if batch.samples is not None:
        samples.validate(batch.samples)


async def store(db: Database, received: Received, *, now: float) -> Ack:
    async def work(session: AsyncSession) -> Ack:
        return await _store(session, received, now=now)

    return await db.write(work, job=received.batch.job)


async def _store(session: AsyncSession, received: Received, *, now: float) -> Ack:
    batch = received.batch
    job = await _job(session, batch, now=now)
    ack_of_known = Ack(acked=batch.sequence, version=job.version)
    if not received.empty:
        known = await batches.known(session, received.key)
        if known is not None:
            if known.sequence == batch.sequence and known.digest != received.digest:
                await _conflict(session, batch, now=now)
            return ack_of_known
        batches.remember(session, received.key, received.digest, now=now)
    attempt = await _attempt(session, job, batch, now=now)
    if attempt.uid == job.uid:
        job.last_contact_at = now
    ahead = attempt.uid == job.uid and batch.rank == 0 and batch.sequence > job.sequence
    if ahead:
        job.sequence = batch.sequence
    # A sign of life that is sent before an attempt has said where it starts does not know where it is.
    if ahead and not received.empty:
        job.iteration, job.lineage = batch.iteration, batch.lineage
        attempt.last_iteration = batch.iteration
        await events.ensure_lineage(session, job, batch.lineage, at=batch.sent_at)
    if received.samples is not None:
        attempt.iterations += len(received.samples.iteration)
        await _samples(session, job, batch, received.samples, ahead=ahead)
    source = events.Source(session, job, attempt, batch.rank, batch.sequence, ahead, now)
    for event in received.events:
        await events.record(source, event)
    await _notices(source, received)
    return Ack(acked=batch.sequence, version=job.version)


async def _job(session: AsyncSession, batch: _Incoming, *, now: float) -> models.Job:
    job = await session.get(models.Job, batch.job)
    if job is None:
        job = models.Job(name=batch.job, created_at=now, last_contact_at=now)
        session.add(job)
        await session.flush()
    return job


async def _attempt(session: AsyncSession, job: models.Job, batch: _Incoming, *, now: float) -> models.Attempt:
    attempt = await session.get(models.Attempt, (batch.job, batch.uid))
    if attempt is None:
        attempt = models.Attempt(
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
        await _register(session, job, batch, now=now)
    return attempt


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
    job.uid, job.attempt, job.sequence = batch.uid, max(job.attempt, batch.attempt), -1


async def _samples(
    session: AsyncSession, job: models.Job, batch: _Incoming, found: Samples, *, ahead: bool
) -> None:
    for number, part in samples.by_lineage(found):
        session.add(
            models.Chunk(
                job=batch.job,
                uid=batch.uid,
                attempt=batch.attempt,
                rank=batch.rank,
                sequence=batch.sequence,
                lineage=number,
                first_iteration=min(part.iteration),
                last_iteration=max(part.iteration),
                first_at=min(part.at),
                last_at=max(part.at),
                rows=len(part.iteration),
                seconds=samples.total(part.seconds),
                columns=samples.pack(part),
            )
        )
        lineage = await events.ensure_lineage(session, job, number, at=part.at[0])
        lineage.last_iteration = max(lineage.last_iteration, *part.iteration)
    if ahead:
        recent = samples.latest(recent_of(job), found)
        job.recent = msgspec.msgpack.encode(recent)


def recent_of(job: models.Job) -> samples.Recent:
    return _recent.decode(job.recent) if job.recent else samples.Recent()


async def _notices(source: events.Source, received: Received) -> None:
    batch = received.batch
    if batch.dropped_samples:
        text = f"{batch.dropped_samples} samples were thinned away while no server answered"
        events.notice(source.session, batch.job, _notice(batch, "info", "dropped_samples", text, source.now))
    if received.metrics_left_out:
        text = (
            f"the job reports more than {samples.MAX_METRICS} metrics, or names of them over {samples.MAX_NAME} "
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
