"""How long the iterations of a trainer take, seen from outside, and when there has been none for too long."""

from __future__ import annotations

import collections
import statistics

WINDOW = 32
"""Stretches of iterations that the usual one follows from."""
LEAST = 3
"""So many must be known: the first iterations compile, and fill caches. Until then a usual iteration is as long as
the longest, start included: one that hangs at its second is to be found out, too."""


class Pulse:
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
