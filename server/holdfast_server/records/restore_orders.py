"""Restore orders: requests of operators, reports of agents, and timeouts. `order_transitions` has the states."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import msgspec
from sqlalchemy import and_, select, update
from sqlalchemy.orm import Session

from holdfast.protocol import wire
from holdfast.protocol.jobs import Order, OrderStep
from holdfast.protocol.wire import OPEN_ORDER_STATES
from holdfast.units import duration
from holdfast_server import models
from holdfast_server.core.encoding import answer_from
from holdfast_server.core.errors import InvalidSetting, NotCancellable, OpenOrder, UnknownOrder
from holdfast_server.db import Database, named_jobs
from holdfast_server.records import desired_state
from holdfast_server.records.checkpoints import DURABLE
from holdfast_server.records.desired_state import SERVER, StoredChange
from holdfast_server.records.job_status import SILENT_AFTER_SECONDS, current_attempts
from holdfast_server.records.order_transitions import (
    OVERRULED,
    TOO_LATE,
    AttemptBegan,
    Cause,
    Concluded,
    LineageBegan,
    Reported,
    next_state,
)

EXPIRES_SECONDS = 7 * 86400.0
"""Default lifetime of an order: a job that starts later must not be restored by surprise."""
LEAST_EXPIRES_SECONDS, MOST_EXPIRES_SECONDS = 1.0, 30 * 86400.0
OUT_OF_REACH = "the running attempt has a lower number than the attempts that the order is for"
EVERY_SECONDS = 5.0
POLICY = "policy"
"""Actor of the restores that a job's rule `on_trouble` carries out."""


CurrentAttempts = Mapping[str, models.AttemptRecord | None]

_orders = models.RestoreOrderRecord
_OPEN_ORDERS = select(_orders).where(_orders.job.in_(named_jobs()), _orders.state.in_(OPEN_ORDER_STATES))


def _move(
    session: Session, job: models.JobRecord, row: models.RestoreOrderRecord, cause: Cause, *,
    at: float, who: str, now: float, reason: str | None = None, **details: Any,
) -> bool:  # fmt: skip
    """Move an order as a cause requires; return whether this call moved it, and not a concurrent one.

    `at`: time of the cause. `details`: other columns. Without a `reason`, the reason for overruling stays.
    """
    before, state = row.state, next_state(row, cause)
    if state is None:
        return False
    if before in OVERRULED:
        details["overruled_state"], reason = before, OVERRULED[before]
    elif reason is None and row.overruled_state is not None and state not in TOO_LATE:
        reason = OVERRULED[row.overruled_state]  # type: ignore[index]
    orders = models.RestoreOrderRecord
    claimed = session.scalar(
        update(orders)
        .where(orders.id == row.id, orders.state == before)
        .values(state=state, reason=reason, **details)
        .returning(orders.id)
        .execution_options(synchronize_session=False)
    )
    session.refresh(row)
    if claimed is None:
        return False
    session.add(models.OrderTransitionRecord(order_id=row.id, state=state, at=at, who=who, reason=reason))
    session.flush()
    was_open, is_open = before in OPEN_ORDER_STATES, state in OPEN_ORDER_STATES
    if was_open != is_open:
        changed = StoredChange(
            field="restore",
            iteration=row.iteration,
            before=None if was_open else before,
            after=state if was_open else None,
        )
        by = desired_state.AGENT if isinstance(cause, Reported | LineageBegan) else who
        desired_state.add_version(session, job, [changed], who=by, now=now)
    return True


# ---- requests of operators --------------------------------------------------------------------------


def find_by_key(session: Session, job: str, key: str) -> Order | None:
    """Return the order that an earlier request with this key placed; None if there is none."""
    orders = models.RestoreOrderRecord
    row = session.scalars(select(orders).where(orders.job == job, orders.key == key)).first()
    return _as_order(session, row) if row else None


