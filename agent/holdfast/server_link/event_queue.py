"""The reports that wait to be sent: samples and events as they arrive, then encoded batches.

    pending   the training thread appends, without a lock
    sealed    a batch with its key and bytes; it never changes again
    spooled   a sealed batch that is also on disk, because no server accepted it

Events are sent in the control lane, samples in their own, each lane in order. A batch is removed once the server
acknowledges or rejects it. While no server answers, only events are sealed, for the spool. Samples wait in memory,
and when there are too many, every second one of the older half is dropped. The next batch reports these gaps.
"""

from __future__ import annotations

import logging
import math
import sys
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import time
from typing import Literal, Protocol

import msgspec

from holdfast.protocol.wire import (
    AttemptFinished,
    AttemptStarted,
    Batch,
    Event,
    Gap,
    Lane,
    LineageStarted,
    Samples,
)
from holdfast.server_link.spool import BatchKey, Spool

log = logging.getLogger("holdfast")

BATCH_SAMPLES, BATCH_EVENTS = 2_000, 500
INCOMING_SAMPLES = 200_000
"""The most samples that wait for the sender; further ones are only counted."""
WAITING_SAMPLES, WAITING_EVENTS = 40_000, 10_000

_encoder = msgspec.msgpack.Encoder()
_UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)
"""What the encoder raises for a value that it cannot encode, such as text with a lone surrogate."""


class IterationFigures(Protocol):
    """The figures that are reported of an iteration."""

    @property
    def iteration(self) -> int: ...
    @property
    def lineage(self) -> int: ...
    @property
    def at(self) -> float: ...
    @property
    def seconds(self) -> float: ...
    @property
    def checkpoint_stall_seconds(self) -> float: ...
    @property
    def data_seconds(self) -> float: ...


Sample = tuple[IterationFigures, dict[str, float]]
"""An iteration's figures and metrics, as the training thread passes them on unread."""


@dataclass(slots=True)
class SealedBatch:
    key: BatchKey
    payload: bytes | None
    """The encoded batch; `None` if only the spool has it."""
    is_spooled: bool = False


class EventQueue:
    """The queue between the training thread, which adds samples and events, and the sender's, which does the rest.

    Both ends are deques, so that no lock is needed.
    """

    def __init__(self, job: str, uid: str, attempt: int, rank: int, spool: Spool | None) -> None:
        self._job, self._uid, self._attempt, self._rank = job, uid, attempt, rank
        self._spool = spool
        self._incoming: deque[Sample] = deque()
        self._events: deque[Event] = deque()
        self._overflow_gaps: dict[int, Gap] = {}
        self._waiting: list[Sample] = []
        self._gaps: dict[int, Gap] = {}
        """What was dropped since the last batch of samples, by lineage."""
        self._dropped_events = 0
        self._sequences: dict[Lane, int] = {"control": 0, "samples": 0}
        self._reached = (1, 0)
        """The latest (lineage, iteration) of a sample or event."""
        self._sealed: dict[Lane, deque[SealedBatch]] = {"control": deque(), "samples": deque()}
        for key in spool.left_by_others(uid, rank) if spool else []:
            self._sealed[key.lane].append(SealedBatch(key, None, is_spooled=True))

    def sample(self, sample: Sample) -> None:
        if len(self._incoming) < INCOMING_SAMPLES:
            self._incoming.append(sample)
        else:
            _add_gap(self._overflow_gaps, _gap_of(sample))

    def event(self, event: Event) -> None:
        self._events.append(event)

    def first(self, *, samples: bool = True) -> tuple[SealedBatch, bytes] | None:
        """Return the batch to send next, with its bytes: events before samples."""
        for lane in _lanes(samples):
            while self._sealed[lane]:
                sealed = self._sealed[lane][0]
                payload = sealed.payload
                if payload is None and self._spool is not None:
                    payload = self._spool.read(sealed.key)
                if payload is not None:
                    return sealed, payload
                self._sealed[lane].popleft()
        return None

    def seal(self, *, samples: bool = True) -> None:
        """Seal pending events and samples, or an empty batch as a heartbeat."""
        self._collect()
        if self._events or not (samples and self._waiting):
            self._seal_events()
        if samples and self._waiting:
            self._seal_samples()

    def has_pending(self, *, full_batch: bool, samples: bool = True) -> bool:
        """Return whether anything is pending, or enough for a full batch."""
        pending = len(self._waiting) + len(self._incoming) if samples else 0
        if full_batch:
            return pending >= BATCH_SAMPLES or len(self._events) >= BATCH_EVENTS
        return pending + len(self._events) > 0

    def acknowledged(self, sealed: SealedBatch) -> None:
        """Remove a batch that the server has accepted, or will never accept."""
        self._remove(sealed)

    def owns(self, sealed: SealedBatch) -> bool:
        """Return whether a batch is of this attempt, not of an earlier one."""
        return sealed.key.uid == self._uid

    def discard_own(self) -> None:
        """Discard the unsent reports of this attempt, those on disk included: a newer attempt has begun."""
        self._incoming.clear()
        self._events.clear()
        self._waiting.clear()
        for sealed in [each for lane in _lanes() for each in self._sealed[lane] if self.owns(each)]:
            self._remove(sealed)

    def store_events(self) -> None:
        """Write events to the spool, where a crash cannot lose them, and keep samples within bounds."""
        self._collect()
        if self._spool is None:
            return
        while self._events:
            if not self._store_sealed():
                return
            self._seal_events()
        self._store_sealed()

    def store_all(self) -> None:
        """Write everything that is left to the spool. What does not fit there is lost."""
        self._collect()
        while self._events:  # before the samples, in case both do not fit
            self._seal_events()
        while self._waiting:
            self._seal_samples()
        self._store_sealed()

    def _collect(self) -> None:
        for _ in range(len(self._incoming)):
            self._waiting.append(self._incoming.popleft())
        if self._waiting:
            newest, _ = self._waiting[-1]
            self._reached = max(self._reached, (newest.lineage, newest.iteration))
        # A sample that overflows during the swap may be counted in neither list: one of more than 200,000.
        overflow, self._overflow_gaps = self._overflow_gaps, {}
        for gap in list(overflow.values()):
            _add_gap(self._gaps, gap)
        while len(self._waiting) > WAITING_SAMPLES:
            oldest = len(self._waiting) // 2
            for sample in self._waiting[:oldest:2]:
                _add_gap(self._gaps, _gap_of(sample))
            del self._waiting[:oldest:2]
        while len(self._events) > WAITING_EVENTS:
            self._events.popleft()
            self._dropped_events += 1
            if self._dropped_events == 1:
                log.warning(
                    "More than %d events wait for the server and cannot be written to disk; dropping the oldest",
                    WAITING_EVENTS,
                )

    def _seal_events(self) -> None:
        events = [self._events.popleft() for _ in range(min(len(self._events), BATCH_EVENTS))]
        for event in events:
            if isinstance(event, AttemptStarted | AttemptFinished | LineageStarted):
                self._reached = max(self._reached, (event.lineage, event.iteration))
        self._seal("control", events=events)

    def _seal_samples(self) -> None:
        chosen = self._waiting[:BATCH_SAMPLES]
        del self._waiting[:BATCH_SAMPLES]
        gaps, self._gaps = self._gaps, {}
        self._seal("samples", samples=_columns(chosen), gaps=list(gaps.values()))

    def _seal(
        self, lane: Lane, *, samples: Samples | None = None, events: Sequence[Event] = (), gaps: Sequence[Gap] = ()
    ) -> None:
        self._sequences[lane] += 1
        batch = Batch(
            job=self._job,
            uid=self._uid,
            attempt=self._attempt,
            rank=self._rank,
            lane=lane,
            sequence=self._sequences[lane],
            sent_at=time(),
            iteration=self._reached[1],
            lineage=self._reached[0],
            samples=samples,
            events=list(events),
            gaps=list(gaps),
        )
        key = BatchKey(self._attempt, self._uid, self._rank, lane, self._sequences[lane])
        self._sealed[lane].append(SealedBatch(key, _encode(batch)))

    def _store_sealed(self) -> bool:
        """Return whether all sealed batches are on disk; only then may more be sealed within the memory bound."""
        stored = [self._store(sealed) for lane in _lanes() for sealed in self._sealed[lane]]
        return all(stored)

    def _store(self, sealed: SealedBatch) -> bool:
        if not sealed.is_spooled and self._spool is not None and sealed.payload is not None:
            sealed.is_spooled = self._spool.write(sealed.key, sealed.payload)
        if sealed.is_spooled:
            sealed.payload = None
        return sealed.is_spooled

    def _remove(self, sealed: SealedBatch) -> None:
        self._sealed[sealed.key.lane].remove(sealed)
        if sealed.is_spooled and self._spool is not None:
            self._spool.remove(sealed.key)


