"""Pages of the fleet: the database selects and sorts the jobs of a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec
from sqlalchemy import ColumnElement, ColumnExpressionArgument, Row, Select, and_, case, exists, func, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from holdfast.protocol.fleet import Fleet
from holdfast.protocol.jobs import JobStatus
from holdfast_server import models
from holdfast_server.core.errors import InvalidSetting
from holdfast_server.db import Database
from holdfast_server.queries.summaries import summaries
from holdfast_server.records import checkpoints
from holdfast_server.records.checkpoints import LastDurable
from holdfast_server.records.interval_status import paced_of
from holdfast_server.records.job_status import (
    ALIVE,
    STATUSES,
    current_attempt,
    iterations_per_second,
    recent_of,
    seconds_of_last,
    status_in_sql,
)

PAGE_ROWS, MOST_ROWS = 50, 500

ComputedSort = Literal["unsaved", "overhead", "durable", "loss", "interval", "iteration_time"]
"""Orders by most unsaved GPU-hours, overhead furthest above the budget, longest time without a durable
checkpoint, lowest loss, longest interval, slowest iterations. No column has these values."""
_COMPUTED: tuple[ComputedSort, ...] = get_args(ComputedSort)
WATCHED = (*ALIVE, "silent")
"""Statuses of jobs that may still lose work, which come before ended jobs."""

FleetSort = Literal["living", "attention", "name", "heard", "iteration", "status", "owner", ComputedSort]
"""`living`: live jobs by name, so that rows keep their place, then the others, newest first. `attention`: failed
jobs, silent ones, those with a critical alert, then with another firing alert, other live ones, then the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetQuery:
    """Filter, order and page of the fleet."""

    search: str = ""
    """Part of the name or of the host of a job, in any case."""
    status: JobStatus | None = None
    project: str | None = None
    owner: str | None = None
    """Who launched the newest attempt."""
    labels: tuple[str, ...] = ()
    """Labels that all match: `name` for any value, or `name: value`."""
    archived: bool = False
    """Whether to list the archived jobs instead of the others."""
    order: FleetSort = "living"
    reverse: bool = False
    """Whether to turn the order around, except `living`. Jobs without the value stay last."""
    grouped: bool = False
    """Whether to group by project; the order applies within each."""
    page: int = 1
    size: int = PAGE_ROWS
    visible_projects: Collection[str] | None = None
    """Projects that the user may see; `None`: all."""


