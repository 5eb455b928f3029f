"""Decoding and validation of agents' batches, and correction of times from clocks that are ahead."""

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

from holdfast.protocol import ids, wire
from holdfast.protocol.wire import (
    MAX_ATTEMPT,
    MAX_CONFIGURATION_ENTRIES,
    MAX_INTEGER,
    MAX_ITERATION,
    MAX_LINEAGE,
    Event,
)
from holdfast_server.core.errors import RequestRefused
from holdfast_server.samples import sample_codec
from holdfast_server.samples.limits import MAX_AHEAD_SECONDS, MAX_NAME, is_span, is_time

MAX_EVENTS = 5000
MAX_GAPS = 1000
MAX_UID = 100
MAX_REASON = 300
"""Characters of a decoding error that are kept: some errors quote the input, which may be megabytes."""
MAX_TEXT = 4000
MAX_ENTRIES = 200
"""Most entries of a mapping in an event."""
MAX_CHECKPOINTS = 100_000
"""Most checkpoints of a store: every tenth of a million iterations."""
_MOST_ENTRIES = {"deleted": MAX_CHECKPOINTS, "values": MAX_CONFIGURATION_ENTRIES}
"""Most entries of the mappings that may have more."""
MAX_LABEL = 64
DIGEST_BYTES = 16

logger = logging.getLogger(__name__)


class InvalidBatch(RequestRefused):
    """A batch that can never be stored; sending it again is of no use."""

    status, code = 422, "invalid_batch"


@dataclass(frozen=True, slots=True)
class Received:
    """A valid batch."""

    batch: wire.Batch
    """The batch, with the events that this server knows."""
    samples: sample_codec.BatchSamples | None
    unknown_events: int
    digest: bytes
    """Digest of the body, to detect another batch of the same name."""

    @property
    def latest_lineage(self) -> int:
        """Return the largest lineage number that the batch mentions."""
        in_samples = [lineage for lineage, _ in (self.samples.tables if self.samples else ())]
        in_events = [getattr(event, "lineage", 0) for event in self.batch.events]
        return max([self.batch.lineage, *in_samples, *in_events, *(gap.lineage for gap in self.batch.gaps)])

    @property
    def empty(self) -> bool:
        """Whether it is only a heartbeat, which changes nothing when received twice and need not be remembered."""
        batch = self.batch
        return self.samples is None and not (self.unknown_events or batch.events or batch.gaps)

    @property
    def samples_only(self) -> bool:
        """Whether it has no events, and so changes nothing that agents wait for."""
        return not self.batch.events


class _Wire(wire.Batch, kw_only=True):
    """A batch whose events are not decoded yet, so that an unknown event does not invalidate the others."""

    events: list[msgspec.Raw] = []  # type: ignore[assignment]  # noqa: RUF012 - msgspec copies it


class _EventDecoder(Protocol):
    def decode(self, raw: msgspec.Raw, /) -> Event: ...


_msgpack, _json = msgspec.msgpack.Decoder(_Wire), msgspec.json.Decoder(_Wire, strict=False)
# JSON has no nan: there, a number may be the string "nan".
_msgpack_event, _json_event = msgspec.msgpack.Decoder(Event), msgspec.json.Decoder(Event, strict=False)


def decode(body: bytes, encoding: Literal["msgpack", "json"], *, now: float) -> Received:
    """Decode and validate a batch.

    An invalid sending time becomes `now`, because the agent could only send it again. A sending time later than
    the server's clock plus a tolerance comes from a clock that is ahead: all times of the batch move back by the
    difference.

    Raises:
        InvalidBatch: the body is not a valid batch; the message names the field.
    """
    try:
        batch: wire.Batch = (_msgpack if encoding == "msgpack" else _json).decode(body)
        _validate(batch)
        batch.uid = batch.uid.replace("\0", "\ufffd")  # as `models.base.PlainText` stores it
        if not is_time(batch.sent_at):
            batch.sent_at = now
        latest = now + MAX_AHEAD_SECONDS
        ahead = batch.sent_at - now if batch.sent_at > latest else 0.0
        batch.sent_at -= ahead
        samples = batch.samples
        if samples is not None and samples.iteration:
            taken = sample_codec.decode(
                samples, lineage=batch.lineage, at=batch.sent_at, ahead=ahead, latest=latest
            )
        else:
            taken = None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidBatch(f"the body is not a valid batch: {str(error)[:MAX_REASON]}") from None
    decoder: _EventDecoder = _msgpack_event if encoding == "msgpack" else _json_event
    sent = cast("list[msgspec.Raw]", batch.events)
    opened = (_decode_event(raw, decoder, ahead=ahead, latest=latest) for raw in sent)
    batch.events = [event for event in opened if event is not None]
    return Received(
        batch=batch,
        samples=taken,
        unknown_events=len(sent) - len(batch.events),
        digest=blake2b(body, digest_size=DIGEST_BYTES).digest(),
    )


