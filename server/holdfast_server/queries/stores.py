"""Stores, the jobs that write to them, and the limits that apply."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Select, case, func, or_, select
from sqlalchemy.orm import Session

from holdfast.protocol.stores import StoreInfo, StoreLimit, StoreList, StoreSummary, StoreWriter
from holdfast_server import models
from holdfast_server.core.encoding import answer_from
from holdfast_server.core.errors import UnknownStore
from holdfast_server.records import store_disks, store_shares

PAGE_ROWS, MOST_ROWS = 50, 500

StoreSort = Literal["load", "address"]
"""`load`: the highest rate first, then the most bytes that wait."""

_stores, _writers, _disks = models.StoreRecord, models.StoreWriterRecord, models.StoreDiskRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreQuery:
    """Filter, order and page of the stores."""

    search: str = ""
    """Part of an address, in any case, or an id."""
    job: str | None = None
    """Only stores that this job writes to."""
    order: StoreSort = "load"
    page: int = 1
    size: int = PAGE_ROWS
    visible_projects: Collection[str] | None = None
    """Projects whose jobs the user may see; `None`: all."""


def find(session: Session, question: StoreQuery, *, now: float) -> StoreList:
    """Return one page of the stores that the user's jobs write to."""
    total = session.scalar(_matching(select(func.count()).select_from(_stores), question)) or 0
    pages = -(-total // question.size) or 1
    page = min(question.page, pages)
    by_address = (_stores.address, _stores.host, _stores.id)
    query, load = _with_sums(now)
    order = by_address if question.order == "address" else (*(column.desc() for column in load), *by_address)
    rows = session.execute(
        _matching(query, question).order_by(*order).limit(question.size).offset((page - 1) * question.size)
    )
    limits = store_shares.limits_of(session)
    return StoreList(
        stores=[answer_from(row[0], StoreSummary, **_figures(row, limits)) for row in rows],
        page=page,
        pages=pages,
        size=question.size,
        total=total,
    )


def get(session: Session, store: str, *, visible_projects: Collection[str] | None, now: float) -> StoreInfo:
    """Return a store with the jobs that write to it, those that write most first.

    Raises:
        UnknownStore: there is none, or the user may not see it.
    """
    query, _ = _with_sums(now)
    asked = StoreQuery(visible_projects=visible_projects)
    row = session.execute(_matching(query, asked).where(_stores.id == store)).one_or_none()
    if row is None:
        raise UnknownStore(store)
    jobs = models.JobRecord
    writers = select(_writers, jobs.project).join(jobs, jobs.name == _writers.job).where(_writers.store == store)
    found = session.execute(writers).all()
    seen = [_writer(one, now) for one, project in found if visible_projects is None or project in visible_projects]
    seen.sort(key=lambda one: (-(one.bytes_per_second or 0.0), -one.waiting_bytes, not one.is_active, one.job))
    return answer_from(
        row[0], StoreInfo, writers=seen, hidden_writers=len(found) - len(seen),
        **_figures(row, store_shares.limits_of(session)),
    )  # fmt: skip


def limits(session: Session, *, visible_projects: Collection[str] | None) -> list[StoreLimit]:
    """Return the limits by target: all, or those that apply to stores that the user may see."""
    found = store_shares.limits_of(session)
    if visible_projects is not None:
        columns: list[Any] = [_stores.id, _stores.address]
        seen = _matching(select(*columns), StoreQuery(visible_projects=visible_projects))
        targets = {store_shares.limit_for(store, address, found) for store, address in session.execute(seen)}
        found = {target: row for target, row in found.items() if target in targets}
    return [answer_from(row, StoreLimit) for row in found.values()]


def _with_sums(now: float) -> tuple[Select[Any], Sequence[Any]]:
    """Return the query of stores with their disk and the sums of their writers, and the columns of the load."""
    is_active = _writers.at > now - store_shares.ACTIVE_SECONDS
    sums = (  # in floating point: figures that jobs report may exceed a 64-bit integer together
        select(
            _writers.store,
            func.sum(case((is_active & _writers.writing, _writers.bytes_per_second))).label("bytes_per_second"),
            func.sum(case((is_active, _writers.waiting_bytes * 1.0), else_=0.0)).label("waiting_bytes"),
            func.sum(_writers.earlier_bytes * 1.0 + _writers.written_bytes).label("written_bytes"),
            func.count(case((is_active, 1))).label("active_writers"),
        )
        .group_by(_writers.store)
        .subquery()
    )
    figures = [
        func.coalesce(sums.c[name], 0).label(name)
        for name in ("bytes_per_second", "waiting_bytes", "written_bytes", "active_writers")
    ]
    columns: list[Any] = [_stores, _disks, *figures]
    query = (
        select(*columns)
        .select_from(_stores)
        .outerjoin(_disks, store_disks.is_newest(_stores.id))
        .outerjoin(sums, sums.c.store == _stores.id)
    )
    return query, figures[:2]


def _matching(query: Select[Any], question: StoreQuery) -> Select[Any]:
    """Restrict a query of stores to a question's filter."""
    if question.search:
        part = _stores.address.icontains(question.search, autoescape=True)
        query = query.where(or_(part, _stores.id == question.search))
    if question.job is None and question.visible_projects is None:
        return query
    jobs = models.JobRecord
    writing = select(_writers.store).join(jobs, jobs.name == _writers.job)
    if question.job is not None:
        writing = writing.where(_writers.job == question.job)
    if question.visible_projects is not None:
        writing = writing.where(jobs.project.in_(question.visible_projects))
    return query.where(_stores.id.in_(writing))


def _figures(row: Any, limits: Mapping[str, models.StoreLimitRecord]) -> dict[str, Any]:
    store, disk = row[:2]
    target = store_shares.limit_for(store.id, store.address, limits)
    return {
        "free_bytes": disk.free_bytes if disk else None,
        "total_bytes": disk.total_bytes if disk else None,
        "free_at": disk.at if disk else None,
        "limit": None if target is None else answer_from(limits[target], StoreLimit),
        "bytes_per_second": float(row.bytes_per_second),
        "waiting_bytes": int(row.waiting_bytes),
        "written_bytes": int(row.written_bytes),
        "active_writers": row.active_writers,
    }


def _writer(row: models.StoreWriterRecord, now: float) -> StoreWriter:
    is_active = row.at > now - store_shares.ACTIVE_SECONDS
    waits = is_active and row.wants > row.started
    return StoreWriter(
        job=row.job, address=row.address, is_active=is_active,
        written_bytes=row.earlier_bytes + row.written_bytes,
        bytes_per_second=row.bytes_per_second if is_active and row.writing else None,
        waiting_bytes=row.waiting_bytes if is_active else 0,
        checkpoint_bytes=row.checkpoint_bytes,
        waits_since=row.wanted_at if waits else None,
        weight=row.weight,
        share_bytes_per_second=row.fair_bytes_per_second,
        rate_limit=row.share_bytes_per_second,
    )  # fmt: skip
