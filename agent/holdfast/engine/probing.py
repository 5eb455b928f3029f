"""A request to measure data loading, carried out at the boundary between two iterations."""

from __future__ import annotations

import time
from statistics import fmean, median
from typing import TYPE_CHECKING, Literal

from holdfast.engine.training import Training
from holdfast.errors import NoProbe
from holdfast.telemetry.iteration_metrics import IterationMetrics
from holdfast.telemetry.reporter import Reporter

if TYPE_CHECKING:
    from holdfast.data.loading_probe import IterationTimes

PATIENCE_SECONDS = 60.0
"""How long a probe waits for checkpoints in progress, which slow loading down."""

MEANWHILE = ". A checkpoint was being written at the same time, which slows loading down"


class Prober:
    """Carries out one request."""

    def __init__(self, training: Training, meter: IterationMetrics, reporter: Reporter) -> None:
        self._training, self._meter, self._reporter = training, meter, reporter
        self._asked_at = time.monotonic()
        self._restore_count = training.restore_count

    def at_boundary(self, *, busy: bool) -> bool:
        """Probe if it is possible now, and return whether it was. `busy`: a checkpoint is in progress."""
        if busy and time.monotonic() - self._asked_at < PATIENCE_SECONDS:
            return False
        if self._restore_count != self._training.restore_count:
            # the loader moves to its new position at the next batch
            self._restore_count = self._training.restore_count
            return False
        began = time.perf_counter()
        try:
            level, message = self._found()
        finally:
            self._meter.clock.exclude(time.perf_counter() - began)
        self._reporter.notice(level, "data", message + MEANWHILE * busy)
        return True

    def _found(self) -> tuple[Literal["info", "warning"], str]:
        loader = self._training.loader
        if loader is None:
            return "warning", (
                "data loading cannot be measured: the session does not know the script's loader; use "
                "session.batches(...), or give the loader to the session by keyword"
            )
        from holdfast.data.loading_probe import describe_loading, probe  # few jobs are asked for one

        try:
            return "info", describe_loading(probe(loader), self._pace())
        except NoProbe as error:
            return "warning", f"data loading cannot be measured: {error}"
        except Exception as error:  # an error of the script's loader must not end training
            return "warning", f"data loading cannot be measured: {type(error).__name__}: {error}"

    def _pace(self) -> IterationTimes | None:
        from holdfast.data.loading_probe import IterationTimes

        recent, batches = self._meter.recent, self._training.batches_an_iteration
        if not recent or batches is None:
            return None
        return IterationTimes(
            compute_seconds=median(
                each.seconds - each.data_seconds - each.checkpoint_stall_seconds for each in recent
            ),
            wait_seconds=fmean(each.data_seconds for each in recent),
            iterations=len(recent),
            batches=batches,
        )
