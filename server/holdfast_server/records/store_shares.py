"""Stores, what jobs write to them, and the division of limits, which jobs get with their desired state.

A division is one transaction that locks the limits, so that of several instances one divides at a time.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from weakref import WeakSet

from sqlalchemy import bindparam, or_, select, update
from sqlalchemy.orm import Session

from holdfast.protocol.store_shares import StoreReport, StoreShare
from holdfast_server import models
from holdfast_server.db import Database, DatabaseBusy, DatabaseUnavailable, Statement, insert
from holdfast_server.records import store_disks
from holdfast_server.records.share_division import Assignment, Limit, Writer, divide, earned_after

logger = logging.getLogger(__name__)

EVERY_SECONDS = 5.0
SILENT_SECONDS = 60.0
"""A job that has not reported for this long gets no share."""
WRITING_SECONDS = 20.0
"""A write without a report for this long has ended: an agent reports every few seconds while it writes."""
ACTIVE_SECONDS = 150.0
"""A job that has not reported a store for this long does not write there now."""
NOTED_RATIO = 1.05
"""Factor by which a figure changes before a job is informed of it."""
Key = tuple[str, str]
"""Job, and address of the store as the job reports it."""

_writers, _limits, _jobs = models.StoreWriterRecord, models.StoreLimitRecord, models.JobRecord
_SHARES = Statement(
    select(
        _writers.address,
        _writers.share_bytes_per_second,
        _writers.granted,
        _writers.holds_seconds,
        _writers.fallback_bytes_per_second,
        _writers.longest_wait_seconds,
    )
    .where(_writers.job == bindparam("job"), _writers.share_bytes_per_second.is_not(None))
    .order_by(_writers.address)
)
_waiting: WeakSet[Database] = WeakSet()
"""Databases for which a division waits that no thread has begun."""
_ANY_LIMIT = Statement(select(_limits.target).limit(1))


_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")


def store_id(event: StoreReport) -> str:
    """Return the id of a store; without one it is made from the address, with the host for a directory."""
    name = event.address if "://" in event.address else f"{event.host}:{event.address}"
    is_sound = _ID.fullmatch(event.store) is not None
    return event.store if is_sound else blake2b(name.encode(), digest_size=16).hexdigest()


def record(session: Session, job: str, uid: str, event: StoreReport, *, now: float) -> None:
    """Store the current attempt's report on a store, with the time on the server's clock."""
    store = store_id(event)
    facts = {"address": event.address, "host": event.host, "at": now}
    made = insert(session, models.StoreRecord).values(id=store, **facts)
    session.execute(made.on_conflict_do_update(index_elements=["id"], set_=facts))
    store_disks.record(session, store, event, now=now)
    row = session.get(_writers, (job, event.address))
    if row is None:
        row = _writers(
            job=job, address=event.address, uid=uid, written_bytes=0, earlier_bytes=0, started=0, wants=0,
            granted=0, number=0, weight=1.0, writing=False,
        )  # fmt: skip
        session.add(row)
    if row.uid != uid:  # requests of a new attempt count from 1
        row.earlier_bytes += row.written_bytes
        row.uid, row.wants, row.started, row.granted = uid, 0, 0, 0
        row.wanted_at = row.granted_at = None
    if event.wants > row.wants:
        row.wanted_at = now
    if event.started > row.started or (event.writing and not row.writing):
        row.earned_at = earned_after(row.earned_at, row.fair_bytes_per_second, event.checkpoint_bytes, now=now)
    row.store, row.at, row.written_bytes = store, now, event.written_bytes
    row.bytes_per_second, row.waiting_bytes, row.writing = (
        event.bytes_per_second, event.waiting_bytes, event.writing,
    )  # fmt: skip
    row.checkpoint_bytes, row.interval_seconds = event.checkpoint_bytes, event.interval_seconds
    row.wants, row.started = event.wants, event.started


def shares_of(session: Session, job: str) -> tuple[StoreShare, ...]:
    """Return a job's shares of stores with a limit."""
    found = _SHARES.all(session.connection(), {"job": job})
    return tuple(
        StoreShare(
            address=address, bytes_per_second=rate, granted=granted, holds_seconds=holds,
            fallback_bytes_per_second=fallback, longest_wait_seconds=longest,
        )
        for address, rate, granted, holds, fallback, longest in found
    )  # fmt: skip


