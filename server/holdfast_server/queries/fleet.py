"""Pages of the fleet: the database selects and sorts the jobs of a page."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec
from sqlalchemy import ColumnExpressionArgument, Row, Select, case, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.protocol.jobs import Fleet, JobStatus
from holdfast.protocol.messages import IntervalDecision
from holdfast_server import models
from holdfast_server.db import Database
from holdfast_server.queries.summaries import summaries
from holdfast_server.records import checkpoints
from holdfast_server.records.checkpoints import LastDurable
from holdfast_server.records.job_status import ALIVE, STATUSES, current_attempt, seconds_of_last, status_in_sql
from holdfast_server.samples.limits import RecentSamples

PAGE_ROWS, MOST_ROWS = 50, 500

Worst = Literal["risk", "overhead", "durable"]
"""Orders by most GPU hours at risk, overhead furthest above the budget, longest time without a durable
checkpoint."""
_WORST: tuple[Worst, ...] = get_args(Worst)
_WATCHED = (*ALIVE, "silent")
"""Statuses of jobs that may still lose work, which come before ended jobs."""

FleetSort = Literal["living", "name", "heard", "iteration", "status", "risk", "overhead", "durable"]
"""`living`: live jobs by name, so that rows keep their place, then the others, newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetQuery:
    """Filter, order and page of the fleet."""

    search: str = ""
    """Part of a name, in any case."""
    status: JobStatus | None = None
    project: str | None = None
    order: FleetSort = "living"
    grouped: bool = False
    """Whether to group by project; the order applies within each."""
    page: int = 1
    size: int = PAGE_ROWS
    visible_projects: Collection[str] | None = None
    """Projects that the user may see; `None`: all."""


