"""What is known of a job beyond what things cost: how often it failed, how far it has come, how its loss falls."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, TypeGuard

from .failures import Failures
from .policy import History
from .progress import ProgressFit


class Life:
    """Grows with every iteration, and goes on where the attempt before was."""

    def __init__(self, world_size: int = 1) -> None:
        self.total_iterations: int | None = None
        """How many the job will have when it is finished; None while nobody knows."""
        self.progress = ProgressFit()
        self._failures = Failures(world_size=world_size)
        """As of the last start."""
        self._failed = 0
        self._ran_seconds = 0.0
        """Since then."""
        self.goes_on = False
        """An attempt before has told what it knew; one of an earlier version did not, nor how it ended."""
        self._iteration = 0
        self.checkpoints = 0
        """Over all attempts."""

    def trained(self, iteration: int, seconds: float) -> None:
        self._iteration = iteration
        if math.isfinite(seconds) and seconds > 0:
            self._ran_seconds += seconds

    def durable(self) -> None:
        """One more checkpoint."""
        self.checkpoints += 1

    def failed(self, times: int) -> None:
        """Attempts since the checkpoint that this one goes on from; what was before it is known from there."""
        self._failed += times

    def rewound(self, iteration: int) -> None:
        self._iteration = iteration

    @property
    def failures(self) -> Failures:
        return self._failures.after(self._ran_seconds, failures=self._failed)

    @property
    def history(self) -> History:
        return History(
            iterations=self._iteration,
            total_iterations=self.total_iterations,
            failures=self.failures,
            checkpoints=self.checkpoints,
            progress=self.progress.curve,
            why_no_progress=self.progress.why_none,
        )

    def state_dict(self) -> dict[str, Any]:
        """Fit for JSON."""
        failures = self.failures
        return {
            "failures": failures.count,
            "exposure_seconds": failures.exposure_seconds,
            "checkpoints": self.checkpoints,
        }

    def load_state_dict(self, state: object) -> None:
        """A state that says nothing is ignored. The loss is fitted anew: it takes some hundred iterations."""
        if not isinstance(state, dict):
            return
        count, seconds, taken = (state.get(key) for key in ("failures", "exposure_seconds", "checkpoints"))
        if _is_amount(count) and _is_amount(seconds):
            self._failures = replace(self._failures, count=count, exposure_seconds=seconds)
            self._ran_seconds = 0.0
        if isinstance(taken, int) and taken >= 0:
            self.checkpoints = taken + 1  # the one that says so, too
        self.goes_on = True


def _is_amount(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0
