"""The report on a job or on the fleet over some hours. Its cost is bounded, whatever the fleet and the window."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from sqlalchemy import Select, exists, func, or_, select
from sqlalchemy.orm import Session

from holdfast.protocol.analyses import Bucket
from holdfast.protocol.report import Report, ReportDecision, ReportFailure, ReportProject
from holdfast.protocol.verdicts import Verdict
from holdfast_server import models
from holdfast_server.core.errors import InvalidSetting
from holdfast_server.queries.attempt_times import TimedAttempt, attempt_times
from holdfast_server.queries.fleet import attention
from holdfast_server.queries.report_actions import actions
from holdfast_server.queries.summaries import summaries
from holdfast_server.queries.time_buckets import BUCKETS, MICROSECONDS
from holdfast_server.records.failures import ended_by_failure
from holdfast_server.records.job_status import current_attempt
from holdfast_server.records.rank_totals import BUCKET_SECONDS

LEAST_SECONDS, MOST_SECONDS = 60.0, 31 * 86400.0
MOST_TOTALS = 1_500_000
"""Most rows of rank 0's totals, one for ten minutes of a job, that a report reads."""
MOST_SPANS = 50_000
"""About the most spans of work in all: more jobs get fewer, longer ones."""
JOBS_AT_ONCE = 500
MOST_VERDICTS = 200
"""Most jobs whose verdicts are computed, those that need attention first."""
MOST_FAILURES = 200
_LEVELS = ("critical", "warning")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportQuery:
    since_seconds: float
    """Length of the window, which ends now."""
    job: str | None = None
    project: str | None = None
    visible_projects: Collection[str] | None = None
    """Projects that the user may see; `None`: all."""


def report(session: Session, asked: ReportQuery, *, now: float) -> Report:
    """Raises InvalidSetting."""
    if not LEAST_SECONDS <= asked.since_seconds <= MOST_SECONDS:
        raise InvalidSetting("since", f"a report covers 1 min to 31 days, not {asked.since_seconds:g} s")
    begins_at = now - asked.since_seconds
    jobs = _jobs(asked, begins_at)
    total = session.scalar(select(func.count()).select_from(jobs.subquery())) or 0
    decisions = list(_decisions(session, jobs, now=now))
    failures, projects, measured = _times(session, jobs, total, begins_at, now=now)
    done, done_total = actions(session, jobs, begins_at)
    return Report(
        job=asked.job,
        project=asked.project,
        begins_at=begins_at,
        ends_at=now,
        jobs=total,
        measured_jobs=measured,
        examined_jobs=min(total, MOST_VERDICTS),
        decisions=decisions,
        failures=failures[:MOST_FAILURES],
        failures_total=sum(row.count for row in failures),
        failures_gpu_hours=sum(row.gpu_hours for row in failures),
        actions=done,
        actions_total=done_total,
        alerts=_alerts(session, jobs, begins_at),
        projects=projects,
    )


def _jobs(asked: ReportQuery, begins_at: float) -> Select[str, str]:
    """Return the query of the jobs that reported in the window, or have an alert that waits for a person."""
    job, alerts = models.JobRecord, models.AlertRecord
    query = select(job.name, job.project)
    if asked.job is not None:
        return query.where(job.name == asked.job)
    waiting = exists().where(
        alerts.job == job.name, alerts.resolved_at.is_(None), alerts.fired_at.is_not(None),
        alerts.acknowledged_at.is_(None),
    )  # fmt: skip
    query = query.where(or_(job.last_contact_at >= begins_at, waiting))
    if asked.project is not None:
        query = query.where(job.project == asked.project)
    if asked.visible_projects is not None:
        query = query.where(job.project.in_(asked.visible_projects))
    return query


def _alerts(session: Session, jobs: Select[str, str], begins_at: float) -> int:
    rows, named = models.AlertRecord, jobs.subquery()
    query = select(func.count()).select_from(rows).join(named, named.c.name == rows.job)
    return session.scalar(query.where(rows.fired_at >= begins_at)) or 0


# ---- what needs a decision ------------------------------------------------------------------------


def _decisions(session: Session, jobs: Select[str, str], *, now: float) -> Iterator[ReportDecision]:
    job = models.JobRecord
    query = jobs.outerjoin(models.AttemptRecord, current_attempt()).order_by(attention(now=now), job.name)
    names = list(session.scalars(query.with_only_columns(job.name).limit(MOST_VERDICTS)))
    rows = {row.name: row for row in session.scalars(select(job).where(job.name.in_(names)))}
    known = summaries(session, [rows[name] for name in names], now=now)
    waiting = [(one, one.verdict) for one in known if one.verdict is not None and _needs_decision(one.verdict)]
    for one, verdict in sorted(waiting, key=lambda pair: (_LEVELS.index(pair[1].level), -pair[0].world_size)):
        yield ReportDecision(
            job=one.job, project=one.project, owner=one.owner, world_size=one.world_size, verdict=verdict
        )


def _needs_decision(verdict: Verdict) -> bool:
    return verdict.level in _LEVELS and verdict.cause != "restarting"  # a supervisor is at work


# ---- failures and time ----------------------------------------------------------------------------