def place(
    session: Session,
    job: models.JobRecord,
    checkpoint: models.CheckpointRecord,
    *,
    key: str,
    who: str,
    now: float,
    expires_seconds: float | None = None,
    degraded: bool = False,
    skip: wire.DataSkip | None = None,
) -> tuple[Order, bool]:
    """Place an order, or find the open order for the same checkpoint; return it and whether it is new.

    Raises:
        OpenOrder: an order for another checkpoint is open.
        InvalidSetting: the lifetime is out of range.
    """
    seconds = EXPIRES_SECONDS if expires_seconds is None else expires_seconds
    if not LEAST_EXPIRES_SECONDS <= seconds <= MOST_EXPIRES_SECONDS:
        raise InvalidSetting("expires_seconds", f"an order expires after 1 s to 30 days, not after {seconds:g} s")
    open_order = desired_state.open_order(session, job.name)
    if open_order is not None and desired_state.is_expired(open_order, now):
        expire(session, job, open_order, now=now)
        open_order = None
    current = session.get(models.AttemptRecord, (job.name, job.uid))
    if open_order is not None and current is not None and current.attempt < open_order.fence:
        cause = Concluded("superseded")
        _move(session, job, open_order, cause, at=now, who=who, now=now, reason=OUT_OF_REACH)
        open_order = None
    if open_order is not None:
        order = _as_order(session, open_order)
        if (open_order.checkpoint, open_order.degraded, order.skip) == (checkpoint.id, degraded, skip):
            return order, False
        raise OpenOrder(order)
    row = models.RestoreOrderRecord(
        id=uuid.uuid4().hex,
        job=job.name,
        key=key,
        checkpoint=checkpoint.id,
        iteration=checkpoint.iteration,
        state="requested",
        created_at=now,
        who=who,
        fence=current.attempt if current else job.attempt,
        expires_at=now + seconds,
        from_iteration=job.iteration,
        from_lineage=job.lineage,
        degraded=degraded,
        skip=None if skip is None else msgspec.json.encode(skip).decode(),
    )
    session.add(row)
    session.flush()
    session.add(models.OrderTransitionRecord(order_id=row.id, state="requested", at=now, who=who))
    desired_state.add_version(
        session, job, [StoredChange(field="restore", iteration=row.iteration)], who=who, now=now
    )
    session.flush()
    return _as_order(session, row), True


def cancel(session: Session, job: models.JobRecord, order: str, *, who: str, now: float) -> Order:
    """Cancel an order; a cancelled one stays cancelled.

    Raises:
        UnknownOrder.
        NotCancellable: the agent restores, or the order has ended.
    """
    row = _get(session, job.name, order)
    shown = _as_order(session, row)
    cause = Concluded("cancelled")
    ended = shown.cancellable and _move(session, job, row, cause, at=now, who=who, now=now)
    if not ended and row.state != "cancelled":
        raise NotCancellable(shown)
    return _as_order(session, row)


# ---- reports of agents ----------------------------------------------------------------------------


def report(
    session: Session, job: models.JobRecord, event: wire.OrderStateChange, *, attempt: int, now: float
) -> None:
    """Apply an agent's report of an order; one from a fenced attempt, late, or of an unknown order is ignored."""
    row = session.get(models.RestoreOrderRecord, event.order)
    if row is None or row.job != job.name:
        return
    if row.state == event.state == "restored" and attempt >= row.fence:  # its lineage has shown it already
        row.seconds = event.seconds if row.seconds is None else row.seconds
        row.safety_checkpoint = row.safety_checkpoint or event.safety_checkpoint
        return
    late = row.state in TOO_LATE and event.state == "restoring"
    current = session.get(models.AttemptRecord, (job.name, job.uid)) if late else None
    cause = Reported(
        event.state,
        attempt,
        newest_attempt=current.attempt if current else 0,
        other_open=late and desired_state.open_order(session, job.name) is not None,
    )
    details: dict[str, Any] = {"taken_by_attempt": max(attempt, row.taken_by_attempt or 0)}
    if event.state == "restoring" and event.iteration:  # a start reports 0: it has not loaded anything yet
        details |= {"from_iteration": event.iteration, "from_lineage": event.lineage}
    if event.state == "restored":
        details |= {"new_lineage": event.lineage}
    for name in ("seconds", "safety_checkpoint"):
        if getattr(event, name) is not None:
            details[name] = getattr(event, name)
    reason = event.reason
    if reason is None and row.state == event.state == "restoring":
        reason = f"attempt {row.taken_by_attempt} did not finish it"
    who = _agent(attempt)
    _move(session, job, row, cause, at=event.at, who=who, now=now, reason=reason, **details)


