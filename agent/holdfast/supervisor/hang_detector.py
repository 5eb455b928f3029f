"""A trainer's progress as the supervisor sees it: whether restarts make progress, and whether the trainer hangs.

The session writes it into the 16 bytes of HOLDFAST_PROGRESS: two little-endian int64, the last finished iteration
and the number of steps of this start, negative while training is paused and once it is over.
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
"""Number of measured iteration times that the typical one is computed from."""
MIN_MEASURED = 3
"""Number of iteration times needed for a median: the first iterations compile and fill caches. Until then the
longest time so far counts as typical, start-up included, so that a hang in the second iteration is detected."""


class HangDetector:
    """Detects that one start of a trainer hangs, from its step count at regular intervals.

    Args:
        factor: a trainer hangs after this many typical iteration times without an iteration; 0 turns detection
            off.
        min_seconds: a shorter time without an iteration is no hang, however short iterations are.
        began: time at which the trainer was started.
    """

    def __init__(self, factor: float, min_seconds: float, began: float) -> None:
        self._factor, self._min_seconds, self._began = factor, min_seconds, began
        self._iteration_seconds: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._steps = 0
        self._changed_at: float | None = None
        self._longest = 0.0
        self._is_resting = False

    def update(self, steps: int, now: float) -> None:
        """Note the step count; a negative one means that training is paused or over."""
        was_resting, self._is_resting = self._is_resting, steps < 0
        steps = abs(steps)
        if steps == self._steps:
            if was_resting and not self._is_resting and steps:
                self._changed_at = now  # a pause is no iteration
            return
        if self._changed_at is None:
            self._longest = (now - self._began) / steps
        elif steps > self._steps:
            self._iteration_seconds.append((now - self._changed_at) / (steps - self._steps))
            self._longest = max(self._longest, self._iteration_seconds[-1])
        self._steps, self._changed_at = steps, now

    @property
    def typical_seconds(self) -> float | None:
        """Typical time of an iteration; `None` before the first one."""
        if len(self._iteration_seconds) >= MIN_MEASURED:
            return statistics.median(self._iteration_seconds)
        return None if self._changed_at is None else self._longest

    def silent_seconds(self, now: float) -> float:
        return 0.0 if self._changed_at is None or self._is_resting else now - self._changed_at

    def is_hung(self, now: float) -> bool:
        typical = self.typical_seconds
        if not self._factor or typical is None:
            return False
        return self.silent_seconds(now) > max(self._min_seconds, self._factor * typical)


@dataclass(slots=True)
class RestartProgress:
    """Tracks whether restarts make progress.

    A start makes progress if it finishes an iteration that no start has finished before, or if it both resumes
    from a later iteration than the previous start and gets further. The second case covers a job that was restored
    to an early iteration and is then preempted repeatedly.
    """

    highest: int = 0
    reached: int = 0
    _previous: tuple[int, int] | None = None
    """The iterations at which the previous start resumed and ended."""
    _resumed_at: int | None = None

    def begin_start(self) -> None:
        self._resumed_at, self.reached = None, 0

    def update(self, iteration: int, steps: int) -> None:
        if steps == 0:
            return
        if self._resumed_at is None:
            self._resumed_at = iteration - abs(steps)
        if iteration < self.reached:  # restored in place: further iterations are new on their lineage
            self.highest = iteration
        self.reached = iteration

    @property
    def description(self) -> str:
        """How far this start got, for log lines."""
        return f"at iteration {self.reached:,}" if self.reached else "before it finished an iteration"

    def restore_to(self, iteration: int) -> None:
        """Note that the next start restores an iteration: further ones are new on their lineage."""
        self.highest = iteration

    def end_start(self) -> bool:
        """Return whether the start that ended made progress."""
        if self._resumed_at is None:
            return False
        progressed = self.reached > self.highest
        if self._previous is not None:
            resumed_at, reached = self._previous
            progressed |= self._resumed_at > resumed_at and self.reached > reached
        self.highest = max(self.highest, self.reached)
        self._previous = self._resumed_at, self.reached
        return progressed


@contextlib.contextmanager
def progress_file(path: Path) -> Iterator[int]:
    """Create the file for one start and yield its descriptor, which stays valid if /tmp is cleaned."""
    path.parent.mkdir(exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(fd, PROGRESS_LAYOUT.pack(0, 0))
        yield fd
    finally:
        os.close(fd)


def read_progress(fd: int) -> tuple[int, int]:
    content = os.pread(fd, PROGRESS_LAYOUT.size, 0)
    if len(content) < PROGRESS_LAYOUT.size:
        return 0, 0  # another process truncated it; keep watching the trainer
    iteration, steps = PROGRESS_LAYOUT.unpack(content)
    return iteration, steps
