"""Batches as agents send them: decoded, checked, and with the times of a clock that is ahead corrected."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from types import NoneType
from typing import Any, Literal, Protocol, cast, get_args

import msgspec

from holdfast.protocol import messages
from holdfast.protocol.messages import MAX_ATTEMPT, MAX_INTEGER, MAX_ITERATION, MAX_LINEAGE, Event
from holdfast_server.samples import sample_codec
from holdfast_server.samples.limits import MAX_AHEAD_SECONDS, MAX_NAME, is_span, is_time

MAX_EVENTS = 5000
MAX_GAPS = 1000
MAX_UID = 100
MAX_REASON = 300
"""Characters: some say what was sent, which may be megabytes."""
MAX_TEXT = 4000
MAX_ENTRIES = 200
"""Of figures and versions by name."""
MAX_CHECKPOINTS = 100_000
"""In a store: one of every ten iterations of a million."""
MAX_LABEL = 64
DIGEST_BYTES = 16

logger = logging.getLogger(__name__)


class InvalidBatch(ValueError):
    """A batch that can never be stored; sending it again is of no use."""


@dataclass(frozen=True, slots=True)
class Received:
    """A batch that can be stored."""

    batch: messages.Batch
    """With those of its events that this server can use."""
    samples: sample_codec.Taken | None
    unknown_events: int
    digest: bytes
    """Of its content, so that another batch of the same name is noticed."""

    @property
    def latest_lineage(self) -> int:
        """The largest lineage number that it would make known."""
        in_samples = [lineage for lineage, _ in (self.samples.tables if self.samples else ())]
        in_events = [getattr(event, "lineage", 0) for event in self.batch.events]
        return max([self.batch.lineage, *in_samples, *in_events, *(gap.lineage for gap in self.batch.gaps)])

    @property
    def empty(self) -> bool:
        """A sign of life and nothing else; hearing it twice changes nothing, so it needs no remembering."""
        batch = self.batch
        return self.samples is None and not (self.unknown_events or batch.events or batch.gaps)

    @property
    def samples_only(self) -> bool:
        """Without events, it changes nothing that agents wait for."""
        return not self.batch.events


class _Wire(messages.Batch, kw_only=True):
    """A batch whose events are still closed: one that this server does not know must not cost the others."""

    events: list[msgspec.Raw] = []  # type: ignore[assignment]  # noqa: RUF012 - msgspec copies it


class _EventDecoder(Protocol):
    def decode(self, raw: msgspec.Raw, /) -> Event: ...


_msgpack, _json = msgspec.msgpack.Decoder(_Wire), msgspec.json.Decoder(_Wire, strict=False)
# JSON has no nan: there, a number may be the string "nan".
_msgpack_event, _json_event = msgspec.msgpack.Decoder(Event), msgspec.json.Decoder(Event, strict=False)


def decode(body: bytes, encoding: Literal["msgpack", "json"], *, now: float) -> Received:
    """InvalidBatch, in words that name the field, for what is not one.

    A sending time that is no time becomes `now`: the agent can do nothing about it but send it again. One beyond
    the server's clock by more than a tolerance comes from a clock that is ahead: all times of the batch move back
    by the difference.
    """
    try:
        batch: messages.Batch = (_msgpack if encoding == "msgpack" else _json).decode(body)
        _validate(batch)
        batch.uid = batch.uid.replace("\0", "\ufffd")  # as tables write it
        if not is_time(batch.sent_at):
            batch.sent_at = now
        latest = now + MAX_AHEAD_SECONDS
        ahead = batch.sent_at - now if batch.sent_at > latest else 0.0
        batch.sent_at -= ahead
        samples = batch.samples
        if samples is not None and samples.iteration:
            taken = sample_codec.take(samples, lineage=batch.lineage, at=batch.sent_at, ahead=ahead, latest=latest)
        else:
            taken = None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidBatch(f"this is not a batch: {str(error)[:MAX_REASON]}") from None
    decoder: _EventDecoder = _msgpack_event if encoding == "msgpack" else _json_event
    sent = cast("list[msgspec.Raw]", batch.events)
    opened = (_event(raw, decoder, ahead=ahead, latest=latest) for raw in sent)
    batch.events = [event for event in opened if event is not None]
    return Received(
        batch=batch,
        samples=taken,
        unknown_events=len(sent) - len(batch.events),
        digest=blake2b(body, digest_size=DIGEST_BYTES).digest(),
    )


def _validate(batch: messages.Batch) -> None:
    if batch.protocol > messages.PROTOCOL:
        raise ValueError(
            f"protocol {batch.protocol} is newer than this server's {messages.PROTOCOL}: update the server"
        )
    messages.validate_job(batch.job)
    if not 1 <= len(batch.uid) <= MAX_UID:
        raise ValueError(f"uid has 1 to {MAX_UID} characters")
    _require_within(batch, "rank", "sequence")
    _require_within(batch, "iteration", most=MAX_ITERATION)
    _require_within(batch, "attempt", most=MAX_ATTEMPT)
    _require_within(batch, "lineage", most=MAX_LINEAGE)
    if len(batch.events) > MAX_EVENTS:
        raise ValueError(f"{len(batch.events)} events: send at most {MAX_EVENTS} at once")
    if len(batch.gaps) > MAX_GAPS:
        raise ValueError(f"{len(batch.gaps)} gaps: send at most {MAX_GAPS} at once")
    for gap in batch.gaps:
        _require_within(gap, "dropped")
        _require_within(gap, "first_iteration", "last_iteration", most=MAX_ITERATION)
        _require_within(gap, "lineage", most=MAX_LINEAGE)


def _require_within(part: msgspec.Struct, *names: str, most: int = MAX_INTEGER) -> None:
    for name in names:
        if not 0 <= getattr(part, name) <= most:
            raise ValueError(f"{name} {getattr(part, name)} is outside 0 to {most}")


def _event(raw: msgspec.Raw, decoder: _EventDecoder, *, ahead: float, latest: float) -> messages.Event | None:
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


_ITERATIONS = (
    *("iteration", "durable_iteration", "first_iteration", "last_iteration"),
    *("iterations", "barrier_iterations"),
)
_LARGEST = {"lineage": MAX_LINEAGE, **dict.fromkeys(_ITERATIONS, MAX_ITERATION)}


def _settle(event: messages.Event) -> None:
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
    if isinstance(event, messages.Checkpoint):
        event.ranks = [span for span in event.ranks if _is_span_of_a_rank(span)]
    if isinstance(event, messages.Paced):
        # An infinite one stands for what was never measured, as that of a device copy where there is no device.
        event.profile = {name: value for name, value in event.profile.items() if 0 <= value < math.inf}
    if isinstance(event, messages.Checkpoint) and messages.parse_checkpoint_id(event.id) != (
        event.iteration,
        event.lineage,
    ):
        raise ValueError(f"checkpoint {event.id} is not at iteration {event.iteration}-{event.lineage}")
    if isinstance(event, messages.LineageStarted) and event.origin is not None:
        messages.validate_job(event.origin.job)
        messages.parse_checkpoint_id(event.origin.checkpoint)
        event.origin = msgspec.structs.replace(event.origin, digest=event.origin.digest[:MAX_LABEL])
    names = [getattr(event, "parent", None), getattr(event, "left", None)]
    if isinstance(event, messages.Inventory):
        if len(event.checkpoints) > MAX_CHECKPOINTS:
            raise ValueError(f"an inventory of {len(event.checkpoints)} checkpoints")
        names = [*event.checkpoints, *event.pinned]
    if isinstance(event, messages.Verified):
        names = [event.checkpoint, event.against]
    for name in filter(None, names):
        messages.parse_checkpoint_id(name)


def _correct_times(event: messages.Event, *, ahead: float, latest: float) -> None:
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if _is_time_field(name) and value is not None:
            setattr(event, name, min(max(0.0, value - ahead), latest))


def _short(told: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in told.items():
        yield name[:MAX_NAME], value[:MAX_TEXT] if isinstance(value, str) else value


def _is_span_of_a_rank(span: messages.RankSpan) -> bool:
    seconds = (span.snapshot_seconds, span.stall_seconds, span.persist_seconds)
    return 0 <= span.rank <= MAX_INTEGER and all(map(is_span, seconds))


def _is_time_field(name: str) -> bool:
    return name == "at" or name.endswith("_at")


def _within(name: str, value: float) -> bool:
    if _is_time_field(name):
        return is_time(value)
    return is_span(value) if name.endswith("seconds") else math.isfinite(value)
