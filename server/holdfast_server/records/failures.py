"""What a job's attempts tell of its failures: how many, in how much time, and how long coming back took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

from sqlalchemy import Float, Select, bindparam, func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from holdfast.pacing.failures import Failures
from holdfast.protocol.messages import ASKED_TO_END, PLANNED_ENDS
from holdfast_server import models
from holdfast_server.db import named_jobs

RESTARTS_LOOKED_AT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was seen of one job's failures."""

    count: int
    running_seconds: float
    """Over all attempts, from their start to the last that was heard of them."""
    restart_seconds: float | None
    """From the last iteration before a failure to the first one after it, the median of the last ones."""
    restarts: int
    """How many that rests on."""
    failures: Failures
    """The same as the policies weigh it, older ones counting less."""


@dataclass(frozen=True, slots=True)
class Life:
    attempt: models.AttemptRecord
    heard_at: float | None
    """When the server heard last of it."""


async def failures_of(session: AsyncSession, job: models.JobRecord) -> Seen:
    """Planned stops and restores are none, nor is an attempt that ended before its first iteration."""
    lives = await lives_of(session, job)
    current = next((life.attempt for life in lives if life.attempt.uid == job.uid), None)
    known = Failures(world_size=max(1, current.world_size) if current else 1)
    count, running_seconds, ends = 0, 0.0, []
    followers = [*(life.attempt for life in lives[1:]), None]
    for life, following in zip(lives, followers, strict=False):  # of a job that never started there is no life
        seconds, failed = _running_seconds(job, life), _failed(job, life.attempt, following)
        known = known.after(seconds, failures=int(failed))
        count, running_seconds = count + failed, running_seconds + seconds
        if failed and following is not None:
            ends.append((life.attempt, following))
    gaps = [await _gap(session, ended, following) for ended, following in ends[-RESTARTS_LOOKED_AT:]]
    told = [gap for gap in gaps if gap is not None]
    return Seen(
        count=count,
        running_seconds=running_seconds,
        restart_seconds=median(told) if told else None,
        restarts=len(told),
        failures=known,
    )


def _failed(job: models.JobRecord, attempt: models.AttemptRecord, following: models.AttemptRecord | None) -> bool:
    if attempt.iterations == 0:
        return False
    if attempt.finished is not None:
        return attempt.finished not in PLANNED_ENDS
    if attempt.uid == job.uid or following is None:
        return False  # it runs, as far as anybody knows
    return following.previous_exit not in ASKED_TO_END


def _running_seconds(job: models.JobRecord, life: Life) -> float:
    attempt = life.attempt
    end = attempt.finished_at
    if end is None:
        end = job.last_contact_at if attempt.uid == job.uid else life.heard_at
    # Agents and server each go by their own clock.
    return 0.0 if end is None else max(0.0, end - attempt.started_at)


async def lives_of(session: AsyncSession, job: models.JobRecord, *, since: float = 0.0) -> Sequence[Life]:
    """In the order in which they were lived."""
    return (await lives_of_jobs(session, [job.name], since=since)).get(job.name, [])


async def lives_of_jobs(
    session: AsyncSession, jobs: Sequence[str], *, since: float = 0.0
) -> dict[str, list[Life]]:
    """Of each job those that began since then, and the one before them, which may reach beyond it."""
    found: dict[str, list[Life]] = {}
    for attempt, at in await session.execute(_of_lives(), {"jobs": jobs, "since": since}):
        found.setdefault(attempt.job, []).append(Life(attempt, at))
    return found


@cache
def _of_lives() -> Select[models.AttemptRecord, float]:
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


async def _gap(
    session: AsyncSession, ended: models.AttemptRecord, following: models.AttemptRecord
) -> float | None:
    """From the last iteration of one attempt to the first of the next; None where neither can be told."""
    after, before = aliased(models.ChunkRecord), aliased(models.ChunkRecord)
    place = (following.job, 0, following.lineage)
    first_at = await session.scalar(
        select(after.first_at)
        .where(after.job == place[0], after.rank == place[1], after.lineage == place[2])
        .where(after.first_iteration > following.iteration, after.uid == following.uid)
        .order_by(after.first_iteration)
        .limit(1)
    )
    last_at = await session.scalar(
        select(before.last_at)
        .where(before.job == place[0], before.rank == place[1], before.lineage == place[2])
        .where(before.uid == ended.uid)
        .order_by(before.first_iteration.desc())
        .limit(1)
    )
    return first_at - last_at if first_at is not None and last_at is not None and first_at > last_at else None
