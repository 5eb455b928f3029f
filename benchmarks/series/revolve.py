"""Binomial checkpointing (Griewank and Walther, 2000): reverse a chain of steps from few snapshots.

The number of steps that are advanced to reverse `steps` of them with `slots` snapshots, that of the start
included, is the least possible: r * steps - C(slots + r, slots + 1). Here r is the least number with C(slots +
r, slots) >= steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Keep the present state."""


@dataclass(frozen=True, slots=True)
class Restore:
    """Go back to the snapshot that was taken last, and give it up if it is not needed again."""

    last: bool


@dataclass(frozen=True, slots=True)
class Advance:
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Reverse:
    """Reverse the step that begins at the present state."""

    step: int


Action: TypeAlias = Snapshot | Restore | Advance | Reverse


def least_advances(steps: int, slots: int) -> int:
    """Return the binomial formula."""
    sweeps = _sweeps(steps, slots)
    return sweeps * steps - math.comb(slots + sweeps, slots + 1)


def schedule(steps: int, slots: int) -> Iterator[Action]:
    """Yield what to do, from the state before step 0 on."""
    if slots < 1:
        raise ValueError("slots must be at least 1, for the first state")
    yield Snapshot()
    yield from _reverse(0, steps, slots)


def _reverse(start: int, end: int, slots: int) -> Iterator[Action]:
    """Reverse the steps from the present state on, which is in the newest snapshot."""
    while end - start > 1:
        middle = start + _first_part(end - start, slots)
        yield Advance(start, middle)
        if slots > 1 and end - middle > 1:
            yield Snapshot()
            yield from _reverse(middle, end, slots - 1)
        else:
            assert end - middle == 1
            yield Reverse(middle)
        end = middle
        yield Restore(last=end - start == 1)
    yield Reverse(start)


def _first_part(steps: int, slots: int) -> int:
    """Return how far to advance before the next snapshot."""
    if slots == 1:
        return steps - 1
    sweeps = _sweeps(steps, slots)
    return min(math.comb(slots + sweeps - 1, slots), steps - math.comb(slots + sweeps - 2, slots - 1))


def _sweeps(steps: int, slots: int) -> int:
    sweeps = 0
    while math.comb(slots + sweeps, slots) < steps:
        sweeps += 1
    return sweeps
