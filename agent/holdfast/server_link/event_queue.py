"""What waits to be sent: samples and events as they come in, then sealed batches, in memory or in the spool.

    pending   the training thread appends, without a lock
    sealed    a batch with its key and its bytes; from here on it never changes
    spooled   a sealed batch that is on disk, too, because no server took it

There are two lanes, each in its own order: control, for events, and samples. A batch leaves when it was
acknowledged or refused. While no server answers nothing is sealed but events, for the spool; samples wait in
memory, as they do while a server takes none of them, and the oldest are thinned two to one when they become too
many. What was thinned away is told as gaps.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import time
from typing import Literal, Protocol

import msgspec

from holdfast.protocol.messages import (
    AttemptFinished,
    AttemptStarted,
    Batch,
    Event,
    Gap,
    Lane,
    LineageStarted,
    Samples,
)
from holdfast.server_link.spool import Key, Spool

log = logging.getLogger("holdfast")

BATCH_SAMPLES, BATCH_EVENTS = 2_000, 500
INCOMING_SAMPLES = 200_000
"""Between two looks of the sender; beyond them samples are only counted."""
WAITING_SAMPLES, WAITING_EVENTS = 40_000, 10_000
MOST_GAPS = 100

_encoder = msgspec.msgpack.Encoder()
_UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)
"""What an encoder raises for values that it has no form for; a text that is not UTF-8 is a ValueError."""


class Measured(Protocol):
    """What is told of an iteration."""

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


Sample = tuple[Measured, dict[str, float]]
"""As the training thread leaves it, which has no time to spare: the sender looks into it."""


@dataclass(slots=True)
class Sealed:
    key: Key
    payload: bytes | None
    """None: in the spool only."""
    spooled: bool = False


class EventQueue:
    """`sample` and `event` are the training thread's and take no lock; the rest may be called by any thread."""

    def __init__(self, job: str, uid: str, attempt: int, rank: int, spool: Spool | None) -> None:
        self._job, self._uid, self._attempt, self._rank = job, uid, attempt, rank
        self._spool = spool
        self._incoming: deque[Sample] = deque()
        self._events: deque[Event] = deque()
        self._overflowed = _Overflow()
        self._waiting: list[Sample] = []
        self._gaps: list[Gap] = []
        self._dropped_events = 0
        self._sequences: dict[Lane, int] = {"control": 0, "samples": 0}
        self._reached = (1, 0)
        """Lineage and iteration: the furthest that a sample or event has named."""
        self._lock = threading.Lock()
        left = spool.left_by_others(uid, rank) if spool else []
        self._sealed: dict[Lane, deque[Sealed]] = {"control": deque(), "samples": deque()}
        for key in left:
            self._sealed[key.lane].append(Sealed(key, None, spooled=True))
        self.refused_batches = 0

    def sample(self, sample: Sample) -> None:
        if len(self._incoming) < INCOMING_SAMPLES:
            self._incoming.append(sample)
        else:
            self._overflowed.add(sample)

    def event(self, event: Event) -> None:
        self._events.append(event)

    def first(self, *, samples: bool = True) -> tuple[Sealed, bytes] | None:
        """The batch to send next, with its bytes: what happened before what was measured."""
        with self._lock:
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
        """Make batches of what waits, or one of nothing at all: a heartbeat."""
        with self._lock:
            self._collect()
            if self._events or not (samples and self._waiting):
                self._seal_events()
            if samples and self._waiting:
                self._seal_samples()

    def waiting(self, *, at_least_a_batch: bool, samples: bool = True) -> bool:
        """Whether anything waits to be sealed, or as much as fills a batch."""
        measured = len(self._waiting) + len(self._incoming) if samples else 0
        if at_least_a_batch:
            return measured >= BATCH_SAMPLES or len(self._events) >= BATCH_EVENTS
        return measured + len(self._events) > 0

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

    def owns(self, sealed: Sealed) -> bool:
        """It is of this attempt, not what one before it has left."""
        return sealed.key.uid == self._uid

    def forget(self) -> None:
        """A newer attempt has begun: what this one has not told yet nobody is to hear, be it on disk already."""
        with self._lock:
            self._incoming.clear()
            self._events.clear()
            self._waiting.clear()
            for lane in _lanes():
                own = [sealed for sealed in self._sealed[lane] if self.owns(sealed)]
                self._sealed[lane] = deque(sealed for sealed in self._sealed[lane] if not self.owns(sealed))
                for sealed in own:
                    if sealed.spooled and self._spool is not None:
                        self._spool.remove(sealed.key)

    def park(self) -> None:
        """No server answers: put events where a crash cannot reach them, and keep samples within bounds."""
        with self._lock:
            self._collect()
            if self._spool is None:
                return
            while self._events:
                if not self._spooled_all():
                    return
                self._seal_events()
            self._spooled_all()

    def park_all(self, timeout_seconds: float) -> None:
        """The end: whatever is left, samples as well, goes to disk. What finds no room there is lost."""
        if not self._lock.acquire(timeout=max(0.0, timeout_seconds)):
            return
        try:
            self._collect()
            # events before samples, where there is no room for both
            while self._events:
                self._seal_events()
            while self._waiting:
                self._seal_samples()
            self._spooled_all()
        finally:
            self._lock.release()

    def _collect(self) -> None:
        for _ in range(len(self._incoming)):
            self._waiting.append(self._incoming.popleft())
        if self._waiting:
            newest, _ = self._waiting[-1]
            self._reached = max(self._reached, (newest.lineage, newest.iteration))
        # A sample that overflows at this very moment may be counted in neither: one of more than 200,000.
        overflowed, self._overflowed = self._overflowed, _Overflow()
        for gap in overflowed.gaps:
            self._drop(gap)
        while len(self._waiting) > WAITING_SAMPLES:
            oldest = len(self._waiting) // 2
            for gap in _gaps(self._waiting[:oldest:2]):
                self._drop(gap)
            del self._waiting[:oldest:2]
        while len(self._events) > WAITING_EVENTS:
            self._events.popleft()
            self._dropped_events += 1
            if self._dropped_events == 1:
                log.warning("No server answers and no room is left: the oldest events are being dropped")

    def _drop(self, gap: Gap) -> None:
        """Note a gap, as one with those of its lineage that it meets."""
        for place, other in enumerate(self._gaps):
            if other.lineage == gap.lineage and _meet(other, gap):
                self._gaps[place] = _united(other, gap)
                return
        self._gaps.append(gap)
        if len(self._gaps) > MOST_GAPS:
            self._gaps[:2] = [_united(*self._gaps[:2])]

    def _seal_events(self) -> None:
        events = [self._events.popleft() for _ in range(min(len(self._events), BATCH_EVENTS))]
        for event in events:
            if isinstance(event, AttemptStarted | AttemptFinished | LineageStarted):
                self._reached = max(self._reached, (event.lineage, event.iteration))
        self._seal("control", events=events)

    def _seal_samples(self) -> None:
        chosen = self._waiting[:BATCH_SAMPLES]
        del self._waiting[:BATCH_SAMPLES]
        gaps, self._gaps = self._gaps, []
        self._seal("samples", samples=_columns(chosen), gaps=gaps)

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
        key = Key(self._attempt, self._uid, self._rank, lane, self._sequences[lane])
        self._sealed[lane].append(Sealed(key, _encode(batch)))

    def _spooled_all(self) -> bool:
        """Whether all sealed batches are on disk now; only then may more be sealed without filling the memory."""
        stored = [self._store(sealed) for lane in _lanes() for sealed in self._sealed[lane]]
        return all(stored)

    def _store(self, sealed: Sealed) -> bool:
        if not sealed.spooled and self._spool is not None and sealed.payload is not None:
            sealed.spooled = self._spool.write(sealed.key, sealed.payload)
        if sealed.spooled:
            sealed.payload = None
        return sealed.spooled

    def _remove(self, sealed: Sealed) -> None:
        queue = self._sealed[sealed.key.lane]
        if queue and queue[0] is sealed:
            queue.popleft()


