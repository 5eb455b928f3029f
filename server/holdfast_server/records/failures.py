"""Failures of a job, estimated from its attempts: their number, the running time, and the time to restart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

from sqlalchemy import Float, Select, bindparam, func, select
from sqlalchemy.orm import Session, aliased

from holdfast.pacing.failures import FailureEstimate
from holdfast.protocol.wire import INTENDED_ENDS, REQUESTED_EXITS
from holdfast_server import models
from holdfast_server.db import named_jobs

RESTARTS_LOOKED_AT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedFailures:
    """Observed failures of one job."""

    count: int
    running_seconds: float
    """Running time of all attempts, from their start to their last report."""
    restart_seconds: float | None
    """Median time from the last iteration before a failure to the first one after it, over the last failures."""
    restarts: int
    """Number of restarts behind `restart_seconds`."""
    failures: FailureEstimate
    """The estimate that policies use, in which older failures count less."""


@dataclass(frozen=True, slots=True)
class AttemptHistory:
    attempt: models.AttemptRecord
    heard_at: float | None
    """Time of its last report, on the server's clock."""


def failures_of(session: Session, job: models.JobRecord) -> ObservedFailures:
    """Count failures: not planned stops, restores, or attempts that ended before their first iteration."""
    attempts = attempts_of(session, job)
    current = next((history.attempt for history in attempts if history.attempt.uid == job.uid), None)
    known = FailureEstimate(world_size=max(1, current.world_size) if current else 1)
    count, running_seconds, ends = 0, 0.0, []
    followers = [*(history.attempt for history in attempts[1:]), None]
    for history, following in zip(attempts, followers, strict=False):  # a job that never started has none
        seconds, failed = _running_seconds(job, history), _failed(job, history.attempt, following)
        known = known.after(seconds, failures=int(failed))
        count, running_seconds = count + failed, running_seconds + seconds
        if failed and following is not None:
            ends.append((history.attempt, following))
    gaps = [_gap(session, ended, following) for ended, following in ends[-RESTARTS_LOOKED_AT:]]
    known_gaps = [gap for gap in gaps if gap is not None]
    return ObservedFailures(
        count=count,
        running_seconds=running_seconds,
        restart_seconds=median(known_gaps) if known_gaps else None,
        restarts=len(known_gaps),
        failures=known,
    )


def _failed(job: models.JobRecord, attempt: models.AttemptRecord, following: models.AttemptRecord | None) -> bool:
    return attempt.iterations > 0 and ended_by_failure(job, attempt, following)


def ended_by_failure(
    job: models.JobRecord, attempt: models.AttemptRecord, following: models.AttemptRecord | None
) -> bool:
    """Return whether an attempt failed, perhaps before its first iteration; `following`: the next attempt."""
    if attempt.finished is not None:
        return attempt.finished not in INTENDED_ENDS
    if attempt.uid == job.uid or following is None:
        return False  # it runs, as far as is known
    return following.previous_exit not in REQUESTED_EXITS


def _running_seconds(job: models.JobRecord, history: AttemptHistory) -> float:
    attempt = history.attempt
    end = attempt.finished_at
    if end is None:
        end = job.last_contact_at if attempt.uid == job.uid else history.heard_at
    # Clocks of agents and server differ.
    return 0.0 if end is None else max(0.0, end - attempt.started_at)


def attempts_of(session: Session, job: models.JobRecord, *, since: float = 0.0) -> Sequence[AttemptHistory]:
    """Return the attempts of a job in their order."""
    return attempts_of_jobs(session, [job.name], since=since).get(job.name, [])


def attempts_of_jobs(
    session: Session, jobs: Sequence[str], *, since: float = 0.0
) -> dict[str, list[AttemptHistory]]:
    """Return by job the attempts since a time, and the one before them, which may extend past it."""
    found: dict[str, list[AttemptHistory]] = {}
    for attempt, at in session.execute(_attempts_query(), {"jobs": jobs, "since": since}):
        found.setdefault(attempt.job, []).append(AttemptHistory(attempt, at))
    return found


@cache
def _attempts_query() -> Select[models.AttemptRecord, float]:
    attempts, batches, earlier = models.AttemptRecord, models.BatchRecord, aliased(models.AttemptRecord)
    since = bindparam("since", type_=Float())
    before = (
        select(func.max(earlier.started_at))
        .where(earlier.job == models.JobRecord.name, earlier.started_at < since)
        .correlate(models.JobRecord)
        .scalar_subquery()
    )
    heard_at = (
        select(batches.received_at)
        .where(batches.job == attempts.job, batches.uid == attempts.uid, batches.rank == 0)
        .order_by(batches.sequence.desc())
        .limit(1)
        .correlate(attempts)
        .scalar_subquery()
    )
    return (
        select(attempts, heard_at)
        .join(models.JobRecord, models.JobRecord.name == attempts.job)
        .where(models.JobRecord.name.in_(named_jobs()), attempts.started_at >= func.coalesce(before, since))
        .order_by(attempts.job, attempts.attempt, attempts.started_at)
    )


def _gap(session: Session, ended: models.AttemptRecord, following: models.AttemptRecord) -> float | None:
    """Return the time from an attempt's last iteration to the first of the next; None if it is unknown."""
    about = {
        "job": following.job,
        "lineage": following.lineage,
        "ended": ended.uid,
        "following": following.uid,
        "iteration": following.iteration,
    }
    first_at, last_at = session.execute(_gap_query(), about).one()
    return first_at - last_at if first_at is not None and last_at is not None and first_at > last_at else None


@cache
def _gap_query() -> Select[float | None, float | None]:
    rows = models.ChunkRecord
    of_lineage = (rows.job == bindparam("job"), rows.rank == 0, rows.lineage == bindparam("lineage"))
    after = select(rows.first_at).where(*of_lineage, rows.uid == bindparam("following"))
    after = after.where(rows.first_iteration > bindparam("iteration")).order_by(rows.first_iteration)
    before = select(rows.last_at).where(*of_lineage, rows.uid == bindparam("ended"))
    before = before.order_by(rows.first_iteration.desc())
    return select(after.limit(1).scalar_subquery(), before.limit(1).scalar_subquery())
