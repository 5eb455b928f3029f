"""The account of a window: sums of hours or days, with what is stored and unsaved now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import msgspec
from sqlalchemy import ColumnElement, Select, case, func, select
from sqlalchemy.orm import Session

from holdfast.protocol.account import (
    LOSS_CAUSES,
    Account,
    AccountKey,
    AccountRow,
    AccountStore,
    AccountWindow,
)
from holdfast_server import models
from holdfast_server.core.settings import Prices
from holdfast_server.queries.account_hours import DAY, FIGURES, HOUR
from holdfast_server.queries.exports import csv_bytes, csv_cell
from holdfast_server.queries.fleet import WATCHED, has_label, unsaved_seconds
from holdfast_server.queries.time_buckets import BUCKETS, MICROSECONDS
from holdfast_server.records import checkpoints, store_disks
from holdfast_server.records.job_status import current_attempt, status_in_sql

WINDOWS: dict[AccountWindow, tuple[int, int]] = {"24h": (HOUR, DAY), "7d": (DAY, 7 * DAY), "30d": (DAY, 30 * DAY)}
"""Length of the periods that a window sums, and of the window."""
KEYS: tuple[AccountKey, ...] = get_args(AccountKey)
MOST_ROWS = 500
TREND_SECONDS = 7 * DAY
"""Least time over which free space is compared."""
TB = 1e12
_MICROSECONDS_AN_HOUR = MICROSECONDS * 3600
_groups, _periods = models.AccountGroupRecord, models.AccountPeriodRecord
_marks = models.AccountJobRecord
_labels = msgspec.json.Decoder(dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountQuery:
    """Window, rows and filter of an account."""

    window: AccountWindow = "24h"
    by: AccountKey = "project"
    project: str | None = None
    owner: str | None = None
    labels: tuple[str, ...] = ()
    """Labels that all match: `name` for any value, or `name: value`."""
    store: str | None = None
    jobs: Select[str] | None = None
    """Query of the names of the jobs; `None`: all, with deleted ones."""
    visible_projects: Collection[str] | None = None
    """Projects that the user may see; `None`: all."""


@dataclass(slots=True)
class _Sums:
    figures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FIGURES, 0))
    jobs: set[str] = field(default_factory=set)
    unsaved: float = 0.0
    stored_bytes: int = 0


@dataclass(slots=True)
class _StoreSums:
    jobs: set[str] = field(default_factory=set)
    stored_bytes: int = 0
    is_estimate: bool = False
    unsized: int = 0
    written_bytes: int = 0
    written_from: float | None = None


class _Stores(dict[str, _StoreSums]):
    """Sums by the id of each store, or by its address where the id is unknown."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        writers = models.StoreWriterRecord
        reported = session.execute(select(writers.job, writers.address, writers.store))
        self._ids = {(job, address): store for job, address, store in reported}
        self.known = {row.id: row for row in session.scalars(select(models.StoreRecord))}
        count = Counter(row.address for row in self.known.values())
        # a path without a scheme may be a disk of another host
        self._by_address = {
            row.address: row.id for row in self.known.values() if count[row.address] == 1 and "://" in row.address
        }

    def of(self, job: str, address: str) -> _StoreSums:
        """Return the sums of the store that a job has at an address: jobs may have other stores there."""
        store = self._ids.get((job, address)) or self._by_address.get(address, address)
        return self.setdefault(store, _StoreSums())


