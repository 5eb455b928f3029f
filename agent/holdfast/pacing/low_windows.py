"""When the interval falls: after windows below half the budget, and later where other load undoes falls."""

from __future__ import annotations

import math

LOW_WINDOWS = 3
"""Windows in a row below half the budget after which the interval falls."""
FIRST_CALM_SECONDS = 60.0
"""Training time for which these windows must be low, at least."""
CALM_SECONDS, MOST_CALM_SECONDS = 600.0, 3600.0
"""The same after a fall was undone; it doubles up to the second figure."""


class LowWindows:
    """The windows in a row below half the budget, and the longest interval that one of them calls for.

    An interval that grows soon after a fall shows that load comes and goes. Falls then wait for low windows during
    all of its turns, so that the interval does not follow each of them.
    """

    def __init__(self) -> None:
        self._count, self._since_seconds, self._longest = 0, 0.0, 1
        self._calm_seconds = FIRST_CALM_SECONDS
        self._fell_at_seconds = -math.inf

    def __bool__(self) -> bool:
        return self._count > 0

    def add(self, wanted: int | None, now_seconds: float) -> int | None:
        """Add a window; return the interval to fall to, once it is time.

        Args:
            wanted: the interval that a low window calls for; `None` for a window that is not low.
            now_seconds: time that training has taken.
        """
        if wanted is None:
            self.clear()
            return None
        if not self._count:
            self._since_seconds = now_seconds
        self._count += 1
        self._longest = max(self._longest, wanted)
        windows, seconds = self.left(now_seconds)
        if windows or seconds:
            return None
        longest = self._longest
        self.clear()
        return longest

    def clear(self) -> None:
        """Begin anew; each fall needs as many windows."""
        self._count, self._longest = 0, 1

    def left(self, now_seconds: float) -> tuple[int, float]:
        """Return how many more windows, and how much more time, a fall needs."""
        seconds = self._since_seconds + self._calm_seconds - now_seconds
        return max(0, LOW_WINDOWS - self._count), max(0.0, seconds)

    def moved(self, now_seconds: float, *, grows: bool) -> None:
        """Record a change of the interval."""
        if not grows:
            self._fell_at_seconds = now_seconds
        elif now_seconds - self._fell_at_seconds < max(CALM_SECONDS, self._calm_seconds):
            self._calm_seconds = min(max(CALM_SECONDS, 2 * self._calm_seconds), MOST_CALM_SECONDS)
