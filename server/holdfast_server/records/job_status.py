"""Status of a job from its last report and the time since then: a pure function, and its equivalent in SQL."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast, get_args

import msgspec
from sqlalchemy import ColumnElement, Row, and_, case, func, literal, not_, or_, select
from sqlalchemy.orm import Session

from holdfast.protocol.jobs import JobStatus, SupervisorInfo
from holdfast.protocol.wire import AttemptFinished, RestoreMode, SupervisorReport
from holdfast.units import duration
from holdfast_server import models
from holdfast_server.db import named_jobs
from holdfast_server.samples.limits import RecentSamples, recent_samples, total

SILENT_AFTER_SECONDS = 20.0
SILENT_AFTER_ITERATIONS = 3
"""Iterations without a report after which a job is silent; a job with slow iterations still trains."""
SPARKLINE_POINTS = 40
STATUSES: tuple[JobStatus, ...] = get_args(JobStatus)
ALIVE: tuple[JobStatus, ...] = ("starting", "running", "paused", "restarting")
ENDED: tuple[JobStatus, ...] = ("finished", "stopped", "failed")
_ENDS: dict[str, JobStatus] = {
    "finished": "finished", "interrupted": "stopped", "preempted": "stopped", "forked": "stopped",
    "ended": "stopped",
}  # fmt: skip
"""Statuses by the reason with which an attempt ended; any other reason is an exception."""
TO_RESTORE = "to restore a checkpoint"
RELAUNCHED = "relaunched"
"""Reason of an attempt that ended to be started again at once."""
_WAITS = "waits"
_SUPERVISOR_CODES = (_WAITS, "wait_ended")
"""Codes of notices: the supervisor waits for a restore request, and no longer does."""
SUPERVISOR_PATIENCE_SECONDS = 120.0
"""How long a job counts as restarting without a sign of its supervisor, which reports every 30 seconds until the
next start has begun an attempt."""
_report = msgspec.msgpack.Decoder(SupervisorReport)
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


def recent_of(job: models.JobRecord | Row[Any]) -> RecentSamples:
    """Return the newest samples of a job."""
    return recent_samples(job.recent)


def longest_seconds(recent: RecentSamples) -> float:
    """Return the duration of the longest of a job's newest iterations."""
    return max(filter(math.isfinite, recent.seconds), default=0.0)


def status_of(job: models.JobRecord, attempt: models.AttemptRecord | None, *, now: float) -> Status:
    if attempt is None:
        return Status("starting", "waiting for its first report")
    age = now - job.last_contact_at
    is_late = age > max(SILENT_AFTER_SECONDS, SILENT_AFTER_ITERATIONS * job.longest_seconds)
    has_begun = attempt.iterations > 0 or job.training_paused_at is not None
    if (known := _status_by_supervisor(attempt, age, is_late=is_late, has_begun=has_begun, now=now)) is not None:
        return known
    relaunched = attempt.finished == RELAUNCHED
    if attempt.finished is not None and not relaunched:
        return _ended(attempt)
    if is_late or relaunched:
        after = " since its last attempt ended to restart" if relaunched else ""
        return Status("silent", f"no report for {duration(round(age))}{after}")
    if job.training_paused_at is not None:
        return Status("paused", f"training is paused by {job.training_paused_by}")
    if attempt.iterations == 0:
        return Status("starting", f"attempt {attempt.attempt} has finished no iteration yet")
    if job.paused and job.applied_version >= job.paused_version:
        return Status("paused", "training continues, checkpoints are paused")
    return Status("running")


def _status_by_supervisor(
    attempt: models.AttemptRecord, age: float, *, is_late: bool, has_begun: bool, now: float
) -> Status | None:
    """Return the status that follows from what the supervisor does; `None` where the attempt itself decides."""
    report = supervisor_report(attempt)
    failed = attempt.finished is not None and attempt.finished not in _ENDS
    if report is not None and (known := _reported_status(attempt, report, failed=failed, now=now)) is not None:
        return known
    if attempt.supervisor == "restarting" and attempt.finished is None and not has_begun and not is_late:
        return Status("restarting", "" if report is None else _restart_text(report))
    if not failed or attempt.supervisor == "ended" or age > SUPERVISOR_PATIENCE_SECONDS:
        return None
    if attempt.finished == RELAUNCHED:
        return Status("restarting", TO_RESTORE)
    return Status("restarting", f"{attempt.finished} {_place(attempt)}") if attempt.supervised else None


