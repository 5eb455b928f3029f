"""Compress checkpoints while that neither skips checkpoints nor takes training time beyond the budget."""

from __future__ import annotations

from dataclasses import replace

from holdfast.pacing import Controller
from holdfast.pacing.controller import MIN_CHANGE
from holdfast.pacing.interval_cost import pipeline_interval
from holdfast.save.run import Run, RunState
from holdfast.telemetry.reporter import Reporter
from holdfast.units import duration, format_iterations, percent

OVER_BUDGET = 1.1
"""Measured overhead, in budgets, above which compression pauses; a smaller excess is noise."""
FIRST_PAUSE, LONGEST_PAUSE = 20, 160
"""Checkpoints that are not compressed after one for which compression did not pay. The pause doubles, unless at
least as many checkpoints were compressed since the last pause as it skipped.
"""


class Compression:
    """Decides for each checkpoint whether it is compressed. For the training thread only."""

    def __init__(self, controller: Controller, reporter: Reporter) -> None:
        self._controller, self._reporter = controller, reporter
        self._pause = self._paused_left = 0
        self._compressed = 0
        """Checkpoints that were compressed since the last pause."""

    def begin(self) -> bool:
        """Return whether the checkpoint that begins now is compressed."""
        if self._paused_left:
            self._paused_left -= 1
            return False
        return True

    def settled(self, run: Run) -> None:
        """Pause if a compressed checkpoint took too long."""
        if self._paused_left or run.state is not RunState.DURABLE or not run.draft.encode_seconds:
            return
        if (reason := self._objection(run.result.seconds, run.draft.encode_seconds)) is None:
            self._compressed += 1
            return
        has_paid = self._compressed >= self._pause
        self._pause = FIRST_PAUSE if has_paid else min(2 * self._pause, LONGEST_PAUSE)
        self._paused_left, self._compressed = self._pause, 0
        text = f"the next {self._pause} checkpoints are not compressed: {reason}"
        self._reporter.notice("info", "compression", text)

    def _objection(self, persist_seconds: float, encode_seconds: float) -> str | None:
        profile, plan = self._controller.profile, self._controller.plan
        if profile is None or plan is None or plan.interval is None:
            return None
        shortest = pipeline_interval(replace(profile, persist_seconds=persist_seconds))
        plain = pipeline_interval(replace(profile, persist_seconds=persist_seconds - encode_seconds))
        if shortest >= plan.interval and plain <= (1 - MIN_CHANGE) * shortest:
            every, otherwise = format_iterations(shortest), format_iterations(plain)
            return (
                f"encoding took {duration(encode_seconds)} of the {duration(persist_seconds)} until one was "
                f"durable, and allows one every {every} at most, without it every {otherwise}"
            )
        overhead, budget = self._controller.measured_overhead, self._controller.settings.budget
        if overhead is not None and overhead > OVER_BUDGET * budget:
            return f"the measured overhead of {percent(overhead)} is over the budget of {percent(budget)}"
        return None
