"""What one of several ranks did, summed up and told now and then, so that the slow one among them shows."""

from __future__ import annotations

import math

from holdfast import protocol
from holdfast.link import Link
from holdfast.profile import Iteration

LEAST_SECONDS = 10.0
"""Between two reports of a rank."""
REPORTS_PER_SECOND = 10
"""Of all ranks of a job together, at most: a thousand ranks tell of themselves every 100 seconds each."""


class Tally:
    """Of a rank's iterations since its last report. For the training thread; a report is a few hundred bytes."""

    def __init__(self, link: Link, rank: int, world_size: int) -> None:
        self._link, self._rank = link, rank
        self.every_seconds = max(LEAST_SECONDS, world_size / REPORTS_PER_SECOND)
        # The first report comes the sooner the lower the rank, so that they do not all come at once ever after.
        self._due_after = self.every_seconds * (rank + 1) / world_size
        self._seconds_since = 0.0
        self._told: protocol.RankWork | None = None

    def add(self, measured: Iteration) -> None:
        told = self._told
        if told is not None and told.lineage != measured.lineage:
            self.tell()
            told = None
        if told is None:
            told = self._told = protocol.RankWork(
                at=measured.at,
                lineage=measured.lineage,
                first_iteration=measured.iteration,
                last_iteration=measured.iteration,
                iterations=0,
                seconds=0.0,
                longest_seconds=0.0,
            )
        told.at, told.last_iteration = measured.at, measured.iteration
        told.iterations += 1
        told.seconds += measured.seconds
        told.longest_seconds = max(told.longest_seconds, measured.seconds)
        told.stall_seconds += measured.checkpoint_stall_seconds
        told.data_seconds += measured.data_seconds
        if measured.barrier_seconds is not None and math.isfinite(measured.barrier_seconds):
            told.barrier_iterations += 1
            told.barrier_seconds += measured.barrier_seconds
        self._seconds_since += measured.seconds
        if self._seconds_since >= self._due_after:
            self._seconds_since, self._due_after = 0.0, self.every_seconds
            self.tell()

    def tell(self) -> None:
        """Report what was added since the last report."""
        if self._told is not None:
            self._link.event(self._told)
            self._told = None

    def close(self) -> None:
        """The last report. The link of rank 0 is the session's own, and closed with it."""
        self.tell()
        if self._rank != 0:
            self._link.close()
