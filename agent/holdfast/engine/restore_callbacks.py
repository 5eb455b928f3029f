"""Callbacks of the script that run after training has gone back to a checkpoint."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from holdfast.telemetry.reporter import TrainingPosition

logger = logging.getLogger("holdfast")


class RestoreCallbacks:
    """Calls each callback with (iteration, lineage) after a resume or a restore. For the training thread only."""

    def __init__(self, position: TrainingPosition) -> None:
        self._position = position
        self._callbacks: list[Callable[[int, int], object]] = []
        self._restored_to: tuple[int, int] | None = None
        """(iteration, lineage) that training last went back to; `None` after a fresh start."""
        self.began_at = self.ended_at = 0.0
        """Unix times of the last resume or restore."""

    def add(self, callback: Callable[[int, int], object]) -> None:
        """Register a callback; call it at once if training has gone back already."""
        self._callbacks.append(callback)
        if self._restored_to is not None:
            self._call(callback, *self._restored_to)

    def begin(self) -> None:
        """Note when a resume or a restore begins."""
        self.began_at = time.time()

    def run(self) -> None:
        """Call all callbacks: training has gone back to the current position."""
        self.ended_at = time.time()
        self._restored_to = self._position.iteration, self._position.lineage
        for callback in tuple(self._callbacks):
            self._call(callback, *self._restored_to)

    def _call(self, callback: Callable[[int, int], object], iteration: int, lineage: int) -> None:
        try:
            callback(iteration, lineage)
        except Exception:  # code of the script: its failure must not end training
            logger.exception("a callback of session.on_restored failed; training continues")
