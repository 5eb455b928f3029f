"""A rare gap, made on purpose: where every iteration overlaps a checkpoint, nothing is left to compare with."""

from __future__ import annotations

from .hysteresis import CLEAR_ERRORS
from .ledger import FRESH_IDLE, WINDOW_ITERATIONS, Ledger


class Gap:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._until_idle: int | None = None
        self._left = 0

    @property
    def open(self) -> bool:
        """Whether checkpoints are being put off."""
        return self._until_idle is not None

    def open_if_needed(self, interval: int, budget: float) -> bool:
        """Whether the window should be judged only after a few idle iterations; if so, let them come."""
        if self._ledger.paired:
            return False
        suspected = self._ledger.suspected()
        if suspected.stall_overhead > budget:
            return False
        over = suspected.overhead - CLEAR_ERRORS * suspected.error > budget
        if not over and not self._ledger.stale:
            return False
        self._ledger.renew_baseline()
        self._until_idle = self._ledger.idle_iterations + FRESH_IDLE
        # A persist that never ends must not keep checkpoints from starting for ever.
        self._left = max(WINDOW_ITERATIONS, 3 * interval)
        return True

    def passed(self) -> None:
        """One more iteration."""
        if self._until_idle is None:
            return
        self._left -= 1
        if self._ledger.idle_iterations >= self._until_idle:
            self._ledger.compare_with_gap()
            self._until_idle = None
        elif self._left <= 0:
            self._until_idle = None

    def abandon(self) -> None:
        self._until_idle = None