def _validate(batch: wire.Batch) -> None:
    if batch.protocol > wire.PROTOCOL:
        raise ValueError(
            f"protocol {batch.protocol} is newer than this server's {wire.PROTOCOL}: update the server"
        )
    ids.validate_job(batch.job)
    if not 1 <= len(batch.uid) <= MAX_UID:
        raise ValueError(f"uid must have 1 to {MAX_UID} characters")
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


def _decode_event(raw: msgspec.Raw, decoder: _EventDecoder, *, ahead: float, latest: float) -> wire.Event | None:
    """Decode an event; None for an invalid one or one of an unknown type, which a newer agent may send.

    Args:
        ahead: seconds by which the agent's clock is ahead, subtracted from each time.
        latest: upper bound for times.
    """
    try:
        event = decoder.decode(raw)
        _validate_event(event)
        _correct_times(event, ahead=ahead, latest=latest)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        logger.info("ignored an event of a batch: %s", error)
        return None
    return event


_ITERATIONS = (
    *("iteration", "durable_iteration", "first_iteration", "last_iteration"),
    *("iterations", "barrier_iterations"),
)
_LARGEST = {"lineage": MAX_LINEAGE, **dict.fromkeys(_ITERATIONS, MAX_ITERATION)}


def _validate_event(event: wire.Event) -> None:
    """Shorten the texts of an event to a length that a page can show.

    Raises:
        ValueError: a value does not fit its column.
    """
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
            most = _MOST_ENTRIES.get(field.name, MAX_ENTRIES)
            setattr(event, field.name, dict(islice(_shortened(value), most)))
    if isinstance(event, wire.Checkpoint):
        event.ranks = [span for span in event.ranks if _is_span_of_a_rank(span)]
    if isinstance(event, wire.IntervalDecision):
        # The agent reports what it never measured as infinite, such as a device copy on a CPU-only machine.
        event.profile = {name: value for name, value in event.profile.items() if 0 <= value < math.inf}
    if isinstance(event, wire.Checkpoint) and ids.parse_checkpoint_id(event.id) != (
        event.iteration,
        event.lineage,
    ):
        raise ValueError(f"checkpoint {event.id} is not at iteration {event.iteration}-{event.lineage}")
    if isinstance(event, wire.LineageStarted) and event.origin is not None:
        ids.validate_job(event.origin.job)
        ids.parse_checkpoint_id(event.origin.checkpoint)
        event.origin = msgspec.structs.replace(event.origin, digest=event.origin.digest[:MAX_LABEL])
    names = [getattr(event, "parent", None), getattr(event, "left", None)]
    if isinstance(event, wire.Inventory):
        if len(event.checkpoints) > MAX_CHECKPOINTS:
            raise ValueError(f"an inventory of {len(event.checkpoints)} checkpoints")
        names = [*event.checkpoints, *event.pinned, *event.deleted]
    if isinstance(event, wire.VerificationReport):
        names = [event.checkpoint, event.against]
    for name in names:
        if name is not None:
            ids.parse_checkpoint_id(name)


def _correct_times(event: wire.Event, *, ahead: float, latest: float) -> None:
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if _is_time_field(name) and value is not None:
            setattr(event, name, min(max(0.0, value - ahead), latest))


def _shortened(entries: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in entries.items():
        yield name[:MAX_NAME], value[:MAX_TEXT] if isinstance(value, str) else value


def _is_span_of_a_rank(span: wire.RankCheckpointTimes) -> bool:
    seconds = (span.snapshot_seconds, span.stall_seconds, span.persist_seconds)
    return 0 <= span.rank <= MAX_INTEGER and all(map(is_span, seconds))


def _is_time_field(name: str) -> bool:
    return name == "at" or name.endswith("_at")


def _within(name: str, value: float) -> bool:
    if _is_time_field(name):
        return is_time(value)
    return is_span(value) if name.endswith("seconds") else math.isfinite(value)
