"""How the controller answers to a disk that grows slow and quick again, and to a machine that grows slow."""

from __future__ import annotations

from holdfast.pacing import Controller, PacingSettings

from .paced import PacedJob

BUDGET = 0.05
SLOWER = 4
PATIENCE_INTERVALS = 12
RECOVERY_INTERVALS = 5
OUTSIDE = 1.3


def slow_disk_intervals() -> int:
    """Intervals after a disk has become 4 times slower until the measured overhead is back under the budget."""
    job = _settled()
    job.persist_seconds *= SLOWER
    job.run_intervals(1)  # the one under way was begun before
    for passed in range(1, PATIENCE_INTERVALS):
        job.run_intervals(1)
        if job.overhead <= BUDGET and job.interval * job.compute_seconds * BUDGET >= _cost_seconds(job) * 0.999:
            return passed
    return PATIENCE_INTERVALS


def recovered_ratio(slow_intervals: int = 6) -> float:
    """k five intervals after the disk is as quick as before, over k before it grew slow."""
    job = _settled()
    before = job.interval
    job.persist_seconds *= SLOWER
    job.run_intervals(slow_intervals)
    job.persist_seconds /= SLOWER
    job.run_intervals(1)  # the one under way was begun before
    job.run_intervals(RECOVERY_INTERVALS)
    return job.interval / before


def outside_slowdown_ratio() -> float:
    """The longest or shortest k while a neighbour makes every iteration 30 % slower, over k before."""
    job = _settled()
    before = job.interval
    job.compute_seconds *= OUTSIDE
    first = len(job.intervals)
    job.run(1000)
    found = [interval / before for interval in job.intervals[first:] if interval is not None]
    return max(found, key=lambda ratio: abs(ratio - 1))


def _settled() -> PacedJob:
    job = PacedJob(Controller(PacingSettings(budget=BUDGET)), stall_seconds=0.1, interference=0.2)
    return job.run(400)


def _cost_seconds(job: PacedJob) -> float:
    busy = job.snapshot_seconds + job.persist_seconds
    return job.stall_seconds + busy * job.interference / (1 + job.interference)
