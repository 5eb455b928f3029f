"""Holds the writing of bytes back to a rate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LEAST_BYTES_PER_SECOND = 1e6
"""No rate is lower than this: a checkpoint that never gets durable protects nobody."""


class Pacer:
    """A `Pace` that lets so many bytes through a second, on average.

    Several threads may share it. A stretch of bytes waits until those before it are paid for, so the first goes
    at once and the longest wait is that for one stretch a thread.
    """

    def __init__(
        self,
        bytes_per_second: float | None,
        wait: Callable[[float], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate = None if bytes_per_second is None else max(bytes_per_second, LEAST_BYTES_PER_SECOND)
        self._wait, self._clock = wait, clock
        self._lock = threading.Lock()
        self._paid_at = 0.0

    def __call__(self, size_bytes: int, /) -> None:
        if self._rate is None:
            return
        with self._lock:
            now = self._clock()
            begins_at = max(now, self._paid_at)
            self._paid_at = begins_at + size_bytes / self._rate
        if begins_at > now and self._wait(begins_at - now):
            self._rate = None  # lifted: somebody waits for the end
