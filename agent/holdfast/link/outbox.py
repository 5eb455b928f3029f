"""What waits to be sent: samples and events as they come in, then sealed batches, in memory or in the spool.

    pending   the training thread appends, without a lock
    sealed    a batch with its key and its bytes; from here on it never changes
    spooled   a sealed batch that is on disk, too, because no server took it

A batch leaves when it was acknowledged or refused. While no server answers nothing is sealed but events, for the
spool; samples wait in memory, and the oldest are thinned two to one when they become too many.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from dataclasses import dataclass
from time import time
from typing import NamedTuple

import msgspec

from holdfast.link.spool import Key, Spool
from holdfast.protocol import AttemptFinished, AttemptStarted, Batch, Event, LineageStarted, Samples

log = logging.getLogger("holdfast")

BATCH_SAMPLES, BATCH_EVENTS = 2_000, 500
INCOMING_SAMPLES = 200_000
"""Between two looks of the sender; beyond them samples are only counted."""
WAITING_SAMPLES, WAITING_EVENTS = 40_000, 10_000

_encoder = msgspec.msgpack.Encoder()


class Sample(NamedTuple):
    iteration: int
    lineage: int
    at: float
    seconds: float
    stall_seconds: float
    data_seconds: float
    metrics: dict[str, float]


@dataclass(slots=True)
class Sealed:
    key: Key
    payload: bytes | None
    """None: in the spool only."""
    spooled: bool = False


class Outbox:
    """`sample` and `event` are the training thread's and take no lock; the rest may be called by any thread."""

    def __init__(self, job: str, uid: str, attempt: int, rank: int, spool: Spool | None) -> None:
        self._job, self._uid, self._attempt, self._rank = job, uid, attempt, rank
        self._spool = spool
        self._incoming: deque[Sample] = deque()
        self._events: deque[Event] = deque()
        self._overflowed_samples = 0
        self._waiting: list[Sample] = []
        self._dropped_samples = self._dropped_events = 0
        self._sequence = 0
        self._reached = (1, 0)
        """Lineage and iteration: the furthest that a sample or event has named."""
        self._lock = threading.Lock()
        left = spool.left_by_others(uid, rank) if spool else []
        self._sealed: deque[Sealed] = deque(Sealed(key, None, spooled=True) for key in left)
        self.refused_batches = 0

    def sample(self, sample: Sample) -> None:
        if len(self._incoming) < INCOMING_SAMPLES:
            self._incoming.append(sample)
        else:
            self._overflowed_samples += 1

    def event(self, event: Event) -> None:
        self._events.append(event)

    def first(self) -> tuple[Sealed, bytes] | None:
        """The batch to send next, with its bytes."""
        with self._lock:
            while self._sealed:
                sealed = self._sealed[0]
                payload = sealed.payload
                if payload is None and self._spool is not None:
                    payload = self._spool.read(sealed.key)
                if payload is not None:
                    return sealed, payload
                self._sealed.popleft()
            return None

    def seal(self) -> None:
        """Make a batch of what waits, or of nothing at all: a heartbeat."""
        with self._lock:
            self._collect()
            self._seal()

    def waiting(self, *, at_least_a_batch: bool) -> bool:
        """Whether anything waits to be sealed, or as much as fills a batch."""
        samples = len(self._waiting) + len(self._incoming)
        if at_least_a_batch:
            return samples >= BATCH_SAMPLES or len(self._events) >= BATCH_EVENTS
        return samples + len(self._events) > 0

    def acknowledged(self, sealed: Sealed) -> None:
        with self._lock:
            self._remove(sealed)
            if sealed.spooled and self._spool is not None:
                self._spool.remove(sealed.key)

    def refused(self, sealed: Sealed, payload: bytes) -> None:
        """Never to be sent again."""
        with self._lock:
            self.refused_batches += 1
            self._remove(sealed)
            if self._spool is not None:
                self._spool.set_aside(sealed.key, payload)

    def park(self) -> None:
        """No server answers: put events where a crash cannot reach them, and keep samples within bounds."""
        with self._lock:
            self._collect()
            if self._spool is None:
                return
            while self._events:
                if not self._spooled_all():
                    return
                self._seal(samples=False)
            self._spooled_all()

    def park_all(self, timeout_seconds: float) -> None:
        """The end: whatever is left, samples as well, goes to disk. What finds no room there is lost."""
        if not self._lock.acquire(timeout=max(0.0, timeout_seconds)):
            return
        try:
            self._collect()
            # events before samples, where there is no room for both
            while self._events:
                self._seal(samples=False)
            while self._waiting:
                self._seal()
            for sealed in self._sealed:
                self._store(sealed)
        finally:
            self._lock.release()

    def _collect(self) -> None:
        for _ in range(len(self._incoming)):
            self._waiting.append(self._incoming.popleft())
        if self._waiting:
            newest = self._waiting[-1]
            self._reached = max(self._reached, (newest.lineage, newest.iteration))
        overflowed, self._overflowed_samples = self._overflowed_samples, 0
        self._dropped_samples += overflowed
        while len(self._waiting) > WAITING_SAMPLES:
            oldest = len(self._waiting) // 2
            self._dropped_samples += (oldest + 1) // 2
            del self._waiting[:oldest:2]
        while len(self._events) > WAITING_EVENTS:
            self._events.popleft()
            self._dropped_events += 1
            if self._dropped_events == 1:
                log.warning("No server answers and no room is left: the oldest events are being dropped")

    def _seal(self, *, samples: bool = True) -> None:
        chosen = self._waiting[:BATCH_SAMPLES] if samples else []
        events = [self._events.popleft() for _ in range(min(len(self._events), BATCH_EVENTS))]
        for event in events:
            if isinstance(event, AttemptStarted | AttemptFinished | LineageStarted):
                self._reached = max(self._reached, (event.lineage, event.iteration))
        self._sequence += 1
        batch = Batch(
            job=self._job,
            uid=self._uid,
            attempt=self._attempt,
            rank=self._rank,
            sequence=self._sequence,
            sent_at=time(),
            iteration=self._reached[1],
            lineage=self._reached[0],
            samples=_columns(chosen) if chosen else None,
            events=events,
            dropped_samples=self._dropped_samples if samples else 0,
        )
        if samples:
            del self._waiting[:BATCH_SAMPLES]
            self._dropped_samples = 0
        key = Key(self._attempt, self._uid, self._rank, self._sequence)
        self._sealed.append(Sealed(key, _encode(batch)))

    def _spooled_all(self) -> bool:
        """Whether all sealed batches are on disk now; only then may more be sealed without filling the memory."""
        stored = [self._store(sealed) for sealed in self._sealed]
        return all(stored)

    def _store(self, sealed: Sealed) -> bool:
        if not sealed.spooled and self._spool is not None and sealed.payload is not None:
            sealed.spooled = self._spool.write(sealed.key, sealed.payload)
        if sealed.spooled:
            sealed.payload = None
        return sealed.spooled

    def _remove(self, sealed: Sealed) -> None:
        if self._sealed and self._sealed[0] is sealed:
            self._sealed.popleft()


def _encode(batch: Batch) -> bytes:
    try:
        return _encoder.encode(batch)
    except Exception as error:  # one text that is no text, whatever its source, must not take a batch with it
        log.warning("Something that cannot be sent is left out of a report: %s", error)
        batch.events = [event for event in batch.events if _can_be_sent(event)]
        if not _can_be_sent(batch.samples):
            batch.samples = None
        return _encoder.encode(batch)


def _can_be_sent(part: object) -> bool:
    try:
        _encoder.encode(part)
    except Exception:  # as above
        return False
    return True


def _columns(samples: list[Sample]) -> Samples:
    names = dict.fromkeys(name for sample in samples for name in sample.metrics)
    return Samples(
        iteration=[int(sample.iteration) for sample in samples],
        lineage=[int(sample.lineage) for sample in samples],
        at=[_number(sample.at) for sample in samples],
        seconds=[_number(sample.seconds) for sample in samples],
        stall_seconds=[_number(sample.stall_seconds) for sample in samples],
        data_seconds=[_number(sample.data_seconds) for sample in samples],
        metrics={name: [_number(sample.metrics.get(name, math.nan)) for sample in samples] for name in names},
    )


def _number(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan
