"""Reactions of the controller to a disk that slows down and recovers, and to a slower machine."""

from __future__ import annotations

from holdfast.pacing import Controller, PacingSettings

from .paced import PacedJob

BUDGET = 0.05
SLOWER = 4
PATIENCE_INTERVALS = 12
RECOVERY_INTERVALS = 5
OUTSIDE = 1.3


def slow_disk_intervals() -> int:
    """Return the intervals until the overhead is within the budget after the disk becomes 4 times slower."""
    job = _settled()
    job.persist_seconds *= SLOWER
    job.run_intervals(1)  # the checkpoint in flight began before
    for passed in range(1, PATIENCE_INTERVALS):
        job.run_intervals(1)
        if job.overhead <= BUDGET and job.interval * job.compute_seconds * BUDGET >= _cost_seconds(job) * 0.999:
            return passed
    return PATIENCE_INTERVALS


def recovered_ratio(slow_intervals: int = 6) -> float:
    """Return the interval five intervals after the disk recovered, over the one before the slow-down."""
    job = _settled()
    before = job.interval
    job.persist_seconds *= SLOWER
    job.run_intervals(slow_intervals)
    job.persist_seconds /= SLOWER
    job.run_intervals(1)  # the checkpoint in flight began before
    job.run_intervals(RECOVERY_INTERVALS)
    return job.interval / before


def outside_slowdown_ratio() -> float:
    """Return the most different interval while every iteration is 30 % slower, over the one before."""
    job = _settled()
    before = job.interval
    job.compute_seconds *= OUTSIDE
    first = len(job.intervals)
    job.run(1000)
    found = [interval / before for interval in job.intervals[first:] if interval is not None]
    return max(found, key=lambda ratio: abs(ratio - 1))


def _settled() -> PacedJob:
    job = PacedJob(
        Controller(PacingSettings(budget=BUDGET, policy="checkfreq")), stall_seconds=0.1, interference=0.2
    )
    return job.run(400)


def _cost_seconds(job: PacedJob) -> float:
    busy = job.snapshot_seconds + job.persist_seconds
    return job.stall_seconds + busy * job.interference / (1 + job.interference)