def _encode(batch: Batch) -> bytes:
    try:
        return _encoder.encode(batch)
    except _UNENCODABLE as error:  # a file name with a lone surrogate must not cost the whole batch
        log.warning("An event or sample that cannot be encoded is left out of a report: %s", error)
        batch.events = [event for event in batch.events if _is_encodable(event)]
        if not _is_encodable(batch.samples):
            batch.samples = None
        return _encoder.encode(batch)


def _is_encodable(part: object) -> bool:
    try:
        _encoder.encode(part)
    except _UNENCODABLE:
        return False
    return True


def _columns(samples: Sequence[Sample]) -> Samples:
    names = dict.fromkeys(name for _, metrics in samples for name in metrics)
    nothing = math.nan
    return Samples(
        iteration=_bytes("q", [figures.iteration for figures, _ in samples]),
        lineage=_bytes("q", [figures.lineage for figures, _ in samples]),
        at=_bytes("d", [figures.at for figures, _ in samples]),
        seconds=_bytes("d", [figures.seconds for figures, _ in samples]),
        stall_seconds=_bytes("d", [figures.checkpoint_stall_seconds for figures, _ in samples]),
        data_seconds=_bytes("d", [figures.data_seconds for figures, _ in samples]),
        metrics={name: _bytes("d", [metrics.get(name, nothing) for _, metrics in samples]) for name in names},
    )


def _bytes(kind: Literal["q", "d"], values: Sequence[float]) -> bytes:
    """Encode a column as little-endian numbers."""
    column = array(kind, values)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _add_gap(gaps: dict[int, Gap], gap: Gap) -> None:
    """Add a gap to those by lineage. The united range may contain samples that were kept."""
    if (known := gaps.get(gap.lineage)) is not None:
        gap = Gap(
            lineage=gap.lineage,
            first_iteration=min(known.first_iteration, gap.first_iteration),
            last_iteration=max(known.last_iteration, gap.last_iteration),
            dropped=known.dropped + gap.dropped,
        )
    gaps[gap.lineage] = gap


def _gap_of(sample: Sample) -> Gap:
    at, _ = sample
    return Gap(lineage=at.lineage, first_iteration=at.iteration, last_iteration=at.iteration, dropped=1)


def _lanes(samples: bool = True) -> tuple[Lane, ...]:
    return ("control", "samples") if samples else ("control",)