async def fleet(db: Database, question: FleetQuery, *, now: float) -> Fleet:
    async with db.read() as session:
        counts = await _counts(session, question, now=now)
        total = sum(counts.values()) if question.status is None else counts.get(question.status, 0)
        pages = -(-total // question.size) or 1
        page = min(question.page, pages)
        return Fleet(
            jobs=await summaries(session, await _rows(session, question, page, counts, now=now), now=now),
            page=page,
            pages=pages,
            size=question.size,
            total=total,
            counts=counts,
            projects=await _projects(session, question.visible_projects),
        )


async def _counts(session: AsyncSession, question: FleetQuery, *, now: float) -> dict[JobStatus, int]:
    """Count jobs by status in one pass: with GROUP BY, SQLite would sort all jobs."""
    status = status_in_sql(now=now).label("status")
    matching = _matching(select(status), question).cte("matching").prefix_with("MATERIALIZED")
    query = select(*(func.count(case((matching.c.status == status, 1))) for status in STATUSES))
    found = zip(STATUSES, (await session.execute(query)).one(), strict=True)
    return {status: count for status, count in found if count}


async def _rows(
    session: AsyncSession, question: FleetQuery, page: int, counts: Mapping[JobStatus, int], *, now: float
) -> Sequence[models.JobRecord]:
    """Return the jobs of a page. Names are selected first, to sort short rows."""
    job, skipped = models.JobRecord, (page - 1) * question.size
    query = _matching(select(job.name), question)
    if question.status is not None:
        query = query.where(status_in_sql(now=now) == question.status)
    names: Sequence[str]
    if question.order in _WORST:
        names = await _worst_first(session, query, question.order, grouped=question.grouped, now=now)
        names = names[skipped : skipped + question.size]
    elif question.order == "living" and not question.grouped:
        of_living = sum(counts.get(one, 0) for one in ALIVE if question.status in (None, one))
        names = await _living_first(session, query, of_living, skipped, question.size, now=now)
    else:
        query = query.order_by(*([job.project] if question.grouped else []), *_order(question.order, now=now))
        names = (await session.scalars(query.limit(question.size).offset(skipped))).all()
    rows = {row.name: row for row in await session.scalars(select(job).where(job.name.in_(names)))}
    return [rows[name] for name in names]


async def _living_first(
    session: AsyncSession, matching: Select[Any], of_living: int, skipped: int, size: int, *, now: float
) -> Sequence[str]:
    """Return the names of a page in the order `living`, with two queries that use indexes instead of a sort.

    `of_living`: number of matching jobs that are live.
    """
    job, alive = models.JobRecord, status_in_sql(now=now).in_(ALIVE)
    names: list[str] = []
    if skipped < of_living:
        living = matching.where(alive).order_by(job.name).limit(size).offset(skipped)
        names += await session.scalars(living)
    if len(names) < size:
        others = matching.where(~alive).order_by(job.last_contact_at.desc(), job.name)
        names += await session.scalars(others.limit(size - len(names)).offset(max(0, skipped - of_living)))
    return names


async def projects_of(db: Database, visible: Collection[str] | None) -> list[str]:
    """Return the projects that the user may see, by name."""
    async with db.read() as session:
        return await _projects(session, visible)


async def _projects(session: AsyncSession, visible: Collection[str] | None) -> list[str]:
    query = select(models.ProjectRecord.name).order_by(models.ProjectRecord.name)
    if visible is not None:
        query = query.where(models.ProjectRecord.name.in_(visible))
    return list(await session.scalars(query))


def _matching(query: Select[Any], question: FleetQuery) -> Select[Any]:
    """Restrict a query of jobs and their current attempts to a question's filter, except the status."""
    job = models.JobRecord
    query = query.select_from(job).outerjoin(models.AttemptRecord, current_attempt())
    if question.visible_projects is not None:
        query = query.where(job.project.in_(question.visible_projects))
    if question.project is not None:
        query = query.where(job.project == question.project)
    if question.search:
        query = query.where(job.name.icontains(question.search, autoescape=True))
    return query


def _order(order: FleetSort, *, now: float) -> tuple[ColumnExpressionArgument[Any], ...]:
    job = models.JobRecord
    match order:
        case "name":
            return (job.name.asc(),)
        case "heard":
            return (job.last_contact_at.desc(), job.name)
        case "iteration":
            return (job.iteration.desc(), job.name)
        case "status":
            return (status_in_sql(now=now), job.name)
        case "living":
            alive = status_in_sql(now=now).in_(ALIVE)
            return (
                case((alive, 0), else_=1),
                case((alive, job.name), else_=""),
                job.last_contact_at.desc(),
                job.name,
            )
    raise AssertionError(order)  # the other orders are computed in Python


# ---- orders by risk, overhead or age: no column has these, so they are computed for all matching jobs

_paced, _recent = msgspec.msgpack.Decoder(IntervalDecision), msgspec.msgpack.Decoder(RecentSamples)


async def _worst_first(
    session: AsyncSession, matching: Select[Any], order: Worst, *, grouped: bool, now: float
) -> list[str]:
    """Return the names of matching jobs, outer-joined with their current attempts, the worst first."""
    job, status = models.JobRecord, status_in_sql(now=now).label("status")
    columns = (job.name, job.project, job.created_at, status, *_COLUMNS[order])
    rows = (await session.execute(matching.with_only_columns(*columns))).all()
    durable: Mapping[str, LastDurable] = {}
    if order != "overhead":
        durable = await checkpoints.last_durable_of_many(session, matching.with_only_columns(job.name))
    bad = _BADNESS[order]

    def place(row: Row[Any]) -> tuple[str, bool, float, str]:
        badness = bad(row, durable)
        return (
            row.project if grouped else "",
            row.status not in _WATCHED,
            math.inf if badness is None else -badness,
            row.name,
        )

    # Off the event loop: there may be ten thousand jobs.
    return [row.name for row in await asyncio.to_thread(sorted, rows, key=place)]


def _risk(row: Row[Any], durable: Mapping[str, LastDurable]) -> float | None:
    last = durable.get(row.name)
    exposed = max(0, row.iteration - (last.iteration if last else 0))
    seconds = seconds_of_last(_recent.decode(row.recent) if row.recent else RecentSamples(), exposed)
    return None if seconds is None else seconds * max(1, row.world_size or 1)


def _overhead(row: Row[Any], _: Mapping[str, LastDurable]) -> float | None:
    paced = _paced.decode(row.paced) if row.paced else None
    if paced is None or paced.measured_overhead is None or math.isnan(paced.measured_overhead):
        return None
    return paced.measured_overhead / paced.budget if paced.budget > 0 else None


def _age(row: Row[Any], durable: Mapping[str, LastDurable]) -> float:
    last = durable.get(row.name)
    return -(last.at if last else row.started_at or row.created_at)


_COLUMNS: dict[Worst, tuple[Any, ...]] = {
    "risk": (models.JobRecord.iteration, models.JobRecord.recent, models.AttemptRecord.world_size),
    "overhead": (models.JobRecord.paced,),
    "durable": (models.AttemptRecord.started_at,),
}
_BADNESS: dict[Worst, Callable[[Row[Any], Mapping[str, LastDurable]], float | None]] = {
    "risk": _risk,
    "overhead": _overhead,
    "durable": _age,
}