def _encode(batch: Batch) -> bytes:
    try:
        return _encoder.encode(batch)
    except _UNENCODABLE as error:  # one text with a lone surrogate, as of a file name, must not cost the batch
        log.warning("Something that cannot be sent is left out of a report: %s", error)
        batch.events = [event for event in batch.events if _can_be_sent(event)]
        if not _can_be_sent(batch.samples):
            batch.samples = None
        return _encoder.encode(batch)


def _can_be_sent(part: object) -> bool:
    try:
        _encoder.encode(part)
    except _UNENCODABLE:
        return False
    return True


def _columns(samples: Sequence[Sample]) -> Samples:
    names = dict.fromkeys(name for _, metrics in samples for name in metrics)
    nothing = math.nan
    return Samples(
        iteration=_bytes("q", [measured.iteration for measured, _ in samples]),
        lineage=_bytes("q", [measured.lineage for measured, _ in samples]),
        at=_bytes("d", [measured.at for measured, _ in samples]),
        seconds=_bytes("d", [measured.seconds for measured, _ in samples]),
        stall_seconds=_bytes("d", [measured.checkpoint_stall_seconds for measured, _ in samples]),
        data_seconds=_bytes("d", [measured.data_seconds for measured, _ in samples]),
        metrics={name: _bytes("d", [metrics.get(name, nothing) for _, metrics in samples]) for name in names},
    )


def _bytes(kind: Literal["q", "d"], values: Sequence[float]) -> bytes:
    """As the server reads columns, on any machine."""
    try:
        column = array(kind, values)
    except (TypeError, OverflowError):
        column = array(kind, map(int if kind == "q" else _number, values))
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _number(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


class _Overflow:
    """Samples that came when no more were taken in: only where they were is kept."""

    def __init__(self) -> None:
        self.gaps: list[Gap] = []

    def add(self, sample: Sample) -> None:
        gap = _gap(sample)
        if self.gaps and self.gaps[-1].lineage == gap.lineage:
            self.gaps[-1] = _united(self.gaps[-1], gap)
        else:
            self.gaps.append(gap)


def _gaps(samples: Iterable[Sample]) -> Iterable[Gap]:
    """One for each run of samples on one lineage."""
    overflow = _Overflow()
    for sample in samples:
        overflow.add(sample)
    return overflow.gaps


def _gap(sample: Sample) -> Gap:
    at, _ = sample
    return Gap(lineage=at.lineage, first_iteration=at.iteration, last_iteration=at.iteration, dropped=1)


def _meet(one: Gap, other: Gap) -> bool:
    """They overlap, or nothing but what was kept by the thinning lies between them."""
    return one.first_iteration <= other.last_iteration + 2 and other.first_iteration <= one.last_iteration + 2


def _united(one: Gap, other: Gap) -> Gap:
    """Of two lineages, only where there are too many gaps to tell each: as one of the later."""
    return Gap(
        lineage=other.lineage,
        first_iteration=min(one.first_iteration, other.first_iteration),
        last_iteration=max(one.last_iteration, other.last_iteration),
        dropped=one.dropped + other.dropped,
    )


def _lanes(samples: bool = True) -> tuple[Lane, ...]:
    return ("control", "samples") if samples else ("control",)
