"""Decoding and validation of agents' batches, and correction of times from clocks that are ahead."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Literal, Protocol, cast

import msgspec

from holdfast.protocol import ids, wire
from holdfast.protocol.field_types import fit, is_time, time_fields
from holdfast.protocol.wire import Event
from holdfast_server.core.errors import RequestRefused
from holdfast_server.samples import sample_codec
from holdfast_server.samples.limits import MAX_AHEAD_SECONDS

MAX_REASON = 300
"""Characters of a decoding error that are kept: some errors quote the input, which may be megabytes."""
MAX_LABEL = 64
DIGEST_BYTES = 16

logger = logging.getLogger(__name__)


class InvalidBatch(RequestRefused):
    """A batch that can never be stored; sending it again does not help."""

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

    # The default is copied by msgspec.
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=wire.MAX_EVENTS)] = []  # type: ignore[assignment]  # noqa: RUF012


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


def _decode_event(raw: msgspec.Raw, decoder: _EventDecoder, *, ahead: float, latest: float) -> wire.Event | None:
    """Decode an event; None for an invalid one or one of an unknown type, which a newer agent may send.

    Args:
        ahead: seconds by which the agent's clock is ahead, subtracted from each time.
        latest: upper bound for times.
    """
    try:
        event = decoder.decode(raw)
        fit(event)
        if isinstance(event, wire.Checkpoint):
            _require_matching_id(event)
        _correct_times(event, ahead=ahead, latest=latest)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        logger.info("ignored an event of a batch: %s", error)
        return None
    return event


def _require_matching_id(checkpoint: wire.Checkpoint) -> None:
    if ids.parse_checkpoint_id(checkpoint.id) != (checkpoint.iteration, checkpoint.lineage):
        raise ValueError(
            f"checkpoint {checkpoint.id} is not at iteration {checkpoint.iteration}-{checkpoint.lineage}"
        )


def _correct_times(event: wire.Event, *, ahead: float, latest: float) -> None:
    for name in time_fields(type(event)):
        at = getattr(event, name)
        if at is not None and (corrected := min(max(0.0, at - ahead), latest)) != at:
            setattr(event, name, corrected)