def _reported_status(
    attempt: models.AttemptRecord, report: SupervisorReport, *, failed: bool, now: float
) -> Status | None:
    """Return the status that the supervisor reported after this attempt had ended, if it did."""
    match attempt.supervisor:
        case "gave_up":
            starts = f" after {report.start} start{'s' * (report.start != 1)}" if report.start else ""
            return Status("failed", f"gave up{starts}: {report.reason}")
        case "restarting" if attempt.supervisor_until is not None:
            if now <= attempt.supervisor_until:
                return Status("restarting", _restart_text(report))
            return Status("failed", f"{report.reason}; holdfast run on {attempt.host} no longer reports")
        case "stopped" if attempt.finished is None or failed:
            return Status("stopped", f"{report.reason} {_place(attempt)}")
        case "ended" if attempt.finished is None and attempt.ended_by is None:
            return Status("stopped", f"{report.reason} {_place(attempt)}")
        case "ended" if attempt.finished is None:
            return Status("stopped", report.reason)
    return None


def supervisor_report(attempt: models.AttemptRecord) -> SupervisorReport | None:
    """Return the supervisor's last report on this attempt, or on the previous one."""
    return _report.decode(attempt.supervisor_report) if attempt.supervisor_report else None


def supervisor_info(attempt: models.AttemptRecord | None, status: JobStatus) -> SupervisorInfo | None:
    """Return the supervisor's state after the last start has ended; `None` while the job trains."""
    if attempt is None or status not in ("restarting", *ENDED):
        return None
    report = supervisor_report(attempt) if attempt.supervisor is not None else None
    failed = report is not None and (report.limit > 0 or report.state == "gave_up")
    if status == "restarting" and has_just_ended(attempt):
        failed = attempt.finished != RELAUNCHED
        reason = f"{attempt.finished} {_place(attempt)}" if failed else TO_RESTORE
        report = SupervisorReport(at=0.0, state="restarting", reason=reason)
    if report is None:
        return None
    return SupervisorInfo(
        state=report.state, host=attempt.host, reason=report.reason, start=report.start, limit=report.limit,
        failed=failed, waits=report.waits,
        has_started=status == "restarting" and attempt.finished is None and attempt.supervisor_until is None,
    )  # fmt: skip


def has_just_ended(attempt: models.AttemptRecord) -> bool:
    """Return whether an attempt has reported its end, and its supervisor has not reported what follows."""
    return attempt.finished is not None and attempt.supervisor_until is None


def _restart_text(report: SupervisorReport) -> str:
    return f"start {report.start} of {report.limit}, {report.reason}" if report.limit else report.reason


def record_end(attempt: models.AttemptRecord, event: AttemptFinished) -> None:
    attempt.finished_at, attempt.finished = event.at, event.reason
    attempt.last_iteration = event.iteration
    if attempt.supervisor == "restarting" and attempt.supervisor_until is None:
        attempt.supervisor = None  # the report on the attempt before it


def remedy_after_giving_up(attempt: models.AttemptRecord | None) -> str:
    """Return what to do after the supervisor gave up; empty if it has not."""
    report = supervisor_report(attempt) if attempt is not None and attempt.supervisor == "gave_up" else None
    if attempt is None or report is None:
        return ""
    if report.waits:
        return f"Fix the cause, then restore a checkpoint: holdfast run on {attempt.host} waits for it"
    return "Fix the cause, then start the script again"


def record_supervisor(attempt: models.AttemptRecord, report: SupervisorReport, *, now: float) -> None:
    """Store the supervisor's report after the attempt has ended."""
    attempt.supervisor, attempt.supervisor_report = report.state, msgspec.msgpack.encode(report)
    until = now + min(report.delay_seconds, SUPERVISOR_PATIENCE_SECONDS) + SUPERVISOR_PATIENCE_SECONDS
    attempt.supervisor_until = until if report.state == "restarting" else None


def continue_restart(attempt: models.AttemptRecord, earlier: models.AttemptRecord) -> None:
    """Have an attempt that a supervisor started count as restarting until it finishes an iteration."""
    if earlier.supervisor == "restarting":
        attempt.supervisor, attempt.supervisor_report = earlier.supervisor, earlier.supervisor_report


