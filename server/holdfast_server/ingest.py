"""Taking in what agents report: each batch once, acknowledged only when it is on the disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast import protocol
from holdfast.protocol import Ack, Event, Samples, validate_job
from holdfast_server import events, models, samples
from holdfast_server.db import Database

MAX_EVENTS = 5000
MAX_UID = 100
UNKNOWN_EVENTS = "unknown_events"


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


def decode(body: bytes, encoding: Literal["msgpack", "json"]) -> Received:
    """InvalidBatch, in words that name the field, for what is not one."""
    try:
        batch = (_msgpack if encoding == "msgpack" else _json).decode(body)
        _validate(batch)
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidBatch(f"this is not a batch: {error}") from None
    decoder: events.EventDecoder = _msgpack_event if encoding == "msgpack" else _json_event
    known = [event for raw in batch.events if (event := events.decode(raw, decoder)) is not None]
    return Received(batch=batch, events=known, unknown_events=len(batch.events) - len(known))


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
        if await session.get(models.Batch, (batch.job, batch.uid, batch.rank, batch.sequence)):
            return ack_of_known
        session.add(
            models.Batch(job=batch.job, uid=batch.uid, rank=batch.rank, sequence=batch.sequence, received_at=now)
        )
    attempt = await _attempt(session, batch)
    ahead = _ahead(job, batch)
    if ahead:
        job.uid, job.attempt, job.sequence = batch.uid, batch.attempt, batch.sequence
    # A sign of life that is sent before an attempt has said where it starts does not know where it is.
    if ahead and not received.empty:
        job.iteration, job.lineage = batch.iteration, batch.lineage
        attempt.last_iteration = batch.iteration
        await events.ensure_lineage(session, job, batch.lineage, at=batch.sent_at)
    if received.samples is not None:
        attempt.iterations += len(received.samples.iteration)
        await _samples(session, job, batch, received.samples, ahead=ahead)
    source = events.Source(session, job, attempt, batch.sequence, ahead, now)
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
    job.last_contact_at = now
    return job


async def _attempt(session: AsyncSession, batch: _Incoming) -> models.Attempt:
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
    return attempt


def _ahead(job: models.Job, batch: _Incoming) -> bool:
    """Whether this batch says where the job is; another rank, an older attempt or a replayed spool does not."""
    if batch.rank != 0:
        return False
    if batch.uid == job.uid:
        return batch.sequence > job.sequence
    return batch.attempt >= job.attempt


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
        events.notice(source, _notice(batch, "info", "dropped_samples", text, source.now))
    if received.unknown_events:
        notices = models.Notice
        query = select(notices.id).where(notices.job == batch.job, notices.code == UNKNOWN_EVENTS).limit(1)
        if await source.session.scalar(query) is None:
            text = "this agent reports things that this server does not know, and leaves out: update the server"
            events.notice(source, _notice(batch, "warning", UNKNOWN_EVENTS, text, source.now))


def _notice(
    batch: _Incoming, level: Literal["info", "warning"], code: str, message: str, now: float
) -> protocol.Notice:
    return protocol.Notice(
        at=now, iteration=batch.iteration, lineage=batch.lineage, level=level, code=code, message=message
    )
