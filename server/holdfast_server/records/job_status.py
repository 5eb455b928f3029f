"""Status of a job from its last report and the time since then: a pure function, and its equivalent in SQL."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast, get_args

from sqlalchemy import ColumnElement, and_, case, literal, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.protocol.jobs import JobStatus
from holdfast.protocol.messages import RestoreMode
from holdfast_server import models
from holdfast_server.db import named_jobs
from holdfast_server.samples.limits import RecentSamples, total

SILENT_AFTER_SECONDS = 20.0
SILENT_AFTER_ITERATIONS = 3
"""Iterations without a report after which a job is silent; a job with slow iterations still trains."""
SPARKLINE_POINTS = 40
STATUSES: tuple[JobStatus, ...] = get_args(JobStatus)
ALIVE: tuple[JobStatus, ...] = ("starting", "running", "paused")
ENDED: tuple[JobStatus, ...] = ("finished", "stopped", "failed")
_ENDS: dict[str, JobStatus] = {
    "finished": "finished", "interrupted": "stopped", "preempted": "stopped", "forked": "stopped",
}  # fmt: skip
"""Statuses by the reason with which an attempt ended; any other reason is an exception."""
RELAUNCHED = "relaunched"
"""Reason of an attempt that ended to be started again at once."""
_WAITS = "waits"
_SUPERVISOR_CODES = (_WAITS, "wait_ended")
"""Codes of notices: the supervisor waits for a restore request, and no longer does."""
ENDED_WELL = tuple(_ENDS)
"""Reasons of attempts that did not fail."""


@dataclass(frozen=True, slots=True)
class Status:
    status: JobStatus
    reason: str = ""

    @property
    def alive(self) -> bool:
        """Whether the job has a process that would act on an order."""
        return self.status in ALIVE


def longest_seconds(recent: RecentSamples) -> float:
    """Return the duration of the longest of a job's newest iterations."""
    return max(filter(math.isfinite, recent.seconds), default=0.0)


def status_of(job: models.JobRecord, attempt: models.AttemptRecord | None, *, now: float) -> Status:
    if attempt is None:
        return Status("starting", "waiting for its first report")
    relaunched = attempt.finished == RELAUNCHED
    if attempt.finished is not None and not relaunched:
        return _ended(attempt)
    age = now - job.last_contact_at
    if age > max(SILENT_AFTER_SECONDS, SILENT_AFTER_ITERATIONS * job.longest_seconds):
        after = " since its last attempt ended to restart" if relaunched else ""
        return Status("silent", f"no report for {duration_text(age)}{after}")
    if relaunched:
        return Status("starting", "restarting from a checkpoint")
    if attempt.iterations == 0:
        return Status("starting", f"attempt {attempt.attempt} has finished no iteration yet")
    if job.paused and job.applied_version >= job.paused_version:
        return Status("paused", "training continues, checkpoints are paused")
    return Status("running")


def status_in_sql(*, now: float) -> ColumnElement[str]:
    """Return `status_of` in SQL, for a query that joins jobs with `current_attempt`."""
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
    """Return the condition of the outer join of jobs with their current attempts; a job may have none."""
    return and_(
        models.AttemptRecord.job == models.JobRecord.name, models.AttemptRecord.uid == models.JobRecord.uid
    )


_CURRENT_ATTEMPTS = (
    select(models.AttemptRecord)
    .join(models.JobRecord, current_attempt())
    .where(models.AttemptRecord.job.in_(named_jobs()))
)


async def current_attempts(session: AsyncSession, jobs: list[str]) -> dict[str, models.AttemptRecord]:
    """Return by job its current attempt."""
    return {row.job: row for row in await session.scalars(_CURRENT_ATTEMPTS, {"jobs": jobs})}


def _ended(attempt: models.AttemptRecord) -> Status:
    where = f"at iteration {attempt.last_iteration}"
    status = _ENDS.get(str(attempt.finished), "failed")
    return Status(status, where if status == "finished" else f"{attempt.finished} {where}")


def duration_text(seconds: float) -> str:
    """Write a duration in words, such as `7 days` or `90 minutes`."""
    units = ((86400, "day"), (3600, "hour"), (60, "minute"))
    size, unit = next((each for each in units if seconds >= 2 * each[0]), (1, "second"))
    count = round(seconds / size)
    return f"{count} {unit}" + ("" if count == 1 else "s")


def iterations_per_second(recent: RecentSamples) -> float | None:
    seconds = total(recent.seconds)
    return len(recent.seconds) / seconds if seconds > 0 else None


def seconds_of_last(recent: RecentSamples, iterations: int) -> float | None:
    """Return the duration of the last iterations, extrapolated beyond the known ones by their mean."""
    if iterations <= 0:
        return 0.0
    known = recent.seconds[-iterations:]
    return total(known) / len(known) * iterations if known else None


def sparkline(recent: RecentSamples) -> list[float]:
    size = -(-len(recent.seconds) // SPARKLINE_POINTS) or 1
    groups = (recent.seconds[start : start + size] for start in range(0, len(recent.seconds), size))
    return [total(group) / len(group) for group in groups]


# ---- how a job carries out a restore, as its attempt reports


def restore_mode(attempt: models.AttemptRecord | None, *, alive: bool) -> RestoreMode:
    """Return how an attempt restores: in place, unless it reported otherwise."""
    if not alive or attempt is None:
        return "next_start"
    return cast("RestoreMode", attempt.restore_mode or "in_place")


def restore_reason(attempt: models.AttemptRecord | None, *, alive: bool) -> str:
    """Explain why a running job does not restore in place; empty if it does, or does not run."""
    if attempt is None or restore_mode(attempt, alive=alive) == "in_place" or not alive:
        return ""
    return attempt.restore_reason or "the script does not support restoring in place"


async def waiting_host(session: AsyncSession, attempt: models.AttemptRecord | None, *, alive: bool) -> str:
    """Return the host whose supervisor waits for a restore request, as it has reported; empty if none does."""
    if attempt is None or alive:
        return ""
    rows = models.NoticeRecord
    query = select(rows.code).where(rows.job == attempt.job, rows.code.in_(_SUPERVISOR_CODES))
    query = query.where(rows.at >= attempt.started_at).order_by(rows.id.desc()).limit(1)
    return attempt.host if await session.scalar(query) == _WAITS else ""


def restore_mode_text(attempt: models.AttemptRecord | None, *, alive: bool, waiting: str) -> str:
    """Describe how and when the job would restore.

    `waiting`: host of the supervisor that waits for a restore request; empty without one.
    """
    if waiting:
        start = f"the waiting holdfast run on {waiting} starts the script"
        return f"at once: {start}; if it was killed, at the next start of the job"
    match restore_mode(attempt, alive=alive):
        case "in_place":
            return "in place, at the next iteration boundary"
        case "relaunch":
            why = restore_reason(attempt, alive=alive)
            return f"by a restart of the script, which its supervisor does at once: {why}"
        case "next_start" if alive:
            why = restore_reason(attempt, alive=alive)
            return f"at the next start of the script, which you have to start: {why}"
        case _:
            return "at the next start of the job"
