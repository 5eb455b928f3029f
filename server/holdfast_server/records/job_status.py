"""How a job is doing, from what it last said and how long ago: a pure function, and the same for many in SQL."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast, get_args

from sqlalchemy import ColumnElement, and_, case, literal, or_

from holdfast.protocol.jobs import JobStatus
from holdfast.protocol.messages import RestoreMode
from holdfast_server import models
from holdfast_server.samples.limits import Recent, total

SILENT_AFTER_SECONDS = 20.0
SILENT_AFTER_ITERATIONS = 3
"""A job whose iterations take minutes is not silent because it trains."""
SPARKLINE_POINTS = 40
STATUSES: tuple[JobStatus, ...] = get_args(JobStatus)
ALIVE: tuple[JobStatus, ...] = ("starting", "running", "paused")
_ENDS: dict[str, JobStatus] = {
    "finished": "finished", "interrupted": "stopped", "preempted": "stopped", "forked": "stopped",
}  # fmt: skip
"""What an attempt says of its end; anything else is the exception that broke it."""
RELAUNCHED = "relaunched"
"""The one end that is none: the next attempt is to begin at once."""
ENDED_WELL = tuple(_ENDS)
"""As attempts have it."""


@dataclass(frozen=True, slots=True)
class Status:
    status: JobStatus
    reason: str = ""

    @property
    def alive(self) -> bool:
        """An order would be acted on now, in place."""
        return self.status in ALIVE


def longest_seconds(recent: Recent) -> float:
    """The longest of a job's newest iterations."""
    return max(filter(math.isfinite, recent.seconds), default=0.0)


def status_of(job: models.JobRecord, attempt: models.AttemptRecord | None, *, now: float) -> Status:
    if attempt is None:
        return Status("starting", "its first report is not here yet")
    relaunched = attempt.finished == RELAUNCHED
    if attempt.finished is not None and not relaunched:
        return _ended(attempt)
    age = now - job.last_contact_at
    if age > max(SILENT_AFTER_SECONDS, SILENT_AFTER_ITERATIONS * job.longest_seconds):
        after = " since it ended to be started again" if relaunched else ""
        return Status("silent", f"nothing heard for {_duration(age)}{after}")
    if relaunched:
        return Status("starting", "ended to be started again from a checkpoint")
    if attempt.iterations == 0:
        return Status("starting", f"attempt {attempt.attempt} has finished no iteration yet")
    if job.paused and job.applied_version >= job.paused_version:
        return Status("paused", "training goes on, checkpoints are paused")
    return Status("running")


def status_in_sql(*, now: float) -> ColumnElement[str]:
    """The status of `status_of`, where jobs are joined with their current attempts by `current_attempt`."""
    job, attempt = models.JobRecord, models.AttemptRecord
    heard = literal(now) - job.last_contact_at
    late = and_(
        heard > SILENT_AFTER_SECONDS,
        heard > SILENT_AFTER_ITERATIONS * job.longest_seconds,
    )
    return case(
        (attempt.uid.is_(None), "starting"),
        *((attempt.finished == word, status) for word, status in _ENDS.items()),
        (attempt.finished != RELAUNCHED, "failed"),
        (late, "silent"),
        (or_(attempt.iterations == 0, attempt.finished == RELAUNCHED), "starting"),
        (and_(job.paused, job.applied_version >= job.paused_version), "paused"),
        else_="running",
    )


def current_attempt() -> ColumnElement[bool]:
    """On which jobs and attempts are joined, by an outer join: a job may have been edited before it ever ran."""
    return and_(
        models.AttemptRecord.job == models.JobRecord.name, models.AttemptRecord.uid == models.JobRecord.uid
    )


def _ended(attempt: models.AttemptRecord) -> Status:
    where = f"at iteration {attempt.last_iteration}"
    status = _ENDS.get(str(attempt.finished), "failed")
    return Status(status, where if status == "finished" else f"{attempt.finished} {where}")


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


# ---- how a job would carry out an order to restore: as its attempt reports


def restore_mode(attempt: models.AttemptRecord | None, *, alive: bool) -> RestoreMode:
    """One that does not say goes back in place: all did, before they could say."""
    if not alive or attempt is None:
        return "next_start"
    return cast("RestoreMode", attempt.restore_mode or "in_place")


def restore_reason(attempt: models.AttemptRecord | None, *, alive: bool) -> str:
    """Why a running job does not go back in place; empty where it does, or does not run."""
    if attempt is None or restore_mode(attempt, alive=alive) == "in_place" or not alive:
        return ""
    return attempt.restore_reason or "its script cannot be taken back while it runs"


def restore_mode_text(attempt: models.AttemptRecord | None, *, alive: bool) -> str:
    """What would happen, and when, in words."""
    match restore_mode(attempt, alive=alive):
        case "in_place":
            return "in place, at the next iteration boundary"
        case "relaunch":
            why = restore_reason(attempt, alive=alive)
            return f"by starting the script again, which its supervisor does at once: {why}"
        case "next_start" if alive:
            why = restore_reason(attempt, alive=alive)
            return f"at the next start of the script, which nobody makes by itself: {why}"
        case _:
            return "at the next start of the job"
