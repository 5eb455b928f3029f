"""How many threads write to a device at once: as many as it was seen to reward."""

from __future__ import annotations

import collections
import contextlib
import statistics
import threading
from collections.abc import Callable

CHOICES = (1, 2, 4)
TRIALS = 2
"""So often each is tried at first."""
LATELY = 6
"""So many writes with each are what it is judged by: one alone says little of a device that others use, too."""
AGAIN = 32
"""One write in so many tries another number than the best, since devices and their load change."""
WORTH = 1.05
"""More threads must be faster by so much."""


class Crew:
    """Sized by the bytes per second that each number of threads has brought lately."""

    def __init__(self) -> None:
        self._rates = {count: collections.deque[float](maxlen=LATELY) for count in CHOICES}
        self._judged = 0

    def choose(self) -> int:
        least_tried = min(CHOICES, key=lambda count: len(self._rates[count]))
        if len(self._rates[least_tried]) < TRIALS:
            return least_tried
        best = self._best()
        turn, due = divmod(self._judged, AGAIN)
        others = [count for count in CHOICES if count != best]
        return best if due else others[turn % len(others)]

    def judge(self, count: int, bytes_per_second: float) -> None:
        self._judged += 1
        self._rates[count].append(bytes_per_second)

    def _best(self) -> int:
        rates = {count: statistics.fmean(rates) for count, rates in self._rates.items()}
        return next(count for count in CHOICES if rates[count] * WORTH >= max(rates.values()))


def share(work: Callable[[], None], count: int) -> None:
    """Do `work` on this thread and `count` - 1 more. All have ended when it returns; it raises what one raised."""
    errors: list[BaseException] = []

    def help_out() -> None:
        try:
            work()
        except BaseException as error:  # a thread's edge: it is raised below, on the thread that asked
            errors.append(error)

    helpers = _started(help_out, count - 1)
    try:
        work()
    finally:
        for helper in helpers:
            helper.join()
    if errors:
        raise errors[0]


def _started(work: Callable[[], None], count: int) -> list[threading.Thread]:
    helpers: list[threading.Thread] = []
    with contextlib.suppress(RuntimeError):  # an interpreter that shuts down starts no more: fewer do it all
        for _ in range(count):
            helper = threading.Thread(target=work, name="holdfast-write", daemon=True)
            helper.start()
            helpers.append(helper)
    return helpers
