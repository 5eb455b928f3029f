"""How a job is doing, from what it last said and how long ago. Pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast_server import models
from holdfast_server.samples import Recent, total
from holdfast_server.views import JobStatus

SILENT_AFTER_SECONDS = 20.0
SILENT_AFTER_ITERATIONS = 3
"""A job whose iterations take minutes is not silent because it trains."""
SPARKLINE_POINTS = 40


@dataclass(frozen=True, slots=True)
class Status:
    status: JobStatus
    reason: str = ""

    @property
    def alive(self) -> bool:
        """An order would be acted on now, in place."""
        return self.status in ("starting", "running", "paused")


def status_of(job: models.Job, attempt: models.Attempt | None, recent: Recent, *, now: float) -> Status:
    if attempt is None:
        return Status("starting", "its first report is not here yet")
    if attempt.finished is not None:
        return _ended(attempt)
    age = now - job.last_contact_at
    longest = max(filter(math.isfinite, recent.seconds), default=0.0)
    if age > max(SILENT_AFTER_SECONDS, SILENT_AFTER_ITERATIONS * longest):
        return Status("silent", f"nothing heard for {_duration(age)}")
    if attempt.iterations == 0:
        return Status("starting", f"attempt {attempt.attempt} has finished no iteration yet")
    if job.paused and job.applied_version >= job.paused_version:
        return Status("paused", "training goes on, checkpoints are paused")
    return Status("running")


def _ended(attempt: models.Attempt) -> Status:
    where = f"at iteration {attempt.last_iteration}"
    if attempt.finished == "finished":
        return Status("finished", where)
    if attempt.finished == "interrupted":
        return Status("stopped", f"interrupted {where}")
    return Status("failed", f"{attempt.finished} {where}")


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def iterations_per_second(recent: Recent) -> float | None:
    seconds = total(recent.seconds)
    return len(recent.seconds) / seconds if seconds > 0 else None


def seconds_of_last(recent: Recent, iterations: int) -> float | None:
    """What the last iterations took; beyond those still known, as many at their mean."""
    if iterations <= 0:
        return 0.0
    known = recent.seconds[-iterations:]
    return total(known) / len(known) * iterations if known else None


def sparkline(recent: Recent) -> list[float]:
    size = -(-len(recent.seconds) // SPARKLINE_POINTS) or 1
    groups = (recent.seconds[start : start + size] for start in range(0, len(recent.seconds), size))
    return [total(group) / len(group) for group in groups]
