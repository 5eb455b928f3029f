"""A trainer's progress, seen from outside: how far its starts come, and when an iteration is overdue.

The session writes it into the 16 bytes of HOLDFAST_PROGRESS: two little-endian int64, the last finished iteration,
and the number of steps that this start has made, negative once training is over.
"""

from __future__ import annotations

import collections
import contextlib
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.system.supervisor_channel import PROGRESS_LAYOUT

WINDOW = 32
"""Stretches of iterations that the usual one follows from."""
LEAST = 3
"""So many must be known: the first iterations compile, and fill caches. Until then a usual iteration is as long as
the longest, start included: one that hangs at its second is to be found out, too."""


class HangDetector:
    """Of one start of a trainer, by the count of its steps as it is looked at now and then.

    Args:
        factor: a silence of so many usual iterations is a hang; 0: nothing is.
        least_seconds: one shorter than this never is, however quick iterations are.
        began: when the trainer was started.
    """

    def __init__(self, factor: float, least_seconds: float, began: float) -> None:
        self._factor, self._least_seconds, self._began = factor, least_seconds, began
        self._each: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._steps = 0
        self._at: float | None = None
        """When the count was seen to move last."""
        self._longest = 0.0
        self._resting = False

    def see(self, steps: int, now: float) -> None:
        """The count of steps; a negative one says that training is over, and no more are to come."""
        self._resting = steps < 0
        steps = abs(steps)
        if steps == self._steps:
            return
        if self._at is None:
            self._longest = (now - self._began) / steps
        elif steps > self._steps:
            self._each.append((now - self._at) / (steps - self._steps))
            self._longest = max(self._longest, self._each[-1])
        self._steps, self._at = steps, now

    @property
    def usual_seconds(self) -> float | None:
        """Of an iteration; None before the first."""
        if len(self._each) >= LEAST:
            return statistics.median(self._each)
        return None if self._at is None else self._longest

    def silent_seconds(self, now: float) -> float:
        return 0.0 if self._at is None or self._resting else now - self._at

    def hangs(self, now: float) -> bool:
        usual = self.usual_seconds
        if not self._factor or usual is None:
            return False
        return self.silent_seconds(now) > max(self._least_seconds, self._factor * usual)


@dataclass(slots=True)
class Progress:
    """Whether starts get anywhere.

    A start was fruitful when it finished an iteration that none had finished before, or when it both went on
    from a later point than the start before it and got further. The second keeps a job that was restored to
    an early iteration, and is then preempted again and again, from looking like one that crashes on the spot.
    """

    highest: int = 0
    reached: int = 0
    _before: tuple[int, int] | None = None
    """Where the start before went on from, and what it reached."""
    _resuming_at: int | None = None

    def begin(self) -> None:
        self._resuming_at, self.reached = None, 0

    def see(self, iteration: int, steps: int) -> None:
        if steps == 0:
            return
        steps = abs(steps)
        if self._resuming_at is None:
            self._resuming_at = iteration - steps
        if iteration < self.reached:  # restored in place: what comes now is new on its lineage
            self.highest = iteration
        self.reached = iteration

    @property
    def place(self) -> str:
        """How far this start has come, for people."""
        return f"at iteration {self.reached:,}" if self.reached else "before it finished an iteration"

    def taken_back(self, iteration: int) -> None:
        """The next start goes on from there: what comes then is new on its lineage."""
        self.highest = iteration

    def end(self) -> bool:
        """True when the start that ended now was fruitful."""
        if self._resuming_at is None:
            return False
        fruitful = self.reached > self.highest
        if self._before is not None:
            resumed_at, reached = self._before
            fruitful |= self._resuming_at > resumed_at and self.reached > reached
        self.highest = max(self.highest, self.reached)
        self._before = self._resuming_at, self.reached
        return fruitful


@contextlib.contextmanager
def progress_file(path: Path) -> Iterator[int]:
    """Made anew for each start and read through its descriptor: a cleaner of /tmp may remove it meanwhile."""
    path.parent.mkdir(exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(fd, PROGRESS_LAYOUT.pack(0, 0))
        yield fd
    finally:
        os.close(fd)


def read_progress(fd: int) -> tuple[int, int]:
    found = os.pread(fd, PROGRESS_LAYOUT.size, 0)
    if len(found) < PROGRESS_LAYOUT.size:
        return 0, 0  # somebody cut it short; to go on watching matters more
    iteration, steps = PROGRESS_LAYOUT.unpack(found)
    return iteration, steps