# ---- limits ---------------------------------------------------------------------------------------


def limit_for(store: str, address: str, limits: Mapping[str, models.StoreLimitRecord]) -> str | None:
    """Return the target of the limit for a store: its own, else that of the longest address it is below."""
    if store in limits:
        return store
    above = [target for target in limits if is_below(address, target)]
    return max(above, key=len, default=None)


def is_below(address: str, target: str) -> bool:
    """Return whether an address is a target or below it."""
    return address == target or address.startswith(target.rstrip("/") + "/")


# ---- division -------------------------------------------------------------------------------------


def divide_all(session: Session, *, now: float) -> dict[str, int]:
    """Divide all limits among the jobs that write now; return the new number of each job that gets another share.

    Jobs without a limit lose theirs.
    """
    limits = {
        row.target: row for row in session.scalars(select(_limits).order_by(_limits.target).with_for_update())
    }
    attempts = models.AttemptRecord
    query = (
        select(_writers, _jobs.last_contact_at, _jobs.uid, _jobs.share_number, attempts.finished)
        .join(_jobs, _jobs.name == _writers.job)
        .outerjoin(attempts, (attempts.job == _jobs.name) & (attempts.uid == _jobs.uid))
        .where(
            or_(
                _jobs.last_contact_at > now - SILENT_SECONDS,
                _writers.share_bytes_per_second.is_not(None),
                _writers.number > _jobs.share_number,
            )
        )
        .order_by(_writers.job, _writers.address)
        .execution_options(populate_existing=True)
    )
    groups: dict[str, dict[Key, models.StoreWriterRecord]] = {}
    numbers: dict[str, int] = {}
    for row, last_contact_at, uid, number, finished in session.execute(query):
        target = limit_for(row.store, row.address, limits)
        is_there = row.uid == uid and finished is None and now - last_contact_at < SILENT_SECONDS
        if target is not None and is_there:
            groups.setdefault(target, {})[row.job, row.address] = row
        elif row.share_bytes_per_second is not None:
            _forget(row, now)
        if row.number > number:  # also one that could not be announced before
            numbers[row.job] = max(row.number, numbers.get(row.job, 0))
    for target, rows in groups.items():
        limit = limits[target]
        writers = {f"{job}\0{address}": _writer(row, now) for (job, address), row in rows.items()}
        assigned = divide(_limit(limit), writers, now=now)
        for (job, address), row in rows.items():
            if _assign(row, assigned[f"{job}\0{address}"], limit.holds_seconds, now):
                numbers[job] = max(row.number, numbers.get(job, 0))
    return numbers


def _writer(row: models.StoreWriterRecord, now: float) -> Writer:
    is_writing = row.writing and now - row.at < WRITING_SECONDS
    waits = row.wants > max(row.granted, row.started)
    unused = row.granted > row.started
    return Writer(
        weight=row.weight, checkpoint_bytes=row.checkpoint_bytes, interval_seconds=row.interval_seconds,
        is_writing=is_writing, wanted_at=row.wanted_at if waits else None, earned_at=row.earned_at,
        granted_at=row.granted_at if unused and not is_writing else None,
    )  # fmt: skip


def _limit(row: models.StoreLimitRecord) -> Limit:
    return Limit(
        bytes_per_second=row.bytes_per_second, writers=row.writers,
        fallback_bytes_per_second=row.fallback_bytes_per_second, holds_seconds=row.holds_seconds,
    )  # fmt: skip


