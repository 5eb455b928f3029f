"""Runs retention on a thread of its own: no checkpoint, and no SIGTERM, waits for a store's deletes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("holdfast")


class RetentionQueue:
    """Calls `retire` once for all requests that arrive while the call before is running.

    `retire` runs on the thread `holdfast-retention`, never two at a time, and stops between two deletes once
    `closing` is true.
    """

    def __init__(self, retire: Callable[[], None]) -> None:
        self._retire = retire
        self._changed = threading.Condition()
        self._requested = self._running = self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def closing(self) -> bool:
        return self._closing

    def request(self) -> None:
        """Ask for retention; returns at once. RuntimeError where no further thread can be started."""
        with self._changed:
            if self._closing:
                return
            self._requested = True
            self._changed.notify_all()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="holdfast-retention", daemon=True)
                thread.start()
                self._thread = thread

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until every request so far is carried out; False when that takes too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._requested or self._running), timeout_seconds)

    def close(self, timeout_seconds: float = 0.0) -> None:
        """Finish what was requested if `timeout_seconds` is enough, then stop; the next start resumes the rest.

        A delete that hangs does not keep the process: the thread is a daemon.
        """
        deadline = time.monotonic() + timeout_seconds
        self.wait_idle(timeout_seconds)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while self._next():
            try:
                self._retire()
            except Exception:  # a failed deletion must not end the thread, or retention would stop silently
                logger.exception("retention failed; it runs again after the next checkpoint")
            finally:
                with self._changed:
                    self._running = False
                    self._changed.notify_all()

    def _next(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._requested or self._closing)
            if self._closing:
                return False
            self._requested, self._running = False, True
            return True
