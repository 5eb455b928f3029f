"""One page of the fleet: which jobs are on it is decided in the database, whatever their number."""

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
from holdfast.protocol.messages import Paced
from holdfast_server import models
from holdfast_server.db import Database
from holdfast_server.queries.summaries import summaries
from holdfast_server.records import checkpoints
from holdfast_server.records.checkpoints import LastDurable
from holdfast_server.records.job_status import ALIVE, STATUSES, current_attempt, seconds_of_last, status_in_sql
from holdfast_server.samples.limits import Recent

PAGE_ROWS, MOST_ROWS = 50, 500

Worst = Literal["risk", "overhead", "durable"]
"""Most GPU-hours at risk first; furthest over the budget first; longest without a durable checkpoint first."""
_WORST: tuple[Worst, ...] = get_args(Worst)
_WATCHED = (*ALIVE, "silent")
"""Jobs that may still lose something come before those that have ended."""

Order = Literal["living", "name", "heard", "iteration", "status", "risk", "overhead", "durable"]
"""`living`: living jobs by name, so that no row jumps away under the pointer; then the others, newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Which jobs, in which order, and which page of them."""

    search: str = ""
    """Part of a name, in capitals or not."""
    status: JobStatus | None = None
    project: str | None = None
    order: Order = "living"
    grouped: bool = False
    """By project: the order holds within each."""
    page: int = 1
    size: int = PAGE_ROWS
    visible_projects: Collection[str] | None = None
    """What whoever asks may see; None: every project."""


async def fleet(db: Database, question: Question, *, now: float) -> Fleet:
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


async def _counts(session: AsyncSession, question: Question, *, now: float) -> dict[JobStatus, int]:
    """Added up in one pass: to group them, SQLite sorts all jobs first."""
    status = status_in_sql(now=now).label("status")
    matching = _matching(select(status), question).cte("matching").prefix_with("MATERIALIZED")
    query = select(*(func.count(case((matching.c.status == status, 1))) for status in STATUSES))
    found = zip(STATUSES, (await session.execute(query)).one(), strict=True)
    return {status: count for status, count in found if count}


async def _rows(
    session: AsyncSession, question: Question, page: int, counts: Mapping[JobStatus, int], *, now: float
) -> Sequence[models.JobRecord]:
    """Names first: what is sorted to find the page is then as short as can be."""
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
    """What the order of that name says, by two questions: no job is sorted whose place an index knows.

    `of_living`: how many of those that match are living.
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
    """Those that somebody may see, by name."""
    async with db.read() as session:
        return await _projects(session, visible)


async def _projects(session: AsyncSession, visible: Collection[str] | None) -> list[str]:
    query = select(models.ProjectRecord.name).order_by(models.ProjectRecord.name)
    if visible is not None:
        query = query.where(models.ProjectRecord.name.in_(visible))
    return list(await session.scalars(query))


def _matching(query: Select[Any], question: Question) -> Select[Any]:
    """Of jobs and their current attempts, those that the question is about; of whatever status."""
    job = models.JobRecord
    query = query.select_from(job).outerjoin(models.AttemptRecord, current_attempt())
    if question.visible_projects is not None:
        query = query.where(job.project.in_(question.visible_projects))
    if question.project is not None:
        query = query.where(job.project == question.project)
    if question.search:
        query = query.where(job.name.icontains(question.search, autoescape=True))
    return query


def _order(order: Order, *, now: float) -> tuple[ColumnExpressionArgument[Any], ...]:
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
    raise AssertionError(order)  # the others are worked out job by job


# ---- jobs by what is worst about them: no column holds that, so it is computed for all that match, then sorted

_paced, _recent = msgspec.msgpack.Decoder(Paced), msgspec.msgpack.Decoder(Recent)


async def _worst_first(
    session: AsyncSession, matching: Select[Any], order: Worst, *, grouped: bool, now: float
) -> list[str]:
    """`matching`: a choice of jobs, outer-joined with their current attempts."""
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

    # Off the event loop: of ten thousand jobs, what each last said has to be looked into.
    return [row.name for row in await asyncio.to_thread(sorted, rows, key=place)]


def _risk(row: Row[Any], durable: Mapping[str, LastDurable]) -> float | None:
    last = durable.get(row.name)
    exposed = max(0, row.iteration - (last.iteration if last else 0))
    seconds = seconds_of_last(_recent.decode(row.recent) if row.recent else Recent(), exposed)
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