def fleet(session: Session, question: FleetQuery, *, now: float) -> Fleet:
    counts, archived, total = _counts(session, question, now=now)
    pages = -(-total // question.size) or 1
    page = min(question.page, pages)
    return Fleet(
        jobs=summaries(session, _rows(session, question, page, counts, now=now), now=now),
        page=page,
        pages=pages,
        size=question.size,
        total=total,
        counts=counts,
        archived=archived,
        projects=_projects(session, question.visible_projects),
    )


def _counts(session: Session, question: FleetQuery, *, now: float) -> tuple[dict[JobStatus, int], int, int]:
    """Count the jobs outside the archive by status, those in it, and those that the list has on all pages.

    In one pass: with GROUP BY, SQLite would sort all jobs.
    """
    columns: list[ColumnElement[Any]] = [status_in_sql(now=now).label("status"), _in_archive().label("archived")]
    query = select(*columns)
    matching = _matching(query, question).cte("matching").prefix_with("MATERIALIZED").c
    listed = matching.archived if question.archived else ~matching.archived
    if question.status is not None:
        listed = and_(listed, matching.status == question.status)
    by_status = (and_(~matching.archived, matching.status == status) for status in STATUSES)
    wanted = (*by_status, matching.archived, listed)
    *found, archived, total = session.execute(select(*(func.count(case((each, 1))) for each in wanted))).one()
    return {status: count for status, count in zip(STATUSES, found, strict=True) if count}, archived, total


def _in_archive() -> ColumnElement[bool]:
    """Return the SQL condition of `control.archive.is_archived`."""
    return func.coalesce(models.JobRecord.archived_at, -1.0) >= models.JobRecord.last_contact_at


def _rows(
    session: Session, question: FleetQuery, page: int, counts: Mapping[JobStatus, int], *, now: float
) -> Sequence[models.JobRecord]:
    """Return the jobs of a page. Names are selected first, to sort short rows."""
    job, skipped = models.JobRecord, (page - 1) * question.size
    query = _listed(select(job.name), question, now=now)
    names: Sequence[str]
    if question.order in _COMPUTED:
        names = _computed_order(session, query, question, now=now)
        names = names[skipped : skipped + question.size]
    elif question.order == "living" and not question.grouped:
        alive = () if question.archived else ALIVE  # archived jobs have ended
        of_living = sum(counts.get(one, 0) for one in alive if question.status in (None, one))
        names = _living_first(session, query, of_living, skipped, question.size, now=now)
    else:
        query = query.order_by(*([job.project] if question.grouped else []), *_order(question, now=now))
        names = session.scalars(query.limit(question.size).offset(skipped)).all()
    rows = {row.name: row for row in session.scalars(select(job).where(job.name.in_(names)))}
    return [rows[name] for name in names]


def _living_first(
    session: Session, matching: Select[Any], of_living: int, skipped: int, size: int, *, now: float
) -> Sequence[str]:
    """Return the names of a page in the order `living`, with two queries that use indexes instead of a sort.

    `of_living`: number of matching jobs that are live.
    """
    job, alive = models.JobRecord, status_in_sql(now=now).in_(ALIVE)
    names: list[str] = []
    if skipped < of_living:
        living = matching.where(alive).order_by(job.name).limit(size).offset(skipped)
        names += session.scalars(living)
    if len(names) < size:
        others = matching.where(~alive).order_by(job.last_contact_at.desc(), job.name)
        names += session.scalars(others.limit(size - len(names)).offset(max(0, skipped - of_living)))
    return names


def projects_of(db: Database, visible: Collection[str] | None) -> list[str]:
    """Return the projects that the user may see, by name."""
    with db.read() as session:
        return _projects(session, visible)


def _projects(session: Session, visible: Collection[str] | None) -> list[str]:
    query = select(models.ProjectRecord.name).order_by(models.ProjectRecord.name)
    if visible is not None:
        query = query.where(models.ProjectRecord.name.in_(visible))
    return list(session.scalars(query))


def _matching(query: Select[Any], question: FleetQuery) -> Select[Any]:
    """Restrict a query of jobs and their current attempts to a question's filter, except status and archive."""
    job = models.JobRecord
    query = query.select_from(job).outerjoin(models.AttemptRecord, current_attempt())
    if question.visible_projects is not None:
        query = query.where(job.project.in_(question.visible_projects))
    if question.project is not None:
        query = query.where(job.project == question.project)
    if question.owner is not None:
        query = query.where(models.AttemptRecord.owner == question.owner)
    for label in question.labels:
        query = query.where(has_label(models.AttemptRecord.labels, label))
    if question.search:
        columns = (job.name, models.AttemptRecord.host)
        query = query.where(or_(*(each.icontains(question.search, autoescape=True) for each in columns)))
    return query


def _listed(query: Select[Any], question: FleetQuery, *, now: float) -> Select[Any]:
    """Restrict a query of jobs and their current attempts to all of a question's filter."""
    query = _matching(query, question).where(_in_archive() if question.archived else ~_in_archive())
    return query if question.status is None else query.where(status_in_sql(now=now) == question.status)


def jobs_with(labels: Sequence[str]) -> Select[str]:
    """Return the query of the names of the jobs that have all of these labels. Raises InvalidSetting."""
    query = select(models.JobRecord.name).join(models.AttemptRecord, current_attempt())
    return query.where(*(has_label(models.AttemptRecord.labels, label) for label in labels))


def has_label(labels: InstrumentedAttribute[Any], label: str) -> ColumnElement[bool]:
    """Return the condition for a label in a column of labels. Raises InvalidSetting: it has no name."""
    # unlike LIKE and position(), replace() compares case and means the same on both databases
    return func.replace(labels, _label_in_json(label), "") != labels


def _label_in_json(label: str) -> str:
    """Return the text of a label in the stored JSON: no other part of it can be equal, since quotes are escaped.

    Raises:
        InvalidSetting: it has no name.
    """
    name, separator, value = (part.strip() for part in label.partition(":"))
    if not name:
        raise InvalidSetting("label", f"label {label!r} has no name: use name, or name: value")
    return _json(name) + ":" + (_json(value) if separator else '"')


def _json(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _order(question: FleetQuery, *, now: float) -> tuple[ColumnExpressionArgument[Any], ...]:
    job, reverse = models.JobRecord, question.reverse
    key: ColumnElement[Any] | InstrumentedAttribute[Any]
    match question.order:
        case "name":
            return (job.name.desc() if reverse else job.name.asc(),)
        case "heard":
            key, reverse = job.last_contact_at, not reverse
        case "iteration":
            key, reverse = job.iteration, not reverse
        case "attention":
            key = attention(now=now)
        case "status":
            key = status_in_sql(now=now)
        case "owner":
            key = models.AttemptRecord.owner
        case "living":
            alive = status_in_sql(now=now).in_(ALIVE)
            return (
                case((alive, 0), else_=1),
                case((alive, job.name), else_=""),
                job.last_contact_at.desc(),
                job.name,
            )
        case _:
            raise AssertionError(question.order)  # the other orders are computed in Python
    return ((key.desc() if reverse else key.asc()).nulls_last(), job.name)


def attention(*, now: float) -> ColumnElement[int]:
    """Return how soon a person should look at a job; the smallest is the first."""
    alerts, status = models.AlertRecord, status_in_sql(now=now)
    fires = exists().where(
        alerts.job == models.JobRecord.name,
        alerts.fired_at.is_not(None),
        alerts.resolved_at.is_(None),
        alerts.acknowledged_at.is_(None),
        or_(alerts.silenced_until.is_(None), alerts.silenced_until <= now),
    )
    critical = fires.where(alerts.severity == "critical")
    return case(
        (status == "failed", 0),
        (status == "silent", 1),
        (critical, 2),
        (fires, 3),
        (status.in_(ALIVE), 4),
        else_=5,
    )


def matching_jobs(db: Database, question: FleetQuery, *, now: float) -> list[str]:
    """Return the names of all jobs that match, on all pages, in alphabetical order."""
    query = listed_names(question, now=now).order_by(models.JobRecord.name)
    with db.read() as session:
        return list(session.scalars(query))


def listed_names(question: FleetQuery, *, now: float) -> Select[str]:
    """Return the query of the names of all jobs that match, in any order."""
    return _listed(select(models.JobRecord.name), question, now=now)


# ---- orders that are computed for all matching jobs, since no column has their values


def _computed_order(session: Session, matching: Select[Any], question: FleetQuery, *, now: float) -> list[str]:
    """Return the names of matching jobs, outer-joined with their current attempts, in a computed order."""
    order: ComputedSort = question.order  # type: ignore[assignment]  # the caller has checked it
    job, status = models.JobRecord, status_in_sql(now=now).label("status")
    columns = (job.name, job.project, job.created_at, status, *_COLUMNS[order])
    rows = session.execute(matching.with_only_columns(*columns)).all()
    durable: Mapping[str, LastDurable] = {}
    if order in ("unsaved", "durable"):
        durable = checkpoints.last_durable_of_many(session, matching.with_only_columns(job.name))
    key_of, sign = _SORT_KEYS[order], 1 if question.reverse else -1

    def place(row: Row[Any]) -> tuple[str, bool, float, str]:
        key = key_of(row, durable)
        return (
            row.project if question.grouped else "",
            row.status not in WATCHED,
            math.inf if key is None else sign * key,
            row.name,
        )

    return [row.name for row in sorted(rows, key=place)]


def unsaved_seconds(row: Row[Any], last: LastDurable | None) -> float | None:
    """Return the time of the iterations after the newest durable checkpoint, on each rank."""
    exposed = max(0, row.iteration - (last.iteration if last else 0))
    return seconds_of_last(recent_of(row), exposed)


def _unsaved_work(row: Row[Any], durable: Mapping[str, LastDurable]) -> float | None:
    seconds = unsaved_seconds(row, durable.get(row.name))
    return None if seconds is None else seconds * max(1, row.world_size or 1)


def _overhead(row: Row[Any], _: Mapping[str, LastDurable]) -> float | None:
    paced = paced_of(row)
    if paced is None or paced.measured_overhead is None or math.isnan(paced.measured_overhead):
        return None
    return paced.measured_overhead / paced.budget if paced.budget > 0 else None


def _age(row: Row[Any], durable: Mapping[str, LastDurable]) -> float:
    last = durable.get(row.name)
    return -(last.at if last else row.started_at or row.created_at)


def _loss(row: Row[Any], _: Mapping[str, LastDurable]) -> float | None:
    loss = recent_of(row).metrics.get("loss")
    # NaN cannot be compared; it is worse than any loss
    return None if loss is None else -math.inf if math.isnan(loss) else -loss


def _interval(row: Row[Any], durable: Mapping[str, LastDurable]) -> float | None:
    paced = paced_of(row)
    if paced is None or paced.interval_seconds is not None:
        return paced.interval_seconds if paced else None
    seconds = _iteration_time(row, durable)
    return None if paced.interval is None or seconds is None else paced.interval * seconds


def _iteration_time(row: Row[Any], _: Mapping[str, LastDurable]) -> float | None:
    rate = iterations_per_second(recent_of(row))
    return None if rate is None else 1 / rate


_COLUMNS: dict[ComputedSort, tuple[Any, ...]] = {
    "unsaved": (models.JobRecord.iteration, models.JobRecord.recent, models.AttemptRecord.world_size),
    "overhead": (models.JobRecord.paced,),
    "durable": (models.AttemptRecord.started_at,),
    "loss": (models.JobRecord.recent,),
    "interval": (models.JobRecord.paced, models.JobRecord.recent),
    "iteration_time": (models.JobRecord.recent,),
}
_SORT_KEYS: dict[ComputedSort, Callable[[Row[Any], Mapping[str, LastDurable]], float | None]] = {
    "unsaved": _unsaved_work,
    "overhead": _overhead,
    "durable": _age,
    "loss": _loss,
    "interval": _interval,
    "iteration_time": _iteration_time,
}
"""Values of which the largest comes first."""
