"""Restore orders: the states they go through, and who may move them. Every move is made here."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from functools import partial
from typing import Any

from sqlalchemy import and_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast import protocol
from holdfast.protocol import OPEN_ORDER_STATES, OrderState
from holdfast_server import desired, models
from holdfast_server.checkpoints import DURABLE
from holdfast_server.db import Database
from holdfast_server.errors import NotCancellable, OpenOrder, UnknownOrder
from holdfast_server.views import Change, Order, Transition

FROM: dict[OrderState, tuple[OrderState, ...]] = {
    "delivered": ("requested",),
    "restoring": ("requested", "delivered", "cancelled", "expired"),
    "restored": (*OPEN_ORDER_STATES, "cancelled", "expired"),
    "failed": OPEN_ORDER_STATES,
    "cancelled": OPEN_ORDER_STATES,
    "expired": OPEN_ORDER_STATES,
    "superseded": OPEN_ORDER_STATES,
}
"""The states from which each may be reached. Steps may be skipped: an agent that restores at its start
reports what it knows then. Of the states in which an order has ended, only a cancel that came too late, or an
expiry, is overruled: what the agent did is so."""
SERVER = "the server"
TOO_LATE = {"cancelled": "the cancel came too late", "expired": "it was taken up after it had expired"}
EXPIRES_SECONDS = 7 * 86400.0
EXPIRED = "nobody took it up within 7 days"
EXPIRY_EVERY_SECONDS = 3600.0
OUT_OF_REACH = "the attempt that runs is numbered below those that it was meant for"


async def placed_before(session: AsyncSession, job: str, key: str) -> Order | None:
    """The order that this click, or the first half of a double click, has made already."""
    orders = models.RestoreOrder
    row = (await session.scalars(select(orders).where(orders.job == job, orders.key == key))).first()
    return await _as_order(session, row) if row else None


async def place(
    session: AsyncSession, job: models.Job, checkpoint: models.Checkpoint, *, key: str, who: str, now: float
) -> tuple[Order, bool]:
    """The order, and whether it is new: asked twice for the same checkpoint, the job goes there once.

    Raises:
        OpenOrder: the job is on its way to another checkpoint.
    """
    open_order = await desired.open_order(session, job.name)
    current = await session.get(models.Attempt, (job.name, job.uid))
    if open_order is not None and current is not None and current.attempt < open_order.fence:
        if await _move(session, open_order, "superseded", at=now, who=who, reason=OUT_OF_REACH):
            _close(session, job, open_order, who=who, now=now)
        open_order = None
    if open_order is not None:
        order = await _as_order(session, open_order)
        if open_order.checkpoint == checkpoint.id:
            return order, False
        raise OpenOrder(order)
    row = models.RestoreOrder(
        id=uuid.uuid4().hex,
        job=job.name,
        key=key,
        checkpoint=checkpoint.id,
        iteration=checkpoint.iteration,
        state="requested",
        created_at=now,
        who=who,
        fence=current.attempt if current else job.attempt,
        from_iteration=job.iteration,
        from_lineage=job.lineage,
    )
    session.add(row)
    await session.flush()
    session.add(models.OrderTransition(order_id=row.id, state="requested", at=now, who=who))
    desired.bump(
        session,
        job,
        [Change(field=desired.RESTORE, before="", after=f"to {checkpoint.iteration}")],
        who=who,
        now=now,
    )
    await session.flush()
    return await _as_order(session, row), True


async def cancel(session: AsyncSession, job: models.Job, order: str, *, who: str, now: float) -> Order:
    """Raises UnknownOrder, and NotCancellable while the agent restores. Cancelled twice is cancelled."""
    row = await _get(session, job.name, order)
    shown = await _as_order(session, row)
    if shown.cancellable and await _move(session, row, "cancelled", at=now, who=who):
        _close(session, job, row, who=who, now=now)
    elif row.state != "cancelled":
        raise NotCancellable(shown)
    return await _as_order(session, row)


async def report(
    session: AsyncSession, job: models.Job, event: protocol.OrderMoved, *, attempt: int, now: float
) -> None:
    """What an agent says of an order. One that is fenced off, late or of an unknown order changes nothing."""
    row = await session.get(models.RestoreOrder, event.order)
    if row is None or row.job != job.name or attempt < row.fence:
        return
    details: dict[str, Any] = {}
    before, late = row.state, row.state in TOO_LATE
    if late and event.state == "restoring" and await desired.open_order(session, job.name) is not None:
        # Only one order is open at a time; this one is taken up again when it is carried out.
        return
    if event.state == "restoring":
        details |= {"from_iteration": event.iteration, "from_lineage": event.lineage}
    if event.state == "restored":
        details |= {"new_lineage": event.lineage}
    for name in ("reason", "seconds", "safety_checkpoint"):
        if getattr(event, name) is not None:
            details[name] = getattr(event, name)
    if late:
        details["reason"] = TOO_LATE[before]
    if not await _move(session, row, event.state, at=event.at, who=_agent(attempt), **details):
        return
    if late and row.state in OPEN_ORDER_STATES:
        again = Change(field=desired.RESTORE, before=before, after=f"to {row.iteration}")
        desired.bump(session, job, [again], who=desired.AGENT, now=now)
    elif not late and row.state not in OPEN_ORDER_STATES:
        _close(session, job, row, who=desired.AGENT, now=now)


async def expire(db: Database, now: float) -> None:
    """End the orders that nobody took up: a job that starts after weeks should not be taken back by surprise."""
    rows = models.RestoreOrder
    waiting = (rows.state.in_(("requested", "delivered")), rows.created_at < now - EXPIRES_SECONDS)
    async with db.read() as session:
        found = (await session.execute(select(rows.job, rows.id).where(*waiting))).all()
    for job, order in found:
        await db.write(partial(_expire, job=job, order=order, now=now), job=job, at_once=True)


async def _expire(session: AsyncSession, *, job: str, order: str, now: float) -> None:
    row, owner = await session.get(models.RestoreOrder, order), await session.get(models.Job, job)
    if row is None or owner is None or row.state == "restoring":
        return
    if await _move(session, row, "expired", at=now, who=SERVER, reason=EXPIRED):
        _close(session, owner, row, who=SERVER, now=now)


def _agent(attempt: int) -> str:
    return f"{desired.AGENT}, attempt {attempt}"


def _close(session: AsyncSession, job: models.Job, row: models.RestoreOrder, *, who: str, now: float) -> None:
    """What is desired of the job no longer holds the order."""
    ended = Change(field=desired.RESTORE, before=f"to {row.iteration}", after=row.state)
    desired.bump(session, job, [ended], who=who, now=now)


async def _move(
    session: AsyncSession, row: models.RestoreOrder, state: OrderState, *, at: float, who: str, **details: Any
) -> bool:
    """Claim the transition: whoever finds the order in another state by then has lost the race."""
    orders = models.RestoreOrder
    claimed = await session.scalar(
        update(orders)
        .where(orders.id == row.id, orders.state.in_(FROM.get(state, ())))
        .values(state=state, **details)
        .returning(orders.id)
        .execution_options(synchronize_session=False)
    )
    await session.refresh(row)
    if claimed is None:
        return False
    session.add(models.OrderTransition(order_id=row.id, state=state, at=at, who=who, reason=details.get("reason")))
    await session.flush()
    return True


async def _get(session: AsyncSession, job: str, order: str) -> models.RestoreOrder:
    row = await session.get(models.RestoreOrder, order)
    if row is None or row.job != job:
        raise UnknownOrder(job, order)
    return row


async def find(session: AsyncSession, job: str, order: str) -> Order:
    return await _as_order(session, await _get(session, job, order))


async def order_rows(session: AsyncSession, job: str, *, checkpoint: str | None = None, limit: int) -> list[Order]:
    """Newest first; of all, or of those to one checkpoint."""
    orders = models.RestoreOrder
    query = select(orders).where(orders.job == job).order_by(orders.created_at.desc(), orders.id).limit(limit)
    if checkpoint is not None:
        query = query.where(orders.checkpoint == checkpoint)
    return await _as_orders(session, (await session.scalars(query)).all())


async def open_orders(session: AsyncSession, jobs: Iterable[str]) -> dict[str, Order]:
    orders = models.RestoreOrder
    query = select(orders).where(orders.job.in_(list(jobs)), orders.state.in_(OPEN_ORDER_STATES))
    return {order.job: order for order in await _as_orders(session, (await session.scalars(query)).all())}


async def _as_order(session: AsyncSession, row: models.RestoreOrder) -> Order:
    return (await _as_orders(session, [row]))[0]


async def _as_orders(session: AsyncSession, rows: Iterable[models.RestoreOrder]) -> list[Order]:
    rows = list(rows)
    if not rows:
        return []
    moves = models.OrderTransition
    query = select(moves).where(moves.order_id.in_([row.id for row in rows])).order_by(moves.id)
    by_order: dict[str, list[Transition]] = {row.id: [] for row in rows}
    for move in await session.scalars(query):
        by_order[move.order_id].append(
            Transition(state=move.state, at=move.at, who=move.who, reason=move.reason)  # type: ignore[arg-type]
        )
    current = await _current_attempts(session, {row.job for row in rows})
    undoable = await _undoable(session, rows)
    names = [name for name in Order.__struct_fields__ if name not in ("transitions", "cancellable", "undoable")]
    return [
        Order(
            **{name: getattr(row, name) for name in names},
            transitions=by_order[row.id],
            cancellable=_cancellable(row, by_order[row.id], current.get(row.job)),
            undoable=row.id in undoable,
        )
        for row in rows
    ]


async def _undoable(session: AsyncSession, rows: list[models.RestoreOrder]) -> set[str]:
    """Of which the state that was left is still in the store."""
    orders, points = models.RestoreOrder, models.Checkpoint
    safety = and_(points.job == orders.job, points.id == orders.safety_checkpoint, points.state == DURABLE)
    restored = [row.id for row in rows if row.state == "restored"]
    return set(await session.scalars(select(orders.id).join(points, safety).where(orders.id.in_(restored))))


async def _current_attempts(session: AsyncSession, jobs: set[str]) -> dict[str, models.Attempt]:
    attempts, job = models.Attempt, models.Job
    current = and_(job.name == attempts.job, job.uid == attempts.uid)
    query = select(attempts).join(job, current).where(attempts.job.in_(jobs))
    return {attempt.job: attempt for attempt in await session.scalars(query)}


def _cancellable(row: models.RestoreOrder, moves: list[Transition], current: models.Attempt | None) -> bool:
    """Before an attempt restores, and again once that attempt is not there any more to finish it."""
    if row.state != "restoring":
        return row.state in OPEN_ORDER_STATES
    at_it = current is not None and current.finished is None and current.attempt >= row.fence
    return not at_it or current is None or moves[-1].who != _agent(current.attempt)
