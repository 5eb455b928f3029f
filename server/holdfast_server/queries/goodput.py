"""A job's goodput over a window: the share of the time that moved training forward, and where the rest went."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from sqlalchemy import BigInteger, Select, bindparam, case, cast, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.protocol.messages import PLANNED_ENDS, StallKind
from holdfast.protocol.questions import Bucket, Goodput, TimeBucket
from holdfast.protocol.timeline import ShortWindow, StallsOverTime, Window
from holdfast_server import models
from holdfast_server.db import Database, named_jobs
from holdfast_server.queries.summaries import find_job
from holdfast_server.queries.time_buckets import (
    BUCKETS,
    DEFINITIONS,
    MICROSECONDS,
    Life,
    Restored,
    Span,
    Timesheet,
    timesheet,
)
from holdfast_server.records.ancestry import Ancestry, ancestry_of, branches
from holdfast_server.records.failures import Life as Attempted
from holdfast_server.records.failures import lives_of, lives_of_jobs
from holdfast_server.records.job_status import RELAUNCHED, status_of
from holdfast_server.records.rank_totals import bucket_of

WINDOWS: dict[str, float] = {"10m": 600.0, "1h": 3600.0, "24h": 86400.0, "7d": 604800.0}
"""Seconds of each window of time that can be asked about; what is not here is all time."""
MOST_SPANS = 2000
"""About so many stretches of time are laid out; of a longer window, each is longer."""
_SUMS = (
    "begins_at", "ends_at", "first_iteration", "last_iteration",
    "seconds", "stall_seconds", "data_seconds", "barrier_seconds",
)  # fmt: skip
"""What is asked of each stretch of work, in the order in which it is asked."""
STRETCHES = 60
"""Of time, in the picture of stalls."""
TOLD_APART: tuple[Bucket, ...] = ("persist_backpressure", "data_prep")


def begin_of(window: Window | ShortWindow, *, now: float) -> float:
    """When it begins; 0 for all time."""
    return now - WINDOWS[window] if window in WINDOWS else 0.0


async def goodput(db: Database, job: str, window: Window, *, now: float) -> Goodput:
    """Raises UnknownJob."""
    async with db.read() as session:
        sheet = await _timesheet(session, await find_job(session, job), window, now=now)
    wall = sheet.wall
    return Goodput(
        job=job,
        window=window,
        begins_at=sheet.begins_at,
        ends_at=sheet.ends_at,
        wall_seconds=wall / MICROSECONDS,
        goodput=sheet.buckets["productive"] / wall if wall else None,
        iterations=sheet.iterations,
        lost_iterations=sheet.lost_iterations,
        buckets=[
            TimeBucket(
                name=name,
                seconds=sheet.buckets[name] / MICROSECONDS,
                share=sheet.buckets[name] / wall if wall else 0.0,
                definition=DEFINITIONS[name],
            )
            for name in BUCKETS
        ],
    )


async def shares(db: Database, jobs: Sequence[str], window: ShortWindow, *, now: float) -> dict[str, float]:
    """The goodput of many jobs, in as many statements as for one; of those that have lived in the window.

    What else the time went into makes no difference to it, and is not looked at.
    """
    begins_at = begin_of(window, now=now)
    async with db.read() as session:
        rows = {row.name: row for row in await session.scalars(_of_jobs(), {"jobs": jobs})}
        attempts = await lives_of_jobs(session, list(rows), since=begins_at)
        lineages = await branches(session, list(rows))
        standing = {
            name: _Standing(
                [one.attempt for one in attempts.get(name, [])], Ancestry(lineages.get(name, []), row.lineage)
            )
            for name, row in rows.items()
        }
        spans = await _spans(session, standing, begins_at, now)
    found = {}
    for name, row in rows.items():
        sheet = _productive(row, attempts.get(name, []), spans.get(name, []), begins_at, now=now)
        if sheet.wall:
            found[name] = sheet.buckets["productive"] / sheet.wall
    return found


@cache
def _of_jobs() -> Select[models.JobRecord]:
    return select(models.JobRecord).where(models.JobRecord.name.in_(named_jobs()))


def _productive(
    job: models.JobRecord, attempts: Sequence[Attempted], spans: Sequence[Span], begins_at: float, *, now: float
) -> Timesheet:
    begins_at = max(begins_at, min((one.attempt.started_at for one in attempts), default=now))
    lives = [
        Life(uid=one.attempt.uid, started_at=one.attempt.started_at, ended_at=_ended_at(job, one, now=now))
        for one in attempts
    ]
    ends_at = max(begins_at, _end(attempts, now=now))
    return timesheet(lives, spans, (), begins_at=begins_at, ends_at=ends_at, told_apart={})


async def _timesheet(session: AsyncSession, job: models.JobRecord, window: Window, *, now: float) -> Timesheet:
    attempts = await lives_of(session, job, since=begin_of(window, now=now))
    first = min((one.attempt.started_at for one in attempts), default=now)
    begins_at = max(begin_of(window, now=now), first)
    ends_at = max(begins_at, _end(attempts, now=now))
    standing = _Standing([one.attempt for one in attempts], await ancestry_of(session, job))
    return timesheet(
        [await _life(session, job, one, begins_at, now=now) for one in attempts],
        (await _spans(session, {job.name: standing}, begins_at, ends_at)).get(job.name, []),
        await _restores(session, job.name, begins_at),
        begins_at=begins_at,
        ends_at=ends_at,
        told_apart=await _told_apart(session, job.name, begins_at),
    )


async def _life(
    session: AsyncSession, job: models.JobRecord, one: Attempted, begins_at: float, *, now: float
) -> Life:
    attempt, ended_at = one.attempt, _ended_at(job, one, now=now)
    cut = attempt.started_at < begins_at < ended_at
    return Life(
        uid=attempt.uid,
        started_at=attempt.started_at,
        ended_at=ended_at,
        trained_before=cut and await _trained_before(session, attempt, begins_at),
    )


def _end(attempts: Sequence[Attempted], *, now: float) -> float:
    """A job that came to the end that somebody wanted is not down from then on."""
    last = attempts[-1].attempt if attempts else None
    wanted = last is not None and last.finished in PLANNED_ENDS and last.finished != RELAUNCHED
    return min(now, last.finished_at) if wanted and last and last.finished_at is not None else now


def _ended_at(job: models.JobRecord, one: Attempted, *, now: float) -> float:
    """Of an attempt: its own word, else when it was heard last; `now` while it runs."""
    attempt = one.attempt
    if attempt.finished_at is not None:
        return attempt.finished_at
    if attempt.uid == job.uid:
        return now if status_of(job, attempt, now=now).alive else job.last_contact_at
    return attempt.started_at if one.heard_at is None else one.heard_at


class _Standing:
    """What of each attempt's work stands.

    What lies beyond the way to where the job is was left by a restore; what a later attempt began before, on the
    same lineage, was lost with the earlier one.
    """

    def __init__(self, attempts: Sequence[models.AttemptRecord], ancestry: Ancestry) -> None:
        self._upto = ancestry.upto
        self._ends: dict[tuple[str, int], int] = {}
        """By attempt and lineage, before which iteration a later attempt began."""
        begun: dict[int, int] = {}
        for attempt in reversed(attempts):
            self._ends |= {(attempt.uid, lineage): iteration for lineage, iteration in begun.items()}
            if attempt.versions:  # until it has said where it starts, it has thrown nothing away
                begun[attempt.lineage] = min(attempt.iteration, begun.get(attempt.lineage, attempt.iteration))

    def upto(self, uid: str, lineage: int) -> int:
        """The last iteration of an attempt on a lineage that was not thrown away."""
        upto = self._upto.get(lineage, -1)
        return min(upto, self._ends.get((uid, lineage), upto))


async def _spans(
    session: AsyncSession, standing: Mapping[str, _Standing], begins_at: float, ends_at: float
) -> dict[str, list[Span]]:
    first, last = bucket_of(begins_at), bucket_of(ends_at)
    asked = {"jobs": list(standing), "first": first, "each": max(1, (last - first) // MOST_SPANS)}
    found: dict[str, list[Span]] = {}
    for row in await session.execute(_of_spans(), asked):
        job, *sums = row
        found.setdefault(job, []).append(_span(standing[job], *sums))
    return found


@cache
def _of_spans() -> Select[*tuple[Any, ...]]:
    """Of work, so many buckets of it as one."""
    rows = models.WorkRecord
    return (
        select(
            rows.job,
            rows.uid,
            rows.lineage,
            func.min(rows.begins_at),
            func.max(rows.ends_at),
            func.min(rows.first_iteration),
            func.max(rows.last_iteration),
            func.sum(rows.seconds),
            func.sum(rows.stall_seconds),
            func.sum(rows.data_seconds),
            func.sum(rows.barrier_seconds),
        )
        .where(rows.job.in_(named_jobs()), rows.rank == 0, rows.bucket >= bindparam("first", type_=BigInteger()))
        .group_by(rows.job, rows.uid, rows.lineage, rows.bucket // bindparam("each", type_=BigInteger()))
    )


def _span(standing: _Standing, uid: str, lineage: int, *sums: Any) -> Span:
    named = dict(zip(_SUMS, sums, strict=True))
    return Span(uid=uid, stands_upto=standing.upto(uid, lineage), **named)


async def _trained_before(session: AsyncSession, attempt: models.AttemptRecord, at: float) -> bool:
    rows = models.WorkRecord
    query = (
        select(rows.uid)
        .where(rows.job == attempt.job, rows.rank == 0, rows.bucket <= bucket_of(at))
        .where(rows.uid == attempt.uid, rows.begins_at < at)
        .order_by(rows.bucket.desc())
        .limit(1)
    )
    return await session.scalar(query) is not None


async def _restores(session: AsyncSession, job: str, begins_at: float) -> list[Restored]:
    rows = models.StallRecord
    query = select(rows.at, rows.seconds).where(rows.job == job, rows.kind == "restore", rows.at >= begins_at)
    return [Restored(at, seconds) for at, seconds in await session.execute(query)]


async def _told_apart(session: AsyncSession, job: str, begins_at: float) -> dict[Bucket, float]:
    rows = models.StallRecord
    query = (
        select(rows.kind, func.sum(rows.seconds))
        .where(rows.job == job, rows.kind.in_(TOLD_APART), rows.at >= begins_at)
        .group_by(rows.kind)
    )
    found = {row[0]: row[1] for row in await session.execute(query)}
    return {kind: found[kind] for kind in TOLD_APART if kind in found}


# ---- what training waited for, and when


async def stalls_over_time(db: Database, job: str, window: Window, *, now: float) -> StallsOverTime:
    """Raises UnknownJob.

    A wait is told when it is over, by its end. A stretch shows at most its own length of a kind: the rest of a
    longer wait is laid into the stretches before it, and what of it lies before the window is left out.
    """
    rows, attempts = models.StallRecord, models.AttemptRecord
    async with db.read() as session:
        row = await find_job(session, job)
        first = await session.scalar(select(func.min(attempts.started_at)).where(attempts.job == job))
        begins_at = max(begin_of(window, now=now), first or row.created_at)
        ends_at = max(now, begins_at + 1)
        stretch = (ends_at - begins_at) / STRETCHES
        # In whole numbers, which every database divides alike.
        place = cast((rows.at - begins_at) * 1000, BigInteger) // max(1, round(stretch * 1000))
        bucket = case((place < STRETCHES, place), else_=STRETCHES - 1).label("bucket")
        query = (
            select(rows.kind, bucket, func.sum(rows.seconds))
            .where(rows.job == job, rows.at >= begins_at)
            .group_by(rows.kind, bucket)
        )
        found = (await session.execute(query)).all()
    ended: dict[str, list[float]] = {}
    for kind, number, waited in found:
        ended.setdefault(kind, [0.0] * STRETCHES)[number] = waited
    seconds = {typing.cast("StallKind", kind): _spread(waited, stretch) for kind, waited in ended.items()}
    return StallsOverTime(
        job=job,
        window=window,
        begins_at=begins_at,
        ends_at=ends_at,
        stretch_seconds=stretch,
        seconds=dict(sorted(seconds.items(), key=lambda item: -sum(item[1]))),
    )


def _spread(ended: list[float], stretch: float) -> list[float]:
    """Of waits by the stretch in which they ended, how long each stretch was waited in."""
    spread, over = [0.0] * len(ended), 0.0
    for place in reversed(range(len(ended))):
        waited = ended[place] + over
        spread[place] = min(waited, stretch)
        over = waited - spread[place]
    return spread
