"""Pinned checkpoints, as the server reports them, and as the store records them for starts without a server."""

from __future__ import annotations

import logging
import threading
import time

from holdfast.errors import Fenced
from holdfast.store import Pins, Store, newest_pins
from holdfast.system import io_pool
from holdfast.telemetry.reporter import Reporter

logger = logging.getLogger("holdfast")


class PinnedCheckpoints:
    """The checkpoints that retention always keeps. Used by the polling thread and by retention."""

    def __init__(self, store: Store, job: str, reporter: Reporter) -> None:
        self._store, self._job, self._reporter = store, job, reporter
        self._checkpoints: tuple[str, ...] | None = None
        """None until the server or the store has reported pins."""
        self._recorded: tuple[str, ...] | None = None
        """Pins that this attempt has recorded. It records those that it loaded as well, so that a late write of an
        earlier attempt does not replace them."""
        self._is_loaded = self._has_failed = False
        self._reported: set[str] = set()
        self._lock = threading.Lock()

    @property
    def checkpoints(self) -> tuple[str, ...]:
        return self._checkpoints or ()

    def follow(self, wanted: tuple[str, ...] | None, attempt: int) -> None:
        """Apply the pins that the server reports, at once; None means that it reports none.

        They are recorded in the store on another thread: the calling thread also receives orders.
        """
        if wanted is not None:
            self._checkpoints = wanted
            io_pool.submit(lambda: self._record_and_report(attempt))

    def _record_and_report(self, attempt: int) -> None:
        self.record(attempt)
        self._report_missing()

    def load(self) -> None:
        """Apply the pins of an earlier attempt, unless a server has reported pins. OSError when the store
        fails."""
        if self._is_loaded:
            return
        found = newest_pins(self._store, self._job)
        with self._lock:
            self._is_loaded = True
            if self._checkpoints is None:
                self._checkpoints = found.checkpoints if found is not None else ()
            if found is None and self._recorded is None:
                self._recorded = ()  # nothing to record while there are no pins

    def record(self, attempt: int) -> None:
        """Record the pins in the store. A failure is reported once, and the next call tries again."""
        with self._lock:
            wanted = self._checkpoints
            if wanted is None or wanted == self._recorded:
                return
            try:
                if not attempt:
                    raise OSError("it is not writable")
                self._store.append(self._job, Pins(attempt=attempt, checkpoints=wanted, at=time.time()))
            except Fenced as error:  # the newer attempt receives them from the server
                logger.debug("%s: pins are not recorded: %s", self._job, error)
            except OSError as error:
                self._report_failure(error)
            else:
                self._recorded, self._has_failed = wanted, False

    def _report_failure(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            what = f"pins cannot be recorded in store {self._store.url}: {error.strerror or error}"
            self._reporter.notice(
                "warning",
                "pins",
                f"{what}; they apply while this attempt runs, and the next checkpoint tries again",
            )

    def _report_missing(self) -> None:
        """Report each pinned checkpoint that is not in the store once."""
        with self._lock:
            unknown = set(self.checkpoints) - self._reported
            if not unknown:
                return
            try:
                unknown -= set(self._store.checkpoints(self._job))
            except OSError:  # the store cannot be listed
                return
            self._reported |= unknown
        for checkpoint in sorted(unknown):
            message = f"{checkpoint} is pinned but not in the store"
            self._reporter.notice("warning", "pins", message)