def record_lineage(
    session: Session, job: models.JobRecord, event: wire.LineageStarted, *, attempt: int, now: float
) -> None:
    """Apply a report of a lineage, which an order may have begun."""
    row = session.get(models.RestoreOrderRecord, event.order) if event.order is not None else None
    if row is None and event.order is not None and event.trouble is not None and event.parent is not None:
        _record_of_policy(session, job, event, attempt=attempt)
    if row is None or row.job != job.name:
        return
    failed_at = None
    if row.state == "failed":
        moves = models.OrderTransitionRecord
        failed = select(moves.at).where(moves.order_id == row.id, moves.state == "failed")
        failed_at = session.scalar(failed.order_by(moves.id.desc()).limit(1))
    taken_by_attempt = max(attempt, row.taken_by_attempt or 0)
    details: dict[str, Any] = {"new_lineage": event.lineage, "taken_by_attempt": taken_by_attempt}
    if event.left is not None:
        details["safety_checkpoint"] = event.left
    cause = LineageBegan(attempt, event.at, failed_at)
    _move(session, job, row, cause, at=event.at, who=_agent(attempt), now=now, **details)


def _record_of_policy(
    session: Session, job: models.JobRecord, event: wire.LineageStarted, *, attempt: int
) -> None:
    """Record a restore that the job's rule `on_trouble` has carried out, without a request."""
    left_out = [each for each in event.left_out if each.iteration == event.iteration][-1:]
    skips = [wire.DataSkip(batches=each.batches or None, loader=each.loader) for each in left_out]
    row = models.RestoreOrderRecord(
        id=event.order, job=job.name, key=event.order, checkpoint=event.parent, iteration=event.iteration,
        state="restored", created_at=event.at, who=POLICY, fence=attempt, expires_at=None,
        taken_by_attempt=attempt, from_iteration=job.iteration, from_lineage=job.lineage,
        new_lineage=event.lineage, safety_checkpoint=event.left,
        reason=f"the loss was wrong from iteration {event.trouble:,} on",
        skip=msgspec.json.encode(skips[0]).decode() if skips else None,
    )  # fmt: skip
    session.add(row)
    session.flush()
    session.add(
        models.OrderTransitionRecord(order_id=row.id, state="restored", at=event.at, who=POLICY, reason=row.reason)
    )


def end_stale(session: Session, job: models.JobRecord, *, attempt: int, now: float) -> None:
    """End the open order, as an attempt starts, if an earlier attempt started it too late or it has expired."""
    row = desired_state.open_order(session, job.name)
    if row is not None:
        late = "" if row.overruled_state in TOO_LATE else " in time"
        reason = f"attempt {row.taken_by_attempt} did not finish it{late}"
        _move(session, job, row, AttemptBegan(attempt, now), at=now, who=SERVER, now=now, reason=reason)


def mark_unknown(session: Session, job: models.JobRecord, *, attempt: int, now: float, reason: str) -> None:
    """Mark the order that an attempt was carrying out as unknown, because the attempt ended without a result."""
    row = desired_state.open_order(session, job.name)
    if row is not None and row.state == "restoring" and row.taken_by_attempt == attempt:
        _move(session, job, row, Concluded("unknown"), at=now, who=SERVER, now=now, reason=reason)


# ---- timeouts ------------------------------------------------------------------------------------


def check_timeouts(db: Database, now: float) -> None:
    """Expire overdue open orders, and track whether the agents that carry one out are silent."""
    rows = models.RestoreOrderRecord
    with db.read() as session:
        query = select(rows, models.JobRecord).join(models.JobRecord, models.JobRecord.name == rows.job)
        found = session.execute(query.where(rows.state.in_(OPEN_ORDER_STATES))).all()
    for order, job in found:
        if desired_state.is_expired(order, now) or order.state in ("restoring", "unknown"):
            check = partial(_check_timeout, order=order.id, job=job.name, now=now)
            db.write(check, job=job.name, at_once=True)


def _check_timeout(session: Session, *, order: str, job: str, now: float) -> None:
    row, owner = session.get(models.RestoreOrderRecord, order), session.get(models.JobRecord, job)
    if row is None or owner is None or expire(session, owner, row, now=now):
        return
    silent_seconds = now - owner.last_contact_at
    silent = silent_seconds > SILENT_AFTER_SECONDS  # an agent reports at least every 10 s, even while it restores
    if row.state == "restoring" and silent:
        reason = f"no contact with attempt {row.taken_by_attempt} for {duration(round(silent_seconds))}"
        _move(session, owner, row, Concluded("unknown"), at=now, who=SERVER, now=now, reason=reason)
    elif row.state == "unknown" and not silent:
        current = session.get(models.AttemptRecord, (job, owner.uid))
        if current is not None and current.finished is None and current.attempt == row.taken_by_attempt:
            reason = f"attempt {row.taken_by_attempt} reports again"
            _move(session, owner, row, Concluded("restoring"), at=now, who=SERVER, now=now, reason=reason)


