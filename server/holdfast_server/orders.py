"""Restore orders: the states they go through, and who may move them. Every move is made here."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from functools import cache
from typing import Any, cast

from sqlalchemy import Select, and_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast import protocol
from holdfast.answers import Change, Order, Transition
from holdfast.protocol import OPEN_ORDER_STATES, OrderState
from holdfast_server import desired, models
from holdfast_server.checkpoints import DURABLE
from holdfast_server.db import named_jobs
from holdfast_server.errors import InvalidSetting, NotCancellable, OpenOrder, UnknownOrder

FROM: dict[OrderState, tuple[OrderState, ...]] = {
    "delivered": ("requested",),
    "restoring": ("requested", "delivered", "restoring", "unknown", "cancelled", "expired"),
    "unknown": ("restoring",),
    "restored": (*OPEN_ORDER_STATES, "cancelled", "expired", "failed"),
    "failed": OPEN_ORDER_STATES,
    "cancelled": OPEN_ORDER_STATES,
    "expired": ("requested", "delivered", "restoring", "unknown"),
    "superseded": OPEN_ORDER_STATES,
}
"""The states from which each may be reached. Steps may be skipped: an agent that restores at its start
reports what it knows then. Of the states in which an order has ended, only a cancel that came too late, or an
expiry, is overruled, and a failure that one attempt could not tell before the next had carried the order out: what
the agent did is so. One attempt takes over from another what that did not finish."""
SERVER = "the server"
TOO_LATE = {"cancelled": "the cancel came too late", "expired": "it was taken up after it had expired"}
OVERRULED = {**TOO_LATE, "failed": "an attempt before this one had failed to, and could not say so in time"}
"""Why an order has been carried out that was over."""
EXPIRES_SECONDS = 7 * 86400.0
"""After which a job that starts should not be taken back by surprise; who orders may say otherwise."""
LEAST_EXPIRES_SECONDS, MOST_EXPIRES_SECONDS = 1.0, 30 * 86400.0
OUT_OF_REACH = "the attempt that runs is numbered below those that it was meant for"


async def placed_before(session: AsyncSession, job: str, key: str) -> Order | None:
    """The order that this click, or the first half of a double click, has made already."""
    orders = models.RestoreOrder
    row = (await session.scalars(select(orders).where(orders.job == job, orders.key == key))).first()
    return await _as_order(session, row) if row else None


async def place(
    session: AsyncSession,
    job: models.Job,
    checkpoint: models.Checkpoint,
    *,
    key: str,
    who: str,
    now: float,
    expires_seconds: float | None = None,
) -> tuple[Order, bool]:
    """The order, and whether it is new: asked twice for the same checkpoint, the job goes there once.

    Raises:
        OpenOrder: the job is on its way to another checkpoint.
        InvalidSetting: a time that is none.
    """
    seconds = _expiry_seconds(expires_seconds)
    open_order = await desired.open_order(session, job.name)
    if open_order is not None and desired.is_expired(open_order, now):
        await expire(session, job, open_order, now=now)
        open_order = None
    current = await session.get(models.Attempt, (job.name, job.uid))
    if open_order is not None and current is not None and current.attempt < open_order.fence:
        await end(session, job, open_order, "superseded", who=who, now=now, reason=OUT_OF_REACH)
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
        expires_at=now + seconds,
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
    ended = shown.cancellable and await end(session, job, row, "cancelled", who=who, now=now)
    if not ended and row.state != "cancelled":
        raise NotCancellable(shown)
    return await _as_order(session, row)


async def report(
    session: AsyncSession, job: models.Job, event: protocol.OrderMoved, *, attempt: int, now: float
) -> None:
    """What an agent says of an order. One that is fenced off, late or of an unknown order changes nothing.

    An attempt before the one that took the order up may still tell that it went there: it has noted that in the
    store before it was fenced. That it did not, or that it is at it, is no longer so.
    """
    row = await session.get(models.RestoreOrder, event.order)
    if row is None or row.job != job.name or attempt < row.fence:
        return
    if row.state == event.state == "restored":  # as the lineage that it began has told already
        row.seconds = event.seconds if row.seconds is None else row.seconds
        row.safety_checkpoint = row.safety_checkpoint or event.safety_checkpoint
        return
    taken_by = row.taken_by or 0
    if event.state != "restored" and attempt < taken_by:
        return
    details: dict[str, Any] = {"taken_by": max(attempt, taken_by)}
    if row.state == event.state == "restoring":
        if attempt == taken_by:
            return
        details["reason"] = f"attempt {taken_by} did not finish it"
    before, late = row.state, row.state in TOO_LATE
    if before == "failed" and attempt <= taken_by:
        return
    if late and event.state == "restoring" and await desired.open_order(session, job.name) is not None:
        # Only one order is open at a time; this one is taken up again when it is carried out.
        return
    if late and event.state == "restoring" and attempt < await _newest_attempt(session, job):
        return  # it is over, and did not come to its end: it would have noted the lineage
    if event.state == "restoring":
        details |= {"from_iteration": event.iteration, "from_lineage": event.lineage}
    if event.state == "restored":
        details |= {"new_lineage": event.lineage}
    for name in ("reason", "seconds", "safety_checkpoint"):
        if getattr(event, name) is not None:
            details[name] = getattr(event, name)
    if before in OVERRULED:
        details["reason"] = OVERRULED[before]
    if not await _move(session, row, event.state, at=event.at, who=_agent(attempt), **details):
        return
    if late and row.state in OPEN_ORDER_STATES:
        again = Change(field=desired.RESTORE, before=before, after=f"to {row.iteration}")
        desired.bump(session, job, [again], who=desired.AGENT, now=now)
    elif before in OPEN_ORDER_STATES and row.state not in OPEN_ORDER_STATES:
        _close(session, job, row, who=desired.AGENT, now=now)


async def note(
    session: AsyncSession, job: models.Job, event: protocol.LineageStarted, *, attempt: int, now: float
) -> None:
    """A lineage that an order began: so it was carried out, though who did may not have lived to say so."""
    row = await session.get(models.RestoreOrder, event.order) if event.order is not None else None
    if row is None or row.job != job.name or attempt < row.fence:
        return
    if row.state == "failed" and not await _came_after_the_failure(session, row, event, attempt=attempt):
        return
    open_before = row.state in OPEN_ORDER_STATES
    details: dict[str, Any] = {"new_lineage": event.lineage, "taken_by": max(attempt, row.taken_by or 0)}
    if row.state in OVERRULED:
        details["reason"] = OVERRULED[row.state]
    if event.left is not None:
        details["safety_checkpoint"] = event.left
    if await _move(session, row, "restored", at=event.at, who=_agent(attempt), **details) and open_before:
        _close(session, job, row, who=desired.AGENT, now=now)


async def _came_after_the_failure(
    session: AsyncSession, row: models.RestoreOrder, event: protocol.LineageStarted, *, attempt: int
) -> bool:
    """A state that could not be put in place has a lineage from before that, too, which the next start tells."""
    moves = models.OrderTransition
    failed = select(moves.at).where(moves.order_id == row.id, moves.state == "failed").order_by(moves.id.desc())
    at = await session.scalar(failed.limit(1))
    return attempt > (row.taken_by or 0) and at is not None and event.at > at


async def take_back(session: AsyncSession, job: models.Job, *, attempt: int, now: float) -> None:
    """An attempt begins without the order that one before it had taken up: if that was too late it is over again,
    and so it is if its time is over by now.

    Had that one come to its end, the lineage that it began would have been told by now.
    """
    row = await desired.open_order(session, job.name)
    if row is None or row.state not in ("restoring", "unknown") or (row.taken_by or 0) >= attempt:
        return
    moves = models.OrderTransition
    over = select(moves.state).where(moves.order_id == row.id, moves.state.in_(TOO_LATE)).order_by(moves.id.desc())
    state, reason = await session.scalar(over.limit(1)), f"attempt {row.taken_by} did not finish it"
    if state is None and row.expires_at is not None and row.expires_at <= now:
        state, reason = "expired", f"{reason} in time"
    if state is not None:
        await end(session, job, row, cast("OrderState", state), who=SERVER, now=now, reason=reason)


async def expire(session: AsyncSession, job: models.Job, row: models.RestoreOrder, *, now: float) -> bool:
    """End an order whose time is over. Whether it was this that did."""
    if not desired.is_expired(row, now):
        return False
    held = spell((row.expires_at or now) - row.created_at)
    lost = row.state == "unknown"
    reason = f"nothing more was heard of it within {held}" if lost else f"nobody took it up within {held}"
    return await end(session, job, row, "expired", who=SERVER, now=now, reason=reason)


async def lose(session: AsyncSession, row: models.RestoreOrder, *, now: float, reason: str) -> bool:
    """Contact was lost while it was carried out: what became of it is not known until somebody says so."""
    return await _move(session, row, "unknown", at=now, who=SERVER, reason=reason)


async def lose_open(session: AsyncSession, job: str, *, attempt: int, now: float, reason: str) -> None:
    """An attempt has ended: what it was carrying out, it has not said how that went."""
    row = await desired.open_order(session, job)
    if row is not None and row.state == "restoring" and row.taken_by == attempt:
        await lose(session, row, now=now, reason=reason)


async def resume(session: AsyncSession, row: models.RestoreOrder, *, now: float) -> bool:
    """The attempt that was restoring is heard of again, and has not said that it is done."""
    return await _move(
        session, row, "restoring", at=now, who=SERVER, reason=f"attempt {row.taken_by} is heard of again"
    )


async def end(
    session: AsyncSession,
    job: models.Job,
    row: models.RestoreOrder,
    state: OrderState,
    *,
    who: str,
    now: float,
    reason: str | None = None,
) -> bool:
    """Move an order into a state in which it stays; it is no longer wanted then. Whether it was this that did."""
    details = {} if reason is None else {"reason": reason}
    if not await _move(session, row, state, at=now, who=who, **details):
        return False
    _close(session, job, row, who=who, now=now)
    return True


def spell(seconds: float) -> str:
    """A time as people say it: 7 days, 90 minutes."""
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute"), (1, "second")):
        if seconds >= 2 * size or unit == "second":
            count = round(seconds / size)
            return f"{count} {unit}" + ("" if count == 1 else "s")
    raise AssertionError("the last unit fits everything")


def _expiry_seconds(wanted: float | None) -> float:
    if wanted is None:
        return EXPIRES_SECONDS
    if not LEAST_EXPIRES_SECONDS <= wanted <= MOST_EXPIRES_SECONDS:
        raise InvalidSetting("expires_seconds", f"{wanted:g} s is no time for an order: from 1 s to 30 days")
    return wanted


def _agent(attempt: int) -> str:
    return f"{desired.AGENT}, attempt {attempt}"


def _close(session: AsyncSession, job: models.Job, row: models.RestoreOrder, *, who: str, now: float) -> None:
    """What is desired of the job no longer holds the order."""
    ended = Change(field=desired.RESTORE, before=f"to {row.iteration}", after=row.state)
    desired.bump(session, job, [ended], who=who, now=now)


async def _move(
    session: AsyncSession, row: models.RestoreOrder, state: OrderState, *, at: float, who: str, **details: Any
) -> bool:
    """Claim the transition: whoever finds the order in another state by then has lost the race.

    The order shows why it is where it is; that a cancel came too late, to its end.
    """
    orders = models.RestoreOrder
    details.setdefault("reason", row.reason if row.reason in OVERRULED.values() else None)
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
    session.add(models.OrderTransition(order_id=row.id, state=state, at=at, who=who, reason=details["reason"]))
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
    rows = (await session.scalars(_of_open_orders(), {"jobs": list(jobs)})).all()
    return {order.job: order for order in await _as_orders(session, rows)}


@cache
def _of_open_orders() -> Select[models.RestoreOrder]:
    orders = models.RestoreOrder
    return select(orders).where(orders.job.in_(named_jobs()), orders.state.in_(OPEN_ORDER_STATES))


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


async def _newest_attempt(session: AsyncSession, job: models.Job) -> int:
    current = await session.get(models.Attempt, (job.name, job.uid))
    return 0 if current is None else current.attempt


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
