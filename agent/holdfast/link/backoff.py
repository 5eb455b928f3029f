"""How long to wait before asking again."""

from __future__ import annotations

import random

FIRST_SECONDS, MOST_SECONDS = 0.1, 30.0


class Backoff:
    """Exponential with full jitter, so that the jobs of a server that returns do not all come at once."""

    def __init__(self) -> None:
        # A generator of its own: the training process's random state is none of ours to move.
        self._random = random.Random()  # noqa: S311
        self._failures = 0

    def reset(self) -> None:
        self._failures = 0

    def next_seconds(self, at_least: float = 0.0) -> float:
        """The wait after one more failure; `at_least` is what the server asked for, met and a little exceeded."""
        ceiling: float = min(MOST_SECONDS, FIRST_SECONDS * 2.0 ** min(self._failures, 16))
        self._failures += 1
        return at_least + self._random.uniform(0, at_least / 10 if at_least else ceiling)