def status_in_sql(*, now: float) -> ColumnElement[str]:
    """Return `status_of` in SQL, for a query that joins jobs with `current_attempt`."""
    job, attempt = models.JobRecord, models.AttemptRecord
    heard = literal(now) - job.last_contact_at
    late = and_(
        heard > SILENT_AFTER_SECONDS,
        heard > SILENT_AFTER_ITERATIONS * job.longest_seconds,
    )
    by_supervisor = attempt.supervisor == "restarting"
    by_itself = and_(attempt.finished.is_not(None), attempt.finished.not_in(_ENDS))
    return case(
        (attempt.uid.is_(None), "starting"),
        (attempt.supervisor == "gave_up", "failed"),
        (and_(by_supervisor, attempt.supervisor_until >= now), "restarting"),
        (and_(by_supervisor, attempt.supervisor_until.is_not(None)), "failed"),
        (
            and_(
                by_supervisor,
                attempt.finished.is_(None),
                attempt.iterations == 0,
                job.training_paused_at.is_(None),
                not_(late),
            ),
            "restarting",
        ),
        (and_(attempt.supervisor.in_(("stopped", "ended")), attempt.finished.is_(None)), "stopped"),
        (and_(attempt.supervisor == "stopped", by_itself), "stopped"),
        (
            and_(
                by_itself,
                func.coalesce(attempt.supervisor, "") != "ended",
                heard <= SUPERVISOR_PATIENCE_SECONDS,
                or_(attempt.finished == RELAUNCHED, attempt.supervised),
            ),
            "restarting",
        ),
        *((attempt.finished == word, status) for word, status in _ENDS.items()),
        (attempt.finished != RELAUNCHED, "failed"),
        (or_(late, attempt.finished == RELAUNCHED), "silent"),
        (job.training_paused_at.is_not(None), "paused"),
        (attempt.iterations == 0, "starting"),
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


def current_attempts(session: Session, jobs: list[str]) -> dict[str, models.AttemptRecord]:
    """Return by job its current attempt."""
    return {row.job: row for row in session.scalars(_CURRENT_ATTEMPTS, {"jobs": jobs})}


def _ended(attempt: models.AttemptRecord) -> Status:
    where = _place(attempt)
    if attempt.finished == "ended" and attempt.ended_by is not None:
        return Status("stopped", f"ended by {attempt.ended_by} {where}")
    status = _ENDS.get(str(attempt.finished), "failed")
    return Status(status, where if status == "finished" else f"{attempt.finished} {where}")


def _place(attempt: models.AttemptRecord) -> str:
    return f"at iteration {attempt.last_iteration}"


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
    if not alive or attempt is None or has_no_process(attempt):
        return "next_start"
    return cast("RestoreMode", attempt.restore_mode or "in_place")


def has_no_process(attempt: models.AttemptRecord) -> bool:
    """Return whether the processes of an attempt have ended, as it or its supervisor reported."""
    return attempt.finished is not None or attempt.supervisor_until is not None


def restore_reason(attempt: models.AttemptRecord | None, *, alive: bool) -> str:
    """Explain why a running job does not restore in place; empty if it does, or does not run."""
    if attempt is None or restore_mode(attempt, alive=alive) == "in_place" or not alive:
        return ""
    if has_no_process(attempt):
        return "its supervisor restarts the script now"
    return attempt.restore_reason or "the script does not support restoring in place"


def waiting_host(session: Session, attempt: models.AttemptRecord | None, *, alive: bool) -> str:
    """Return the host whose supervisor waits for a restore request, as it has reported; empty if none does."""
    if attempt is None or alive:
        return ""
    if attempt.supervisor == "gave_up" and (report := supervisor_report(attempt)) is not None:
        return attempt.host if report.waits else ""
    rows = models.NoticeRecord
    query = select(rows.code).where(rows.job == attempt.job, rows.code.in_(_SUPERVISOR_CODES))
    query = query.where(rows.at >= attempt.started_at).order_by(rows.id.desc()).limit(1)
    return attempt.host if session.scalar(query) == _WAITS else ""


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
            return f"at once, by a restart of the script through its supervisor: {why}"
        case "next_start" if alive and attempt is not None and has_no_process(attempt):
            return "as soon as its supervisor starts the script again"
        case "next_start" if alive:
            why = restore_reason(attempt, alive=alive)
            return f"once you start the script again: {why}"
        case _:
            return "at the next start of the job"
