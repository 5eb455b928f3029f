"""Where a job's time went: every moment of a window falls into one bucket. Pure functions, in whole microseconds.

Sums of what was measured are laid along the time in which it was measured. What overlaps, because a clock was set
or a report came twice, is cut, so that the buckets always sum up to the window.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import get_args

from holdfast.protocol.questions import Bucket

MICROSECONDS = 1_000_000

BUCKETS: tuple[Bucket, ...] = get_args(Bucket)
DEFINITIONS: dict[Bucket, str] = {
    "productive": "iterations that stand, without the waits in them",
    "snapshot_wait": "training waited for the copy of a snapshot",
    "persist_backpressure": "training waited for the writing of checkpoints",
    "data_fetch": "training waited for the next batch",
    "data_prep": "of the wait for batches, what preparing them took, where that was told apart",
    "barrier": "from rank 0's own last gradient to the update: exchanging gradients, and waiting for other ranks",
    "restoring": "going back to a checkpoint in place",
    "starting": "from the start of an attempt to its first iteration, loading a checkpoint included",
    "lost": "iterations that a crash or a restore threw away, with all the waits in them",
    "down": "no attempt was running: between two, or since the last one failed or fell silent",
    "unexplained": "an attempt was running, and nothing was reported: an iteration under way, a probe, a hang",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One attempt."""

    uid: str
    started_at: float
    ended_at: float
    """When it ended or was heard last; now, while it runs."""
    trained_before: bool = False
    """It had finished iterations before the window begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Iterations of one attempt on one lineage that followed each other."""

    uid: str
    begins_at: float
    ends_at: float
    first_iteration: int
    last_iteration: int
    seconds: float
    stall_seconds: float
    data_seconds: float
    barrier_seconds: float
    stands_upto: int
    """The last iteration of this attempt and lineage that was not thrown away."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A restore in place."""

    ended_at: float
    seconds: float


@dataclass(slots=True)
class Timesheet:
    """Microseconds by bucket."""

    begins_at: float
    ends_at: float
    buckets: dict[Bucket, int] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 0))
    iterations: int = 0
    """Finished in the window, that stand."""
    lost_iterations: int = 0

    @property
    def wall(self) -> int:
        return _whole(self.ends_at) - _whole(self.begins_at)


def timesheet(
    lives: Sequence[Life],
    spans: Iterable[Span],
    restores: Iterable[Restored],
    *,
    begins_at: float,
    ends_at: float,
    told_apart: dict[Bucket, float],
) -> Timesheet:
    """`told_apart`: seconds of `persist_backpressure` and `data_prep` that were reported by themselves."""
    made = Timesheet(begins_at, max(begins_at, ends_at))
    start, end = _whole(made.begins_at), _whole(made.ends_at)
    by_uid: dict[str, list[Span]] = {}
    for span in spans:
        by_uid.setdefault(span.uid, []).append(span)
    pauses = sorted((_whole(one.ended_at - one.seconds), _whole(one.ended_at)) for one in restores)
    lives = sorted(lives, key=lambda life: life.started_at)
    reached = start
    for number, life in enumerate(lives):
        following = _whole(lives[number + 1].started_at) if number + 1 < len(lives) else end
        own = by_uid.get(life.uid, [])
        # Server and agents each go by their own clock: what was trained was trained while somebody lived.
        ended_at = max(life.ended_at, max((span.ends_at for span in own), default=0.0))
        begin = _within(_whole(life.started_at), reached, end)
        finish = _within(min(_whole(ended_at), following), begin, end)
        made.buckets["down"] += begin - reached
        _live(made, life, own, pauses, begin, finish)
        reached = finish
    made.buckets["down"] += end - reached
    _tell_apart(made, "snapshot_wait", "persist_backpressure", told_apart)
    _tell_apart(made, "data_fetch", "data_prep", told_apart)
    return made


def _live(
    made: Timesheet, life: Life, spans: list[Span], pauses: list[tuple[int, int]], begin: int, finish: int
) -> None:
    """One attempt, from when it began in this window to when it ended in it."""
    reached, trained = begin, life.trained_before
    for span in sorted(spans, key=lambda span: span.begins_at):
        first = _within(_whole(span.begins_at), reached, finish)
        last = _within(_whole(span.ends_at), first, finish)
        _pause(made, pauses, reached, first, "unexplained" if trained else "starting")
        _train(made, span, last - first)
        reached, trained = last, True
    _pause(made, pauses, reached, finish, "unexplained" if trained else "starting")


def _pause(made: Timesheet, pauses: list[tuple[int, int]], begin: int, finish: int, bucket: Bucket) -> None:
    """Time between iterations, of which some was a restore."""
    reached = begin
    for first, last in pauses:
        first, last = _within(first, reached, finish), _within(last, reached, finish)
        made.buckets[bucket] += first - reached
        made.buckets["restoring"] += last - first
        reached = max(reached, last)
    made.buckets[bucket] += finish - reached


def _train(made: Timesheet, span: Span, length: int) -> None:
    """So many microseconds of a span, which is all of it, or what of it lies in the window."""
    whole = _whole(span.ends_at) - _whole(span.begins_at)
    part = length / whole if whole else 0.0
    rows = span.last_iteration - span.first_iteration + 1
    lost_rows = _within(span.last_iteration - span.stands_upto, 0, rows)
    made.lost_iterations += round(lost_rows * part)
    made.iterations += round((rows - lost_rows) * part)
    left = min(length, _whole(span.seconds * part))
    made.buckets["unexplained"] += length - left
    lost = min(left, round(left * lost_rows / rows))
    made.buckets["lost"] += lost
    left -= lost
    stands = part * (rows - lost_rows) / rows
    measured: tuple[tuple[Bucket, float], ...] = (
        ("snapshot_wait", span.stall_seconds),
        ("data_fetch", span.data_seconds),
        ("barrier", span.barrier_seconds),
    )
    for bucket, seconds in measured:
        waited = min(left, _whole(seconds * stands))
        made.buckets[bucket] += waited
        left -= waited
    made.buckets["productive"] += left


def _tell_apart(made: Timesheet, whole: Bucket, kind: Bucket, told: dict[Bucket, float]) -> None:
    """The samples hold all waits of two kinds together; those of the rarer kind were told by themselves, too."""
    amount = min(made.buckets[whole], _whole(told.get(kind, 0.0)))
    made.buckets[whole] -= amount
    made.buckets[kind] += amount


def _whole(seconds: float) -> int:
    return round(seconds * MICROSECONDS)


def _within(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))
