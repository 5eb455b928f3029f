"""Limits the rate of what is written, at a rate that may change meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SLICE_SECONDS = 0.05
"""Time after which a write that waits looks at the rate again."""
CREDIT_SECONDS = 1.0
LEAST_BYTES_PER_SECOND = 1024.0
"""A share below this would block a job rather than limit it."""


class RateLimit:
    """A token bucket: bytes are paid for before they are written. For any thread.

    The time that a write itself takes counts, up to `CREDIT_SECONDS`, so that the average is that of the rate. The
    time between two checkpoints does not.

    Args:
        bytes_per_second: returns the rate in force; infinite: no limit.
    """

    def __init__(
        self,
        bytes_per_second: Callable[[], float],
        wait: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate, self._wait, self._clock = bytes_per_second, wait, clock
        self._lock = threading.Lock()
        self._paid_until = 0.0

    def restart(self) -> None:
        """Begin a checkpoint: time before it does not count."""
        with self._lock:
            self._paid_until = max(self._clock(), self._paid_until)

    def take(self, size_bytes: int, is_lifted: Callable[[], bool]) -> None:
        """Wait until this many bytes may be written, or the limit is lifted."""
        left = float(size_bytes)
        while left > 0 and not is_lifted():
            rate = max(LEAST_BYTES_PER_SECOND, self._rate())
            part = min(left, rate * SLICE_SECONDS)
            left -= part
            with self._lock:
                now = self._clock()
                self._paid_until = max(now - CREDIT_SECONDS, self._paid_until) + part / rate
                seconds = self._paid_until - now
            if seconds > 0:
                self._wait(seconds)
