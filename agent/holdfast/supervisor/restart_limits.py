"""The limits of restarts: how often, how soon, and when a trainer counts as hung."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """When to restart the trainer, and when to stop."""

    fruitless_starts: int = 5
    """Starts in a row without a new iteration after which the supervisor gives up."""
    first_backoff_seconds: float = 0.2
    """Wait after a crash; it doubles after each fruitless start, and returns to this after progress."""
    longest_backoff_seconds: float = 30.0
    rendezvous_seconds: float = 900.0
    """How long to wait for the end of ranks that still run; longer than NCCL's timeout and the shortest hang."""
    grace_seconds: float = 30.0
    """How long a trainer may take to end after a stop signal before its processes are killed."""
    repeat_seconds: float = 2.0
    """A second signal kills at once if it arrives this long after the first. Sooner, it is the same signal twice:
    a terminal signals the whole foreground group, and a parent may forward the signal as well."""
    poll_seconds: float = 0.25
    """Interval at which the trainer's progress is read."""
    hang_factor: float = 50.0
    """A trainer hangs after this many typical iteration times without an iteration; 0: never."""
    hang_least_seconds: float = 600.0
    """The shortest hang: scripts sometimes evaluate, or write other files."""

    host_faults: int = 0
    """Ends by a fault of this host within a day after which the supervisor ends as well; 0: never."""

    def __post_init__(self) -> None:
        if self.hang_factor < 0 or 0 < self.hang_factor < 2:
            raise ValueError(f"hang factor {self.hang_factor:g}: give at least 2 iteration times, or 0 for never")
        if self.fruitless_starts < 1:
            raise ValueError(f"fruitless starts {self.fruitless_starts}: give at least 1")
        if self.host_faults < 0:
            raise ValueError(f"host faults {self.host_faults}: give at least 1, or 0 for never")
        if self.grace_seconds < 0:
            raise ValueError(f"grace {self.grace_seconds} s: give at least 0")

    def backoff_seconds(self, fruitless: int) -> float:
        """Return an exponential wait with jitter, so that jobs that died together do not restart together."""
        longest = min(self.longest_backoff_seconds, self.first_backoff_seconds * 2.0 ** min(fruitless, 60))
        return longest * random.uniform(0.5, 1.0)  # noqa: S311
