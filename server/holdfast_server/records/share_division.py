"""Division of a limit for a store among the jobs that write there. Pure functions.

Two figures for each job. Its fair share is an average: weighted max-min fairness, by need and weight. It decides
who begins a checkpoint next: the job whose share has earned its next checkpoint first. Its rate is
that of a write: at most `writers` checkpoints are written at a time, and they divide the limit by weight. Fewer
checkpoints at a higher rate take less time each than all at once, at the same total.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WRITERS = 4
"""Checkpoints that are written at the same time, unless an operator sets another number."""
HOLDS_SECONDS = 60.0
"""Time without contact with a server after which the fallback applies, unless an operator sets another."""
LAPSE_SECONDS = 30.0
"""A granted start that is not used for this long does not keep others from starting."""
LEAST_WAIT_SECONDS = 30.0
"""A checkpoint waits for the start at least for this long, if its turn does not come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """An operator's limit."""

    bytes_per_second: float
    writers: int = WRITERS
    fallback_bytes_per_second: float | None = None
    holds_seconds: float = HOLDS_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """What a division needs of a job that writes to the store."""

    weight: float = 1.0
    checkpoint_bytes: int = 0
    interval_seconds: float | None = None
    """Time between two checkpoints as the job's policy wants them."""
    is_writing: bool = False
    wanted_at: float | None = None
    """When it asked for the start that it waits for; `None`: it waits for none."""
    earned_at: float | None = None
    """When its share has earned its next checkpoint; see `earned_after`."""
    granted_at: float | None = None
    """When the start was granted that it has not used; `None`: there is none."""

    @property
    def need(self) -> float:
        """Bytes per second that it would write without a limit."""
        if not self.interval_seconds or not self.checkpoint_bytes:
            return math.inf
        return self.checkpoint_bytes / self.interval_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a job gets."""

    bytes_per_second: float | None
    """Rate of its write; `None`: it writes nothing, and its last rate stays."""
    fair_bytes_per_second: float
    fallback_bytes_per_second: float
    longest_wait_seconds: float
    is_granted: bool
    """The start that it waits for is granted now."""


def fair_shares(limit: float, needs: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the weighted max-min fair shares of a limit, none above its need.

    What a job does not need goes to the others by weight. The sum is at most the limit.
    """
    shares, left = [0.0] * len(needs), limit
    order = sorted(range(len(needs)), key=lambda one: needs[one] / weights[one])
    weight_left = math.fsum(weights)
    for one in order:
        shares[one] = max(
            0.0, min(needs[one], left * min(1.0, weights[one] / weight_left) if weight_left > 0 else left)
        )
        left -= shares[one]
        weight_left -= weights[one]
    return shares


def divide(limit: Limit, writers: Mapping[str, Writer], *, now: float) -> dict[str, Assignment]:
    """Divide a limit among the writers, and grant starts while fewer than `limit.writers` are at work."""
    total, each = limit.bytes_per_second, list(writers.values())
    fair = dict(
        zip(writers, fair_shares(total, [one.need for one in each], [one.weight for one in each]), strict=True)
    )
    weights = math.fsum(one.weight for one in each) or 1.0
    round_seconds = math.fsum(one.checkpoint_bytes for one in each) / total
    granted = _grants(limit, writers, now)
    writing = math.fsum(one.weight for one in each if one.is_writing)
    assignments = {}
    for name, one in writers.items():
        rate = None
        if one.is_writing:
            rate = total * one.weight / writing
        elif name in granted or one.granted_at is not None:
            rate = total * one.weight / (writing + one.weight)
        fallback = limit.fallback_bytes_per_second
        assignments[name] = Assignment(
            bytes_per_second=rate,
            fair_bytes_per_second=fair[name],
            fallback_bytes_per_second=total * one.weight / weights if fallback is None else fallback,
            longest_wait_seconds=LEAST_WAIT_SECONDS + 2 * round_seconds,
            is_granted=name in granted,
        )
    return assignments


def _grants(limit: Limit, writers: Mapping[str, Writer], now: float) -> set[str]:
    """Return who may begin now: those who have earned it first, while there is room."""

    def is_at_work(one: Writer) -> bool:
        return one.is_writing or (one.granted_at is not None and now - one.granted_at < LAPSE_SECONDS)

    room = limit.writers - sum(is_at_work(one) for one in writers.values())
    waiting = [name for name, one in writers.items() if one.wanted_at is not None]
    waiting.sort(key=lambda name: (writers[name].earned_at or 0.0, writers[name].wanted_at or 0.0, name))
    return set(waiting[: max(0, room)])


def earned_after(earned_at: float | None, fair: float | None, checkpoint_bytes: int, *, now: float) -> float:
    """Return when the share of a job that begins a checkpoint now has earned the one after it.

    A job that began late keeps what it has earned meanwhile, at most one checkpoint.
    """
    seconds = checkpoint_bytes / fair if fair else 0.0
    return max(now if earned_at is None else earned_at, now - seconds) + seconds
