"""Accounting of a job's time: every moment of a window falls into one bucket. Pure functions, in microseconds.

Measured durations are placed in the time of their measurement. Overlaps, because a clock was set or a report was
repeated, are cut, so that the buckets always add up to the window.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from holdfast.protocol.analyses import Bucket

MICROSECONDS = 1_000_000

BUCKETS: tuple[Bucket, ...] = get_args(Bucket)
DEFINITIONS: dict[Bucket, str] = {
    "productive": "iterations that were kept, without waits and slowdown",
    "snapshot_wait": "training waited for the copy of a snapshot",
    "checkpoint_slowdown": "iterations took longer because of checkpoints: measured overhead minus the waits",
    "data_fetch": "training waited for the next batch",
    "barrier": "time from rank 0's last gradient to the update: gradient exchange, and waiting for other ranks",
    "paused": "training was paused on request",
    "restoring": "restoring a checkpoint in place",
    "starting": "time from the start of an attempt to its first iteration, including loading a checkpoint",
    "lost": "iterations that a crash or a restore discarded, including their waits",
    "down": "no attempt was running: between two attempts, or since the last one failed or became silent",
    "unexplained": "an attempt was running without reporting iterations: an unfinished iteration, a probe, a hang",
}


_TRAINING: tuple[Bucket, ...] = ("productive", "snapshot_wait", "data_fetch", "barrier")
"""Buckets of the iterations that stand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTime:
    """Lifetime of one attempt."""

    uid: str
    started_at: float
    ended_at: float
    """When it ended or last reported; the current time while it runs."""
    trained_before: bool = False
    """Whether it finished iterations before the window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive iterations of one attempt on one lineage."""

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
    """Last iteration of this attempt and lineage that stands."""
    lineage: int = 0


@dataclass(frozen=True, slots=True)
class Interruption:
    """A time between two iterations: a restore in place, or a pause."""

    bucket: Literal["restoring", "paused"]
    begins_at: float
    ends_at: float
    uid: str | None = None
    """Its attempt; `None` if the time alone decides."""


_Gap = tuple[int, int, Bucket]
"""Begin, end and bucket of an interruption."""


@dataclass(slots=True)
class Timesheet:
    """Microseconds by bucket."""

    begins_at: float
    ends_at: float
    buckets: dict[Bucket, int] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 0))
    iterations: int = 0
    """Iterations finished in the window that stand."""
    lost_iterations: int = 0

    @property
    def wall(self) -> int:
        return _whole(self.ends_at) - _whole(self.begins_at)


def timesheet(
    attempts: Sequence[AttemptTime],
    spans: Iterable[Span],
    interruptions: Iterable[Interruption],
    *,
    begins_at: float,
    ends_at: float,
    overhead: float = 0.0,
) -> Timesheet:
    """Account for a window.

    Args:
        overhead: measured overhead of checkpoints, as a fraction of the time without them.
    """
    made = Timesheet(begins_at, max(begins_at, ends_at))
    start, end = _whole(made.begins_at), _whole(made.ends_at)
    by_uid: dict[str, list[Span]] = {}
    for span in spans:
        by_uid.setdefault(span.uid, []).append(span)
    gaps = sorted((_whole(one.begins_at), _whole(one.ends_at), one.bucket, one.uid or "") for one in interruptions)
    attempts = sorted(attempts, key=lambda attempt: attempt.started_at)
    reached = start
    for number, attempt in enumerate(attempts):
        following = _whole(attempts[number + 1].started_at) if number + 1 < len(attempts) else end
        own = by_uid.get(attempt.uid, [])
        # Clocks of server and agents differ: an attempt lived at least as long as it trained.
        ended_at = max(attempt.ended_at, max((span.ends_at for span in own), default=0.0))
        begin = _within(_whole(attempt.started_at), reached, end)
        finish = _within(min(_whole(ended_at), following), begin, end)
        made.buckets["down"] += begin - reached
        own_gaps: list[_Gap] = [gap[:3] for gap in gaps if gap[3] in ("", attempt.uid)]
        _add_attempt(made, attempt, own, own_gaps, begin, finish)
        reached = finish
    made.buckets["down"] += end - reached
    _slow_down(made, overhead)
    return made


def _add_attempt(
    made: Timesheet,
    attempt: AttemptTime,
    spans: list[Span],
    gaps: list[_Gap],
    begin: int,
    finish: int,
) -> None:
    """Account for one attempt within the window."""
    reached, trained = begin, attempt.trained_before
    for span in sorted(spans, key=lambda span: span.begins_at):
        first = _within(_whole(span.begins_at), reached, finish)
        last = _within(_whole(span.ends_at), first, finish)
        _interrupt(made, gaps, reached, first, "unexplained" if trained else "starting")
        _train(made, span, gaps, first, last)
        reached, trained = last, True
    _interrupt(made, gaps, reached, finish, "unexplained" if trained else "starting")


def _interrupt(made: Timesheet, gaps: list[_Gap], begin: int, finish: int, bucket: Bucket) -> None:
    """Account for time between iterations, part of which may be restores and pauses."""
    reached = begin
    for first, last, reason in gaps:
        first, last = _within(first, reached, finish), _within(last, reached, finish)
        made.buckets[bucket] += first - reached
        made.buckets[reason] += last - first
        reached = max(reached, last)
    made.buckets[bucket] += finish - reached


def _paused(gaps: list[_Gap], begin: int, finish: int) -> int:
    """Return the part of a time that was paused."""
    paused, reached = 0, begin
    for first, last, reason in gaps:
        if reason == "paused":
            first, last = _within(first, reached, finish), _within(last, reached, finish)
            paused, reached = paused + last - first, max(reached, last)
    return paused


def _train(made: Timesheet, span: Span, gaps: list[_Gap], begin: int, finish: int) -> None:
    """Account for a span from `begin` to `finish`, its part in the window, in which training may have paused."""
    first, last = _whole(span.begins_at), _whole(span.ends_at)
    whole, paused = last - first - _paused(gaps, first, last), _paused(gaps, begin, finish)
    made.buckets["paused"] += paused
    length = finish - begin - paused
    part = length / whole if whole > 0 else 0.0
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


def _slow_down(made: Timesheet, overhead: float) -> None:
    """Move what checkpoints cost beyond the waits out of the productive time."""
    trained = sum(made.buckets[name] for name in _TRAINING)
    cost = round(trained * overhead / (1 + overhead))
    slowed = _within(cost - made.buckets["snapshot_wait"], 0, made.buckets["productive"])
    made.buckets["productive"] -= slowed
    made.buckets["checkpoint_slowdown"] += slowed


def _whole(seconds: float) -> int:
    return round(seconds * MICROSECONDS)


def _within(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))