def account(
    session: Session, asked: AccountQuery, prices: Prices, *, now: float, most_rows: int | None = MOST_ROWS
) -> Account:
    """Raises InvalidSetting: a label without a name."""
    seconds, length = WINDOWS[asked.window]
    begins_at = int(now // seconds) * seconds - length
    total, by_key, stores = _Sums(), dict[str, _Sums](), _Stores(session)
    _add_periods(session, asked, total, by_key, stores, seconds, begins_at)
    accounted_at = _add_jobs(session, asked, total, by_key, stores, now=now)
    rows = [_row(name, sums, prices) for name, sums in by_key.items()]
    rows.sort(key=lambda row: (-row.lost, -row.gpu_hours, row.name))
    return Account(
        window=asked.window,
        by=asked.by,
        begins_at=begins_at,
        ends_at=now,
        accounted_at=accounted_at,
        total=_row("", total, prices),
        rows=rows[:most_rows],
        rows_total=len(rows),
        stores=_store_rows(session, stores, prices, begins_at, accounted_at or now),
        gpu_hour_price=prices.gpu_hour,
        tb_month_price=prices.tb_month,
        currency=prices.currency,
    )


# ---- sums -----------------------------------------------------------------------------------------


def _add_periods(
    session: Session,
    asked: AccountQuery,
    total: _Sums,
    by_key: dict[str, _Sums],
    stores: _Stores,
    seconds: int,
    begins_at: int,
) -> None:
    columns = (_groups.job, _groups.project, _groups.owner, _groups.labels, _groups.store)
    first = func.min(case((_periods.written_bytes > 0, _periods.begins_at)))
    query = (
        select(*columns, first, *(func.sum(getattr(_periods, name)) for name in FIGURES))
        .join(_periods, _periods.group_id == _groups.id)
        .where(_groups.last_at >= begins_at, _periods.seconds == seconds, _periods.begins_at >= begins_at)
        .where(*_matching(asked, _groups.job, _groups.project, _groups.owner, _groups.labels, _groups.store))
        .group_by(_groups.id, *columns)
    )
    for job, project, owner, labels, store, written_from, *values in session.execute(query):
        figures = dict(zip(FIGURES, map(int, values), strict=True))
        for sums in (total, *_sums_of(by_key, asked.by, job, project, owner, labels, store)):
            sums.jobs.add(job)
            for name, value in figures.items():
                sums.figures[name] += value
        if written_from is not None:
            one = stores.of(job, store)
            one.written_bytes += figures["written_bytes"]
            one.written_from = min(written_from, written_from if one.written_from is None else one.written_from)


def _add_jobs(
    session: Session,
    asked: AccountQuery,
    total: _Sums,
    by_key: dict[str, _Sums],
    stores: _Stores,
    *,
    now: float,
) -> float | None:
    """Add unsaved work and what is in the stores, and return when the account was last brought up to date."""
    job, attempt = models.JobRecord, models.AttemptRecord
    watched = status_in_sql(now=now).in_(WATCHED)
    columns = (job.name, job.project, attempt.owner, attempt.labels)
    stored = (
        _marks.accounted_at, _marks.store, _marks.stored_bytes, _marks.backing_store, _marks.backing_bytes,
        _marks.is_estimate, _marks.unsized_checkpoints,
    )  # fmt: skip
    query = (
        select(job.iteration, case((watched, job.recent)).label("recent"), attempt.world_size, *columns, *stored)
        .outerjoin(attempt, current_attempt())
        .outerjoin(_marks, _marks.job == job.name)
        .where(*_matching(asked, job.name, job.project, attempt.owner, attempt.labels, _marks.store))
    )
    rows = session.execute(query).all()
    not_ended = select(job.name).outerjoin(attempt, current_attempt()).where(watched)
    durable = checkpoints.last_durable_of_many(session, not_ended)
    for row in rows:
        unsaved = 0.0
        if row.recent is not None:
            unsaved = (unsaved_seconds(row, durable.get(row.name)) or 0.0) * max(1, row.world_size or 1)
        key = (row.name, row.project, row.owner or "", row.labels or "", row.store or "")
        for sums in (total, *_sums_of(by_key, asked.by, *key)):
            sums.unsaved += unsaved
            sums.stored_bytes += row.stored_bytes or 0
        for store, size in ((row.store, row.stored_bytes), (row.backing_store, row.backing_bytes)):
            if store:
                one = stores.of(row.name, store)
                one.jobs.add(row.name)
                one.stored_bytes += size
                one.is_estimate |= row.is_estimate
                one.unsized += row.unsized_checkpoints
    return max((row.accounted_at for row in rows if row.accounted_at is not None), default=None)


def _matching(
    asked: AccountQuery,
    job: Any,
    project: Any,
    owner: Any,
    labels: Any,
    store: Any,
) -> Iterable[ColumnElement[bool]]:
    if asked.visible_projects is not None:
        yield project.in_(asked.visible_projects)
    if asked.project is not None:
        yield project == asked.project
    if asked.owner is not None:
        yield owner == asked.owner
    for label in asked.labels:
        yield has_label(labels, label)
    if asked.store is not None:
        yield store == asked.store
    if asked.jobs is not None:
        yield job.in_(asked.jobs.correlate(None))


def _sums_of(
    by_key: dict[str, _Sums], by: AccountKey, job: str, project: str, owner: str, labels: str, store: str
) -> list[_Sums]:
    """Return the sums of the rows that a job belongs to."""
    match by:
        case "label":
            named = _labels.decode(labels) if labels else {}
            keys = [f"{name}: {value}" if value else name for name, value in named.items()] or [""]
        case _:
            keys = [{"project": project, "owner": owner, "store": store, "job": job}[by]]
    return [by_key.setdefault(key, _Sums()) for key in keys]


# ---- rows -----------------------------------------------------------------------------------------


def _row(name: str, sums: _Sums, prices: Prices) -> AccountRow:
    hours = {bucket: sums.figures[bucket] / _MICROSECONDS_AN_HOUR for bucket in BUCKETS}
    all_hours = sum(sums.figures[bucket] for bucket in BUCKETS) / _MICROSECONDS_AN_HOUR
    saved = sums.figures["saved"] / _MICROSECONDS_AN_HOUR
    return AccountRow(
        name=name,
        jobs=len(sums.jobs),
        gpu_hours=all_hours,
        productive_gpu_hours=hours["productive"],
        lost_gpu_hours={cause: sum(hours[bucket] for bucket in of_it) for cause, of_it in LOSS_CAUSES.items()},
        categories=hours,
        failures=sums.figures["failures"],
        saved_gpu_hours=saved,
        uncompared_failures=sums.figures["uncompared_failures"],
        unsaved_gpu_hours=sums.unsaved / 3600,
        written_bytes=sums.figures["written_bytes"],
        stored_bytes=sums.stored_bytes,
        cost=_times(all_hours, prices.gpu_hour),
        lost_cost=_times(all_hours - hours["productive"], prices.gpu_hour),
        saved_cost=_times(saved, prices.gpu_hour),
        stored_cost=_times(sums.stored_bytes / TB, prices.tb_month),
    )


def _times(amount: float, price: float | None) -> float | None:
    return None if price is None else amount * price


def _store_rows(
    session: Session, stores: _Stores, prices: Prices, begins_at: int, until: float
) -> list[AccountStore]:
    disks = store_disks.since(session, list(stores), min(begins_at, until - TREND_SECONDS))
    rows = []
    for store, sums in stores.items():
        hours = 0.0 if sums.written_from is None else max(until - sums.written_from, 1.0) / 3600
        known, measured = stores.known.get(store), disks.get(store, [])
        newest = measured[-1] if measured else None
        rows.append(
            AccountStore(
                store=known.address if known else store,
                id=known.id if known else None,
                host=known.host if known and "://" not in known.address else "",
                jobs=len(sums.jobs),
                stored_bytes=sums.stored_bytes,
                is_estimate=sums.is_estimate,
                unsized_checkpoints=sums.unsized,
                written_bytes=sums.written_bytes,
                written_bytes_per_hour=sums.written_bytes / hours if hours else 0.0,
                free_bytes=newest.free_bytes if newest else None,
                total_bytes=newest.total_bytes if newest else None,
                free_at=newest.at if newest else None,
                days_until_full=_days_until_full(measured),
                stored_cost=_times(sums.stored_bytes / TB, prices.tb_month),
            )
        )
    return sorted(rows, key=lambda row: (-row.stored_bytes, -row.written_bytes, row.store, row.host))


def _days_until_full(measured: Sequence[models.StoreDiskRecord]) -> float | None:
    if len(measured) < 2:
        return None
    first, last = measured[0], measured[-1]
    if last.at <= first.at or last.free_bytes >= first.free_bytes:
        return None
    return last.free_bytes / (first.free_bytes - last.free_bytes) * (last.at - first.at) / DAY


# ---- CSV ------------------------------------------------------------------------------------------


def account_csv(found: Account) -> bytes:
    """Return a line for each row of the account, with GPU-hours by cause and by category."""
    before = ("jobs", "gpu_hours", "productive_gpu_hours")
    after = (
        "failures", "saved_gpu_hours", "uncompared_failures", "unsaved_gpu_hours", "written_bytes", "stored_bytes",
        "cost", "lost_cost", "saved_cost", "stored_cost",
    )  # fmt: skip
    categories = [name for name in BUCKETS if name != "productive"]
    causes = [f"lost_to_{cause}_gpu_hours" for cause in LOSS_CAUSES]
    lines: list[list[Any]] = [[found.by, *before, *causes, *(f"{name}_gpu_hours" for name in categories), *after]]
    for row in found.rows:
        values = [row.name, *(getattr(row, name) for name in before), *row.lost_gpu_hours.values()]
        values += [row.categories[name] for name in categories]
        values += ["" if (value := getattr(row, name)) is None else value for name in after]
        lines.append([csv_cell(value) for value in values])
    return csv_bytes(lines)
