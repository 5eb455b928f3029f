"""Carries out an order to probe how data are loaded, at the boundary between two iterations."""

from __future__ import annotations

import time
from statistics import fmean, median
from typing import Literal

from holdfast.data.loading_probe import Pace, probe, told
from holdfast.engine.training import Training
from holdfast.errors import NoProbe
from holdfast.telemetry.iteration_metrics import IterationMetrics
from holdfast.telemetry.reporter import Reporter

PATIENCE_SECONDS = 60.0
"""How long a probe waits for the checkpoints under way, which would make loading look slower than it is."""

MEANWHILE = ". Meanwhile a checkpoint was being written, which slows loading down"


class Prober:
    def __init__(self, training: Training, meter: IterationMetrics, reporter: Reporter) -> None:
        self._training, self._meter, self._reporter = training, meter, reporter
        self._asked_at: float | None = None
        self._rewinds = training.rewinds

    def ask(self) -> None:
        self._asked_at = time.monotonic()

    def at_boundary(self, *, busy: bool) -> None:
        """Probe, if that was asked for. `busy`: a checkpoint is under way."""
        if self._asked_at is None:
            return
        if busy and time.monotonic() - self._asked_at < PATIENCE_SECONDS:
            return
        if self._rewinds != self._training.rewinds:  # the loader goes to its new place when the loop draws next
            self._rewinds = self._training.rewinds
            return
        self._asked_at = None
        began = time.perf_counter()
        try:
            level, message = self._found()
        finally:
            self._meter.clock.leave_out(time.perf_counter() - began)
        self._reporter.notice(level, "data", message + MEANWHILE * busy)

    def _found(self) -> tuple[Literal["info", "warning"], str]:
        loader = self._training.loader
        if loader is None:
            return "warning", (
                "how data are loaded cannot be told: the script's loader is not known; draw from "
                "session.batches(...), or give it to the session by keyword"
            )
        try:
            return "info", told(probe(loader), self._pace())
        except NoProbe as error:
            return "warning", f"how data are loaded cannot be told: {error}"
        except Exception as error:  # whatever else a script's loader may do: training goes on
            return "warning", f"how data are loaded cannot be told: {type(error).__name__}: {error}"

    def _pace(self) -> Pace | None:
        recent, batches = self._meter.recent, self._training.batches_an_iteration
        if not recent or batches is None:
            return None
        return Pace(
            compute_seconds=median(
                each.seconds - each.data_seconds - each.checkpoint_stall_seconds for each in recent
            ),
            wait_seconds=fmean(each.data_seconds for each in recent),
            iterations=len(recent),
            batches=batches,
        )