def _times(
    session: Session, jobs: Select[str, str], total: int, begins_at: float, *, now: float
) -> tuple[list[ReportFailure], list[ReportProject], int]:
    """Return failures, times by project, and the number of jobs in them: as many as `MOST_TOTALS` allows."""
    job, attempt = models.JobRecord, models.AttemptRecord
    most = max(1, int(MOST_TOTALS // max(1.0, (now - begins_at) / BUCKET_SECONDS)))
    query = jobs.outerjoin(attempt, current_attempt()).with_only_columns(job.name)
    names = session.scalars(query.order_by(attempt.world_size.desc().nulls_last(), job.name).limit(most)).all()
    by_project: dict[str, _ProjectSums] = {}
    failures: list[ReportFailure] = []
    for first in range(0, len(names), JOBS_AT_ONCE):
        part = session.scalars(select(job).where(job.name.in_(names[first : first + JOBS_AT_ONCE]))).all()
        timed = attempt_times(
            session, part, begins_at, now=now, most_spans=max(4, min(2000, MOST_SPANS // max(1, total)))
        )
        for row in part:
            found = list(_failures(row, timed.get(row.name, []), begins_at))
            failures += found
            by_project.setdefault(row.project, _ProjectSums()).add(timed.get(row.name, []), found)
    failures.sort(key=lambda one: (-one.gpu_hours, -one.at))
    projects = [sums.as_row(name) for name, sums in by_project.items()]
    return failures, sorted(projects, key=lambda one: (-one.gpu_hours, one.project)), len(names)


class _ProjectSums:
    def __init__(self) -> None:
        self.jobs = self.failures = self.iterations = self.lost_iterations = 0
        self.buckets: dict[Bucket, float] = dict.fromkeys(BUCKETS, 0.0)

    def add(self, attempts: Sequence[TimedAttempt], failures: Sequence[ReportFailure]) -> None:
        self.jobs += 1
        self.failures += sum(row.count for row in failures)
        for one in attempts:
            self.iterations += one.sheet.iterations
            self.lost_iterations += one.sheet.lost_iterations
            for name, microseconds in one.sheet.buckets.items():
                self.buckets[name] += microseconds / MICROSECONDS * max(1, one.attempt.world_size) / 3600

    def as_row(self, project: str) -> ReportProject:
        return ReportProject(
            project=project, jobs=self.jobs, failures=self.failures, iterations=self.iterations,
            lost_iterations=self.lost_iterations, gpu_hours=sum(self.buckets.values()), buckets=self.buckets,
        )  # fmt: skip


def _failures(
    job: models.JobRecord, attempts: Sequence[TimedAttempt], begins_at: float
) -> Iterator[ReportFailure]:
    """Yield the failures of a job in the window, those with the same cause as one row."""
    by_cause: dict[str, list[tuple[TimedAttempt, int, float, float]]] = {}
    for number, one in enumerate(attempts):
        if one.ended_at >= begins_at and ended_by_failure(job, one.attempt, one.following):
            lost, seconds = _lost(one)
            down = max(0.0, _trains_at(attempts, number) - one.ended_at)
            by_cause.setdefault(_cause(one), []).append((one, lost, seconds, down))
    for cause, rows in by_cause.items():
        last = rows[-1][0]
        following = next((one for one in attempts if one.sheet.iterations and one.ended_at > last.ended_at), None)
        yield ReportFailure(
            job=job.name,
            project=job.project,
            cause=cause,
            count=len(rows),
            first_at=rows[0][0].ended_at,
            at=last.ended_at,
            iteration=last.attempt.last_iteration,
            host=last.attempt.host,
            lost_iterations=sum(row[1] for row in rows),
            lost_seconds=sum(row[2] for row in rows),
            down_seconds=sum(row[3] for row in rows),
            gpu_hours=sum((row[2] + row[3]) * max(1, row[0].attempt.world_size) for row in rows) / 3600,
            continued_from=None if following is None else following.attempt.iteration,
            continued_by=_starter(following.attempt) if following is not None else "",
        )


def _cause(one: TimedAttempt) -> str:
    attempt, following = one.attempt, one.following
    reported = (following.previous_exit if following else None) or ""
    return attempt.exception or attempt.finished or reported or "ended without a report"


def _lost(one: TimedAttempt) -> tuple[int, float]:
    """Return the iterations that a failure discarded, and their time: those after which the next attempt began."""
    following = one.following
    if following is None or not one.spans or not (following.versions or following.iterations):
        return 0, 0.0
    lost, seconds, lineage = 0, 0.0, one.spans[-1].lineage
    for span in one.spans:
        if span.lineage == lineage:
            rows = span.last_iteration - span.first_iteration + 1
            discarded = max(0, min(rows, span.last_iteration - following.iteration))
            lost, seconds = lost + discarded, seconds + span.seconds * discarded / rows
    return lost, seconds


def _trains_at(attempts: Sequence[TimedAttempt], number: int) -> float:
    """Return when a job trained again after an attempt, or when the next attempt ended without having trained."""
    one = attempts[number]
    if one.following is None:
        return one.sheet.ends_at
    following = attempts[number + 1]
    return following.spans[0].begins_at if following.spans else following.ended_at


def _starter(attempt: models.AttemptRecord) -> str:
    if not attempt.supervised:
        return ""
    return f"holdfast run on {attempt.host}" if attempt.host else "holdfast run"