def _assign(row: models.StoreWriterRecord, assigned: Assignment, holds_seconds: float, now: float) -> bool:
    """Store a job's share; return whether the job must be notified."""
    row.fair_bytes_per_second = assigned.fair_bytes_per_second
    rate = assigned.bytes_per_second
    if rate is None:  # it applies to the next checkpoint, which gets one of its own
        rate = row.share_bytes_per_second or assigned.fallback_bytes_per_second
    figures = {
        "share_bytes_per_second": rate, "fallback_bytes_per_second": assigned.fallback_bytes_per_second,
        "longest_wait_seconds": assigned.longest_wait_seconds, "holds_seconds": holds_seconds,
    }  # fmt: skip
    changed = {name: value for name, value in figures.items() if _differs(getattr(row, name), value)}
    for name, value in changed.items():
        setattr(row, name, value)
    if assigned.is_granted:
        row.granted, row.granted_at = row.wants, now
    if changed or assigned.is_granted:
        row.number = _next_number(row.number, now)
    return bool(changed) or assigned.is_granted


def _forget(row: models.StoreWriterRecord, now: float) -> None:
    row.share_bytes_per_second = row.fair_bytes_per_second = row.fallback_bytes_per_second = None
    row.number = _next_number(row.number, now)


def _next_number(number: int, now: float) -> int:
    """Return a larger number, also than those of the job's other stores."""
    return max(number + 1, int(now * 1000))


def _differs(before: float | None, after: float) -> bool:
    return before is None or not before / NOTED_RATIO <= after <= before * NOTED_RATIO


def announce(session: Session, *, job: str, number: int) -> None:
    """Have the job's agent read its shares, as the commit of this notifies it."""
    session.execute(
        update(_jobs).where(_jobs.name == job, _jobs.share_number < number).values(share_number=number)
    )


def has_limits(db: Database) -> bool:
    """Return whether an operator has set any limit."""
    with db.read() as session:
        return _ANY_LIMIT.first(session.connection(), {}) is not None


def are_limited(db: Database, reports: Sequence[StoreReport]) -> bool:
    """Return whether a limit applies to one of these stores."""
    with db.read() as session:
        limits = limits_of(session)
    return any(limit_for(store_id(each), each.address, limits) is not None for each in reports)


async def follow_reports(db: Database, reports: Sequence[StoreReport], *, now: float) -> None:
    """Divide again after reports that are stored, if limits apply; failing that, the background job does.

    Reports that arrive while a division waits for its turn are part of it.
    """
    try:
        if db in _waiting or not await db.ask("agents", partial(are_limited, db, reports)):
            return
        if db in _waiting:  # another report has requested it meanwhile
            return
        _waiting.add(db)
        try:
            numbers = await db.stored(partial(_divide_next, db=db, now=now), at_once=True)
        finally:
            _waiting.discard(db)
        await asyncio.gather(
            *(db.stored(partial(announce, job=job, number=n), job=job, at_once=True) for job, n in numbers.items())
        )
    except (DatabaseBusy, DatabaseUnavailable) as error:
        logger.info("could not divide the limits of stores among jobs: %s", error)


def _divide_next(session: Session, *, db: Database, now: float) -> dict[str, int]:
    _waiting.discard(db)  # reports that are stored from now on need another division
    return divide_all(session, now=now)


def divide_now(db: Database, now: float) -> None:
    """Divide all limits, and inform the jobs."""
    numbers = db.write(partial(divide_all, now=now))
    pending = [
        db.submit(partial(announce, job=job, number=n), job=job, at_once=True) for job, n in numbers.items()
    ]
    for each in pending:
        each.result()


def divide_regularly(db: Database, now: float) -> None:
    """Divide for jobs that ended or fell silent."""
    with db.read() as session:
        shared = session.scalar(select(_writers.job).where(_writers.share_bytes_per_second.is_not(None)).limit(1))
    if shared is not None or has_limits(db):
        divide_now(db, now)


def limits_of(session: Session) -> dict[str, models.StoreLimitRecord]:
    return {row.target: row for row in session.scalars(select(_limits).order_by(_limits.target))}


def writers_of(session: Session, stores: Iterable[str]) -> Sequence[models.StoreWriterRecord]:
    query = select(_writers).where(_writers.store.in_(list(stores))).order_by(_writers.job, _writers.address)
    return session.scalars(query).all()
