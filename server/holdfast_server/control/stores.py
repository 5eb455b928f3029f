"""The limits of stores that administrators set, and the weights of jobs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast.protocol.stores import MAX_TARGET, NewStoreLimit, NewStoreWeight, StoreLimit
from holdfast.units import format_bytes
from holdfast_server import models
from holdfast_server.core.encoding import answer_from
from holdfast_server.core.errors import InvalidSetting, UnknownJob, UnknownStore
from holdfast_server.db import Database
from holdfast_server.records import audit, store_shares

MOST_LIMITS = 100

_stores, _writers, _limits = models.StoreRecord, models.StoreWriterRecord, models.StoreLimitRecord


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
