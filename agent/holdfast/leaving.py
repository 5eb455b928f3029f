"""A process that is asked to end by SIGTERM: it goes on to the next boundary, saves if there is time, and ends.

A scheduler that preempts a job says so by SIGTERM, and kills it some time later: under Kubernetes and Slurm after
30 s, unless they are told otherwise.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

logger = logging.getLogger("holdfast")

EXIT_ASKED = 128 + signal.SIGTERM
"""As a shell reports a process that SIGTERM ended."""
SPARE_SECONDS = 1.0
"""Of the grace, what ending itself takes."""
FACTOR = 1.5
"""A checkpoint takes longer now and then: written while many jobs are told to go, for one."""


class Leaving:
    """Takes SIGTERM for a session, unless the script has a use for it itself.

    A second one ends the process at once, as does the end of the grace.

    Args:
        grace_seconds: from the signal to the kill; 0: SIGTERM is left as it is.
    """

    def __init__(self, grace_seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._grace_seconds, self._clock = grace_seconds, clock
        self._asked_at: float | None = None
        self._timer: threading.Timer | None = None
        self._pid = os.getpid()
        main = threading.current_thread() is threading.main_thread()
        self._takes = grace_seconds > 0 and main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._takes:
            signal.signal(signal.SIGTERM, self._handle)

    @property
    def asked(self) -> bool:
        """This process has been told to end."""
        return self._asked_at is not None

    @property
    def left_seconds(self) -> float:
        """Of the grace; all of it where another rank was told, and not this one."""
        waited = 0.0 if self._asked_at is None else self._clock() - self._asked_at
        return max(0.0, self._grace_seconds - waited - SPARE_SECONDS)

    def fits(self, persist_seconds: float | None) -> bool:
        """Whether a checkpoint that takes so long as a rule can be durable in time; one of which nothing is known
        is tried: half of it does no harm."""
        return persist_seconds is None or FACTOR * persist_seconds <= self.left_seconds

    def close(self) -> None:
        """Leave the signal as it was found; the grace still ends."""
        if self._takes and os.getpid() == self._pid and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._takes = False

    def cancel(self) -> None:
        """Whoever told this process to end takes it back: its time is not over then."""
        if self._timer is not None:
            self._timer.cancel()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid or self._asked_at is not None:
            _end()  # a loader's worker, which has nothing to save; or a second signal
        self._asked_at = self._clock()
        # where no boundary comes in time, no later than a scheduler would
        self._timer = threading.Timer(max(0.0, self._grace_seconds - SPARE_SECONDS / 2), _end)
        self._timer.daemon = True
        self._timer.start()


def _end() -> None:
    """As if nobody had taken the signal."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    logger.error("the time to end in is over: the newest durable checkpoint is what remains")
    os._exit(EXIT_ASKED)
