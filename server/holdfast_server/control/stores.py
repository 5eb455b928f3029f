"""Stores with the jobs that write to them, and the limits that administrators set."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast.protocol.stores import MAX_TARGET, NewStoreLimit, NewStoreWeight, StoreInfo, StoreLimit, StoreWriter
from holdfast.units import format_bytes
from holdfast_server import models
from holdfast_server.core.encoding import answer_from
from holdfast_server.core.errors import InvalidSetting, UnknownJob, UnknownStore
from holdfast_server.db import Database
from holdfast_server.records import audit, store_disks, store_shares

MOST_LIMITS = 100

_stores, _writers, _limits = models.StoreRecord, models.StoreWriterRecord, models.StoreLimitRecord
_disks = models.StoreDiskRecord


def stores(
    session: Session, *, visible_projects: Collection[str] | None, now: float, only: str | None = None
) -> list[StoreInfo]:
    """Return the stores that the client's jobs write to, those with the highest rate first.

    Args:
        visible_projects: projects whose jobs the client may see; `None` for all.
        now: time of the answer.
        only: id of the store to return alone.

    Raises:
        UnknownStore: there is no store `only`, or the client may not see it.
    """
    query = select(_stores, _disks).outerjoin(_disks, store_disks.is_newest(_stores.id))
    rows = session.execute(query if only is None else query.where(_stores.id == only)).all()
    limits = store_shares.limits_of(session)
    projects: dict[str, str] = {}
    writers: dict[str, list[models.StoreWriterRecord]] = {}
    jobs = models.JobRecord
    joined = select(_writers, jobs.project).join(jobs, jobs.name == _writers.job)
    for row, project in session.execute(joined if only is None else joined.where(_writers.store == only)):
        writers.setdefault(row.store, []).append(row)
        projects[row.job] = project
    answers = []
    for store, disk in rows:
        here = writers.get(store.id, [])
        seen = [row for row in here if visible_projects is None or projects[row.job] in visible_projects]
        if seen or visible_projects is None:
            answers.append(_info(store, disk, here, seen, limits, now))
    if only is not None and not answers:
        raise UnknownStore(only)
    return sorted(answers, key=lambda one: (-one.bytes_per_second, -one.waiting_bytes, one.address))


def _info(
    store: models.StoreRecord,
    disk: models.StoreDiskRecord | None,
    all_here: Sequence[models.StoreWriterRecord],
    seen: Sequence[models.StoreWriterRecord],
    limits: Mapping[str, models.StoreLimitRecord],
    now: float,
) -> StoreInfo:
    target = store_shares.limit_for(store.id, store.address, limits)
    every = [_writer(row, now) for row in all_here]
    shown = {row.job for row in seen}
    listed = sorted(
        (one for one in every if one.job in shown),
        key=lambda one: (-(one.bytes_per_second or 0.0), -one.waiting_bytes, not one.is_active, one.job),
    )
    return answer_from(
        store, StoreInfo,
        free_bytes=disk.free_bytes if disk else None,
        total_bytes=disk.total_bytes if disk else None,
        free_at=disk.at if disk else None,
        limit=None if target is None else answer_from(limits[target], StoreLimit),
        bytes_per_second=sum(one.bytes_per_second or 0.0 for one in every),
        waiting_bytes=sum(one.waiting_bytes for one in every),
        written_bytes=sum(one.written_bytes for one in every),
        writers=listed,
        hidden_writers=len(every) - len(listed),
    )  # fmt: skip


def _writer(row: models.StoreWriterRecord, now: float) -> StoreWriter:
    is_active = now - row.at < store_shares.ACTIVE_SECONDS
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


def of_job(session: Session, job: str, *, now: float) -> list[tuple[str, StoreWriter]]:
    """Return what a job writes, with the id of each store."""
    rows = session.scalars(select(_writers).where(_writers.job == job).order_by(_writers.address))
    return [(row.store, _writer(row, now)) for row in rows]


def limits(session: Session) -> list[StoreLimit]:
    """Return all limits by target."""
    return [answer_from(row, StoreLimit) for row in store_shares.limits_of(session).values()]


def set_limit(db: Database, asked: NewStoreLimit, *, who: str, now: float) -> StoreLimit:
    """Set a limit, in place of an earlier one for the same target. The jobs get their shares at once.

    Raises:
        InvalidSetting: a rate or time is not valid, or there are `MOST_LIMITS`.
    """
    try:
        rate, fallback, holds = asked.rates()
    except ValueError as error:
        raise InvalidSetting("limit", str(error)) from None
    target = asked.target.strip()
    if target != "/":
        target = target.rstrip("/")
    if not 1 <= len(target) <= MAX_TARGET:
        raise InvalidSetting("target", "give the id of a store, or the address that stores begin with")
    row = {
        "bytes_per_second": rate, "writers": asked.writers, "fallback_bytes_per_second": fallback,
        "holds_seconds": holds,
    }  # fmt: skip
    answer = db.write(partial(_set_limit, target=target, figures=row, who=who, now=now))
    store_shares.divide_now(db, now)
    return answer


def _set_limit(
    session: Session, *, target: str, figures: Mapping[str, float | None], who: str, now: float
) -> StoreLimit:
    row = session.get(_limits, target)
    before = None if row is None else {target: f"{format_bytes(row.bytes_per_second)}/s"}
    if row is None:
        if len(store_shares.limits_of(session)) >= MOST_LIMITS:
            raise InvalidSetting("target", f"there are {MOST_LIMITS} limits already: remove one first")
        row = _limits(target=target)
        session.add(row)
    for name, value in figures.items():
        setattr(row, name, value)
    row.who, row.at = who, now
    session.flush()
    answer = answer_from(row, StoreLimit)
    audit.record(
        session, who=who, action="store.limit", now=now, before=before,
        after={target: f"{format_bytes(row.bytes_per_second)}/s"},
    )  # fmt: skip
    return answer


def remove_limit(db: Database, target: str, *, who: str, now: float) -> None:
    """Remove a limit; one that does not exist is removed already. Jobs write without it at once."""
    db.write(partial(_remove_limit, target=target, who=who, now=now))
    store_shares.divide_now(db, now)


def _remove_limit(session: Session, *, target: str, who: str, now: float) -> None:
    row = session.get(_limits, target)
    if row is None:
        return
    before = {target: f"{format_bytes(row.bytes_per_second)}/s"}
    session.delete(row)
    session.flush()
    audit.record(session, who=who, action="store.limit", now=now, before=before, after={target: None})


def set_weight(db: Database, store: str, asked: NewStoreWeight, *, who: str, now: float) -> None:
    """Set the weight of a job in the division of a limit.

    Raises:
        UnknownStore.
        UnknownJob: the job has not reported that it writes there.
    """
    db.write(partial(_set_weight, store=store, job=asked.job, weight=asked.weight, who=who, now=now))
    store_shares.divide_now(db, now)


def _set_weight(session: Session, *, store: str, job: str, weight: float, who: str, now: float) -> None:
    if session.get(_stores, store) is None:
        raise UnknownStore(store)
    rows = session.scalars(select(_writers).where(_writers.store == store, _writers.job == job)).all()
    if not rows:
        raise UnknownJob(job)
    before = {"weight": rows[0].weight}
    for row in rows:
        row.weight = weight
    session.flush()
    audit.record(
        session, who=who, action="store.weight", now=now, job=job, before=before, after={"weight": weight}
    )