def expire(session: Session, job: models.JobRecord, row: models.RestoreOrderRecord, *, now: float) -> bool:
    """End an expired order; return whether this call ended it."""
    if not desired_state.is_expired(row, now):
        return False
    what = "no further report of it" if row.state == "unknown" else "no attempt started it"
    reason = f"{what} within {duration(round((row.expires_at or now) - row.created_at))}"
    return _move(session, job, row, Concluded("expired"), at=now, who=SERVER, now=now, reason=reason)


def _agent(attempt: int) -> str:
    return f"{desired_state.AGENT}, attempt {attempt}"


def _get(session: Session, job: str, order: str) -> models.RestoreOrderRecord:
    row = session.get(models.RestoreOrderRecord, order)
    if row is None or row.job != job:
        raise UnknownOrder(job, order)
    return row


def find(session: Session, job: str, order: str) -> Order:
    return _as_order(session, _get(session, job, order))


def order_rows(
    session: Session,
    job: str,
    *,
    checkpoint: str | None = None,
    limit: int,
    current: CurrentAttempts | None = None,
) -> list[Order]:
    """Return the orders of a job, or those to one checkpoint, newest first. `current`: as of `open_orders`."""
    orders = models.RestoreOrderRecord
    query = select(orders).where(orders.job == job).order_by(orders.created_at.desc(), orders.id).limit(limit)
    if checkpoint is not None:
        query = query.where(orders.checkpoint == checkpoint)
    return _as_orders(session, session.scalars(query).all(), current)


def open_orders(session: Session, jobs: Iterable[str], *, current: CurrentAttempts) -> dict[str, Order]:
    """Return the open orders by job. `current`: the current attempts of the jobs, by job."""
    rows = session.scalars(_OPEN_ORDERS, {"jobs": list(jobs)}).all()
    return {order.job: order for order in _as_orders(session, rows, current)}


def _as_order(session: Session, row: models.RestoreOrderRecord) -> Order:
    return _as_orders(session, [row])[0]


def _as_orders(
    session: Session, rows: Iterable[models.RestoreOrderRecord], current: CurrentAttempts | None = None
) -> list[Order]:
    if not (rows := list(rows)):
        return []
    moves = models.OrderTransitionRecord
    query = select(moves).where(moves.order_id.in_([row.id for row in rows])).order_by(moves.id)
    by_order: dict[str, list[OrderStep]] = {row.id: [] for row in rows}
    for move in session.scalars(query):
        by_order[move.order_id].append(answer_from(move, OrderStep))
    restoring = {row.job for row in rows if row.state == "restoring"}
    if current is None:
        current = current_attempts(session, list(restoring)) if restoring else {}
    undoable = _undoable(session, rows)
    return [
        answer_from(
            row,
            Order,
            transitions=by_order[row.id],
            cancellable=_cancellable(row, by_order[row.id], current.get(row.job)),
            undoable=row.id in undoable,
            skip=desired_state.skip_of_order(row),
        )
        for row in rows
    ]


def _undoable(session: Session, rows: list[models.RestoreOrderRecord]) -> set[str]:
    """Return the ids of the orders whose safety checkpoint is still in the store."""
    orders, points = models.RestoreOrderRecord, models.CheckpointRecord
    safety = and_(points.job == orders.job, points.id == orders.safety_checkpoint, points.state == DURABLE)
    restored = [row.id for row in rows if row.state == "restored"]
    if not restored:
        return set()
    return set(session.scalars(select(orders.id).join(points, safety).where(orders.id.in_(restored))))


def _cancellable(
    row: models.RestoreOrderRecord, moves: list[OrderStep], current: models.AttemptRecord | None
) -> bool:
    """Return whether an order may be cancelled: not while a live attempt carries it out."""
    if row.state != "restoring":
        return row.state in OPEN_ORDER_STATES
    at_it = current is not None and current.finished is None and current.attempt >= row.fence
    return not at_it or current is None or moves[-1].who != _agent(current.attempt)
