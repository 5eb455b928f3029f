"""When a new estimate is reason enough to change the interval: up at once, down slowly, never for noise alone."""

from __future__ import annotations

import math
from collections.abc import Callable

from .estimate import Measurement

CLEAR_ERRORS = 2.0
"""By how many standard errors a figure must clear its threshold."""
OVER_WINDOWS = 3
"""Verdicts in a row over the budget, each within its own noise: together they are more than noise."""
LOW_WINDOWS = 3
LONG_RUN_WINDOWS = 6
"""Verdicts over the budget in the long run before the average, a rare expensive checkpoint included, decides."""
STEP_DOWN = 0.5
WORTH_CHANGING = 0.1


class Hysteresis:
    """Up: the newest window is over the budget beyond its own noise, or three in a row are by however little, or
    the long run has been for some time.

    Down: three windows in a row, one more interval apart each, below half the budget start a descent; the first
    does where checkpoints are seen to be written quicker than before, so that a disk which recovers has its
    interval back after five. It goes down by half at most each interval until the interval that the measured cost
    calls for is reached. Did the descent end at half the budget, an interval raised from the edge of the budget
    could never come back.
    """

    def __init__(self) -> None:
        self._over_windows = 0
        self._low_windows = 0
        self._long_run_windows = 0
        self._descending = False

    def reset(self) -> None:
        self._over_windows, self._low_windows, self._long_run_windows = 0, 0, 0
        self._descending = False

    def decide(
        self,
        interval: int,
        budget: float,
        recent: Measurement,
        settled: Measurement,
        wanted: Callable[[float], int],
        pipeline: int,
        recovered: bool = False,
    ) -> int:
        """The interval from here on.

        Args:
            wanted: gives the policy's own interval for a cost of one checkpoint, in seconds.
            pipeline: the shortest interval at which one checkpoint is durable before the next starts.
            recovered: the newest checkpoints became durable much quicker than those before.
        """
        over = recent.overhead - CLEAR_ERRORS * recent.error > budget
        long_run = settled.overhead - CLEAR_ERRORS * settled.error > budget
        self._long_run_windows = self._long_run_windows + 1 if long_run else 0
        self._over_windows = self._over_windows + 1 if recent.overhead > budget else 0
        raised = interval
        if self._over_windows >= OVER_WINDOWS:
            raised = max(raised, wanted(recent.cost_seconds))
        if over:
            # The typical cost of the window: one slow checkpoint among three is not yet a reason, two are.
            raised = max(raised, wanted(recent.cautious_cost_seconds))
        if self._long_run_windows >= LONG_RUN_WINDOWS:
            raised = max(raised, wanted(settled.mean_cost_seconds))
        if pipeline > interval * (1 + WORTH_CHANGING):
            raised = max(raised, pipeline)
        if raised > interval:
            self.reset()
            return raised
        return self._lower(interval, budget, recent, settled, wanted(recent.cost_seconds), recovered)

    def _lower(
        self,
        interval: int,
        budget: float,
        recent: Measurement,
        settled: Measurement,
        target: int,
        recovered: bool,
    ) -> int:
        low = min(recent.overhead + CLEAR_ERRORS * recent.error, settled.overhead + CLEAR_ERRORS * settled.error)
        self._low_windows = self._low_windows + 1 if low < budget / 2 else 0
        enough = 1 if recovered else LOW_WINDOWS
        if self._low_windows >= enough and target <= interval * (1 - WORTH_CHANGING):
            self._descending = True
        if not self._descending or target >= interval:
            self._descending = False
            return interval
        step = min(math.ceil(interval * (1 - STEP_DOWN)), interval - 1)
        return max(target, step)
