"""What each event changes in the tables."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from types import NoneType
from typing import Any, Protocol, get_args

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast import protocol
from holdfast.protocol import MAX_INTEGER, MAX_ITERATION, MAX_LINEAGE, MOST_LABELS
from holdfast_server import batches, checkpoints, desired, models, orders, verifications, work
from holdfast_server.samples import MAX_NAME, is_span, is_time

MAX_TEXT = 4000
MAX_ENTRIES = 200
"""Of figures and versions by name."""
MAX_CHECKPOINTS = 100_000
"""In a store: one of every ten iterations of a million."""
MAX_LABEL = 64

logger = logging.getLogger(__name__)


class EventDecoder(Protocol):
    def decode(self, raw: msgspec.Raw, /) -> protocol.Event: ...


@dataclass(frozen=True, slots=True)
class Source:
    """The batch that events came in."""

    session: AsyncSession
    job: models.Job
    attempt: models.Attempt
    rank: int
    sequence: int
    ahead: bool
    """It is the newest that this job has sent; one from a spool that is replayed is not."""
    now: float

    @property
    def current(self) -> bool:
        """It speaks for the job: rank 0 of the attempt that registered last."""
        return self.rank == 0 and self.attempt.uid == self.job.uid


def decode(raw: msgspec.Raw, decoder: EventDecoder, *, ahead: float, latest: float) -> protocol.Event | None:
    """The event, or None for one that this server cannot use: a newer agent may know more kinds of them.

    Args:
        raw: as it was sent.
        decoder: for the encoding of its batch.
        ahead: seconds by which the reporter's clock is ahead; each time moves back by as many.
        latest: the latest time to accept; a later one becomes this.
    """
    try:
        event = decoder.decode(raw)
        _settle(event)
        _correct_times(event, ahead=ahead, latest=latest)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        logger.info("an event was left out: %s", error)
        return None
    return event


_LARGEST = {"lineage": MAX_LINEAGE, "iteration": MAX_ITERATION, "durable_iteration": MAX_ITERATION}


def _settle(event: protocol.Event) -> None:
    """ValueError for what no column holds; texts are cut to a length that a page can show."""
    for field in msgspec.structs.fields(event):
        value = getattr(event, field.name)
        if isinstance(value, float) and not _within(field.name, value):
            if NoneType not in get_args(field.type):
                raise ValueError(f"{field.name} is {value}")
            setattr(event, field.name, None)
        elif isinstance(value, int) and not 0 <= value <= _LARGEST.get(field.name, MAX_INTEGER):
            raise ValueError(f"{field.name} is {value}")
        elif isinstance(value, str):
            setattr(event, field.name, value[:MAX_TEXT])
        elif isinstance(value, dict):
            setattr(event, field.name, dict(islice(_short(value), MAX_ENTRIES)))
    if isinstance(event, protocol.Checkpoint):
        event.ranks = [span for span in event.ranks if _is_span_of_a_rank(span)]
    if isinstance(event, protocol.Paced):
        # An infinite one stands for what was never measured, as that of a device copy where there is no device.
        event.profile = {name: value for name, value in event.profile.items() if 0 <= value < math.inf}
    if isinstance(event, protocol.Checkpoint) and protocol.parse_checkpoint_id(event.id) != (
        event.iteration,
        event.lineage,
    ):
        raise ValueError(f"checkpoint {event.id} is not at iteration {event.iteration}-{event.lineage}")
    if isinstance(event, protocol.LineageStarted) and event.origin is not None:
        protocol.validate_job(event.origin.job)
        protocol.parse_checkpoint_id(event.origin.checkpoint)
        event.origin = msgspec.structs.replace(event.origin, digest=event.origin.digest[:MAX_LABEL])
    names = [getattr(event, "parent", None), getattr(event, "left", None)]
    if isinstance(event, protocol.Inventory):
        if len(event.checkpoints) > MAX_CHECKPOINTS:
            raise ValueError(f"an inventory of {len(event.checkpoints)} checkpoints")
        names = [*event.checkpoints, *event.pinned]
    if isinstance(event, protocol.Verified):
        names = [event.checkpoint, event.against]
    for name in filter(None, names):
        protocol.parse_checkpoint_id(name)


def _correct_times(event: protocol.Event, *, ahead: float, latest: float) -> None:
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if _is_time_field(name) and value is not None:
            setattr(event, name, min(max(0.0, value - ahead), latest))


def _short(told: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in told.items():
        yield name[:MAX_NAME], value[:MAX_TEXT] if isinstance(value, str) else value


def _is_span_of_a_rank(span: protocol.RankSpan) -> bool:
    seconds = (span.snapshot_seconds, span.stall_seconds, span.persist_seconds)
    return 0 <= span.rank <= MAX_INTEGER and all(map(is_span, seconds))


def _is_time_field(name: str) -> bool:
    return name == "at" or name.endswith("_at")


def _within(name: str, value: float) -> bool:
    if _is_time_field(name):
        return is_time(value)
    return is_span(value) if name.endswith("seconds") else math.isfinite(value)


async def record(source: Source, event: protocol.Event) -> None:
    session, job, attempt = source.session, source.job, source.attempt
    match event:
        case protocol.AttemptStarted():
            _started(attempt, event)
            await orders.take_back(session, job, attempt=attempt.attempt, now=source.now)
            await checkpoints.give_up(session, job.name, before_attempt=attempt.attempt)
            await batches.prune(session, job.name)
        case protocol.AttemptFinished():
            attempt.finished_at, attempt.finished = event.at, event.reason
            attempt.last_iteration = event.iteration
            # Its own too: an agent says that it ends when it has stopped writing.
            await checkpoints.give_up(session, job.name, before_attempt=attempt.attempt + 1)
            reason = f"attempt {attempt.attempt} ended ({event.reason}) without a word of it"
            await orders.lose_open(session, job, attempt=attempt.attempt, now=source.now, reason=reason)
        case protocol.LineageStarted():
            await _lineage(source, event)
        case protocol.Checkpoint():
            await checkpoints.record(
                session,
                job.name,
                event,
                attempt=attempt.attempt,
                sequence=source.sequence,
                ended=attempt.finished is not None or attempt.uid != job.uid,
            )
        case protocol.Inventory() if source.ahead:
            await checkpoints.take_inventory(
                session, job.name, event, attempt=attempt.attempt, sequence=source.sequence
            )
            await desired.adopt_pins(session, job, event, now=source.now)
        case protocol.Verified() if source.rank == 0:
            await verifications.record(session, job, event, attempt=attempt.attempt, now=source.now)
        case protocol.Stall():
            _stall(source, event)
        case protocol.Paced():
            _paced(source, event)
        case protocol.RankWork():
            await work.add_event(session, job.name, attempt.uid, source.rank, event)
        case protocol.Applied() if source.current:
            await desired.stamp(session, job, event.version, event.iteration, event.at)
        case protocol.OrderMoved():
            await orders.report(session, job, event, attempt=attempt.attempt, now=source.now)
        case protocol.Restores() if source.rank == 0:
            attempt.restore_mode, attempt.restore_reason = event.mode, event.reason or None
            attempt.start_seconds = event.start_seconds
        case protocol.Notice():
            notice(session, job.name, event)


def notice(session: AsyncSession, job: str, event: protocol.Notice) -> None:
    session.add(
        models.Notice(
            job=job,
            at=event.at,
            iteration=event.iteration,
            lineage=event.lineage,
            level=event.level,
            code=event.code,
            message=event.message,
        )
    )


def _started(attempt: models.Attempt, event: protocol.AttemptStarted) -> None:
    # What was heard before it loaded its checkpoint belongs to it, too.
    attempt.started_at = min(attempt.started_at, event.at)
    attempt.iteration, attempt.lineage = event.iteration, event.lineage
    attempt.resumed_from, attempt.previous_exit = event.resumed_from, event.previous_exit
    attempt.host, attempt.pid, attempt.world_size = event.host, event.pid, event.world_size
    attempt.supervised, attempt.versions = event.supervised, msgspec.msgpack.encode(event.versions)
    attempt.owner = event.owner[:MAX_LABEL] or None
    labels = {key[:MAX_LABEL]: value[:MAX_LABEL] for key, value in list(event.labels.items())[:MOST_LABELS]}
    attempt.labels = msgspec.msgpack.encode(labels) if labels else None


async def _lineage(source: Source, event: protocol.LineageStarted) -> None:
    row = await ensure_lineage(source.session, source.job, event.lineage, at=event.at)
    row.at, row.iteration, row.parent, row.order_id = event.at, event.iteration, event.parent, event.order
    row.last_iteration = max(row.last_iteration, event.iteration)
    if event.origin is not None:
        origin = event.origin
        row.from_job, row.from_checkpoint, row.from_digest = origin.job, origin.checkpoint, origin.digest
    await orders.note(source.session, source.job, event, attempt=source.attempt.attempt, now=source.now)


async def ensure_lineage(session: AsyncSession, job: models.Job, lineage: int, *, at: float) -> models.Lineage:
    """The row of a lineage. Its samples may be here before its beginning is: batches need not come in order."""
    row = await session.get(models.Lineage, (job.name, lineage))
    if row is None:
        row = models.Lineage(job=job.name, lineage=lineage, at=at, iteration=0, last_iteration=0)
        session.add(row)
    job.latest_lineage = max(job.latest_lineage, lineage)
    return row


def _stall(source: Source, event: protocol.Stall) -> None:
    source.session.add(
        models.Stall(
            job=source.job.name,
            at=event.at,
            iteration=event.iteration,
            lineage=event.lineage,
            kind=event.kind,
            seconds=event.seconds,
        )
    )


def _paced(source: Source, event: protocol.Paced) -> None:
    if source.ahead:
        source.job.paced = msgspec.msgpack.encode(event)
    source.session.add(
        models.Pacing(
            job=source.job.name,
            at=event.at,
            iteration=event.iteration,
            lineage=event.lineage,
            interval=event.interval,
            budget=event.budget,
            measured_overhead=event.measured_overhead,
        )
    )
