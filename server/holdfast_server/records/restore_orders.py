"""Restore orders: the states they go through, and who may move them. Every move is made here."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

from sqlalchemy import Select, and_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.protocol import messages
from holdfast.protocol.jobs import Order, Transition
from holdfast.protocol.messages import OPEN_ORDER_STATES, OrderState
from holdfast_server import models
from holdfast_server.core.errors import InvalidSetting, NotCancellable, OpenOrder, UnknownOrder
from holdfast_server.db import Database, named_jobs
from holdfast_server.records import desired_state
from holdfast_server.records.checkpoints import DURABLE
from holdfast_server.records.desired_state import SERVER, Changed
from holdfast_server.records.job_status import SILENT_AFTER_SECONDS

TOO_LATE: dict[OrderState, str] = {
    "cancelled": "the cancel came too late", "expired": "it was taken up after it had expired",
}  # fmt: skip
OVERRULED: dict[OrderState, str] = {
    **TOO_LATE, "failed": "an attempt before this one had failed to, and could not say so in time",
}  # fmt: skip
"""Why an order has been carried out that was over, by the state in which it was."""
EXPIRES_SECONDS = 7 * 86400.0
"""After which a job that starts should not be taken back by surprise; who orders may say otherwise."""
LEAST_EXPIRES_SECONDS, MOST_EXPIRES_SECONDS = 1.0, 30 * 86400.0
OUT_OF_REACH = "the attempt that runs is numbered below those that it was meant for"
EVERY_SECONDS = 5.0
LOST_AFTER_SECONDS = SILENT_AFTER_SECONDS
"""An agent is heard of every second, while it restores too."""

FROM: dict[OrderState, tuple[OrderState, ...]] = {
    "requested": (),
    "delivered": ("requested",),
    "restoring": ("requested", "delivered", "restoring", "unknown", "cancelled", "expired"),
    "unknown": ("restoring",),
    "restored": (*OPEN_ORDER_STATES, "cancelled", "expired", "failed"),
    "failed": OPEN_ORDER_STATES,
    "cancelled": OPEN_ORDER_STATES,
    "expired": OPEN_ORDER_STATES,
    "superseded": OPEN_ORDER_STATES,
}
"""The states from which each may be reached. Steps may be skipped: an agent that restores at its start reports
what it knows then. What the agent did stands: it overrules a cancel or an expiry that came too late, and a failure
that one attempt could not report before the next had carried the order out."""


@dataclass(frozen=True, slots=True)
class Reported:
    """An agent reports what it does with the order."""

    state: OrderState
    attempt: int
    newest_attempt: int
    other_open: bool
    """Another order of the job is open."""


@dataclass(frozen=True, slots=True)
class LineageBegan:
    """A lineage that the order began: it was carried out, though who did may not have lived to report it."""

    attempt: int
    at: float
    failed_at: float | None
    """When the order was last reported as failed."""


@dataclass(frozen=True, slots=True)
class AttemptBegan:
    """An attempt trains without the order that one before it had taken up."""

    attempt: int
    now: float


@dataclass(frozen=True, slots=True)
class Concluded:
    """The server or an operator ends the order, or the server loses or regains contact with who carries it out."""

    state: Literal["cancelled", "expired", "superseded", "unknown", "restoring"]


Cause = Reported | LineageBegan | AttemptBegan | Concluded


def transition(order: models.RestoreOrderRecord, cause: Cause) -> OrderState | None:
    """The state to which a cause moves an order; None: it changes nothing."""
    wanted = _wanted_state(order, cause)
    return wanted if wanted is not None and order.state in FROM[wanted] else None


def _wanted_state(order: models.RestoreOrderRecord, cause: Cause) -> OrderState | None:
    taken_by = order.taken_by or 0
    match cause:
        case Concluded(state):
            return state
        case AttemptBegan(attempt, now):
            # Had the one before come to its end, the lineage that it began would have been reported by now.
            if order.state not in ("restoring", "unknown") or taken_by >= attempt:
                return None
            if order.overruled in TOO_LATE:
                return order.overruled
            return "expired" if order.expires_at is not None and order.expires_at <= now else None
        case Reported(attempt=attempt) | LineageBegan(attempt=attempt) if attempt < order.fence:
            return None
        case LineageBegan(attempt, at, failed_at):
            # A restore that failed has begun a lineage before that, too, which the next start reports.
            after = attempt > taken_by and failed_at is not None and at > failed_at
            return "restored" if order.state != "failed" or after else None
        case Reported("restored", attempt):
            # One before the attempt that took it up may still report that: it has noted it in the store.
            return "restored" if order.state != "failed" or attempt > taken_by else None
        case Reported(attempt=attempt) if attempt < taken_by:
            return None
        case Reported("restoring", attempt) if order.state == "restoring":
            return None if attempt == taken_by else "restoring"
        case Reported("restoring", attempt) if order.state in TOO_LATE:
            # One order is open at a time, and an attempt that is over would have reported its lineage.
            return None if cause.other_open or attempt < cause.newest_attempt else "restoring"
        case Reported(state):
            return state


async def _move(
    session: AsyncSession, job: models.JobRecord, row: models.RestoreOrderRecord, cause: Cause, *,
    at: float, who: str, now: float, reason: str | None = None, **details: Any,
) -> bool:  # fmt: skip
    """Make the transition, and whether it was this that did: who finds the order moved meanwhile is too late.

    `at`: when it came to be so. `details`: other columns. Without a `reason`, an overruled end stays the reason.
    """
    before, state = row.state, transition(row, cause)
    if state is None:
        return False
    if before in OVERRULED:
        details["overruled"], reason = before, OVERRULED[before]
    elif reason is None and row.overruled is not None and state not in TOO_LATE:
        reason = OVERRULED[row.overruled]  # type: ignore[index]
    orders = models.RestoreOrderRecord
    claimed = await session.scalar(
        update(orders)
        .where(orders.id == row.id, orders.state == before)
        .values(state=state, reason=reason, **details)
        .returning(orders.id)
        .execution_options(synchronize_session=False)
    )
    await session.refresh(row)
    if claimed is None:
        return False
    session.add(models.OrderTransitionRecord(order_id=row.id, state=state, at=at, who=who, reason=reason))
    await session.flush()
    was_open, is_open = before in OPEN_ORDER_STATES, state in OPEN_ORDER_STATES
    if was_open != is_open:
        told = {"after": state} if was_open else {"before": before}
        changed = Changed(field="restore", iteration=row.iteration, **told)
        by = desired_state.AGENT if isinstance(cause, Reported | LineageBegan) else who
        desired_state.bump(session, job, [changed], who=by, now=now)
    return True


# ---- what operators ask ---------------------------------------------------------------------------


async def placed_before(session: AsyncSession, job: str, key: str) -> Order | None:
    """The order that this click, or the first half of a double click, has made already."""
    orders = models.RestoreOrderRecord
    row = (await session.scalars(select(orders).where(orders.job == job, orders.key == key))).first()
    return await _as_order(session, row) if row else None


async def place(
    session: AsyncSession,
    job: models.JobRecord,
    checkpoint: models.CheckpointRecord,
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
    seconds = EXPIRES_SECONDS if expires_seconds is None else expires_seconds
    if not LEAST_EXPIRES_SECONDS <= seconds <= MOST_EXPIRES_SECONDS:
        raise InvalidSetting("expires_seconds", f"{seconds:g} s is no time for an order: from 1 s to 30 days")
    open_order = await desired_state.open_order(session, job.name)
    if open_order is not None and desired_state.is_expired(open_order, now):
        await expire(session, job, open_order, now=now)
        open_order = None
    current = await session.get(models.AttemptRecord, (job.name, job.uid))
    if open_order is not None and current is not None and current.attempt < open_order.fence:
        cause = Concluded("superseded")
        await _move(session, job, open_order, cause, at=now, who=who, now=now, reason=OUT_OF_REACH)
        open_order = None
    if open_order is not None:
        order = await _as_order(session, open_order)
        if open_order.checkpoint == checkpoint.id:
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
    )
    session.add(row)
    await session.flush()
    session.add(models.OrderTransitionRecord(order_id=row.id, state="requested", at=now, who=who))
    desired_state.bump(session, job, [Changed(field="restore", iteration=row.iteration)], who=who, now=now)
    await session.flush()
    return await _as_order(session, row), True


async def cancel(session: AsyncSession, job: models.JobRecord, order: str, *, who: str, now: float) -> Order:
    """Raises UnknownOrder, and NotCancellable while the agent restores. Cancelled twice is cancelled."""
    row = await _get(session, job.name, order)
    shown = await _as_order(session, row)
    cause = Concluded("cancelled")
    ended = shown.cancellable and await _move(session, job, row, cause, at=now, who=who, now=now)
    if not ended and row.state != "cancelled":
        raise NotCancellable(shown)
    return await _as_order(session, row)


# ---- what agents report ---------------------------------------------------------------------------


async def report(
    session: AsyncSession, job: models.JobRecord, event: messages.OrderMoved, *, attempt: int, now: float
) -> None:
    """What an agent reports of an order. One that is fenced off, late or of an unknown order changes nothing."""
    row = await session.get(models.RestoreOrderRecord, event.order)
    if row is None or row.job != job.name:
        return
    if row.state == event.state == "restored" and attempt >= row.fence:  # as its lineage has shown already
        row.seconds = event.seconds if row.seconds is None else row.seconds
        row.safety_checkpoint = row.safety_checkpoint or event.safety_checkpoint
        return
    late = row.state in TOO_LATE and event.state == "restoring"
    current = await session.get(models.AttemptRecord, (job.name, job.uid)) if late else None
    cause = Reported(
        event.state,
        attempt,
        newest_attempt=current.attempt if current else 0,
        other_open=late and await desired_state.open_order(session, job.name) is not None,
    )
    details: dict[str, Any] = {"taken_by": max(attempt, row.taken_by or 0)}
    if event.state == "restoring":
        details |= {"from_iteration": event.iteration, "from_lineage": event.lineage}
    if event.state == "restored":
        details |= {"new_lineage": event.lineage}
    for name in ("seconds", "safety_checkpoint"):
        if getattr(event, name) is not None:
            details[name] = getattr(event, name)
    reason = event.reason
    if reason is None and row.state == event.state == "restoring":
        reason = f"attempt {row.taken_by} did not finish it"
    who = _agent(attempt)
    await _move(session, job, row, cause, at=event.at, who=who, now=now, reason=reason, **details)


async def note(
    session: AsyncSession, job: models.JobRecord, event: messages.LineageStarted, *, attempt: int, now: float
) -> None:
    """A lineage that an order began."""
    row = await session.get(models.RestoreOrderRecord, event.order) if event.order is not None else None
    if row is None or row.job != job.name:
        return
    failed_at = None
    if row.state == "failed":
        moves = models.OrderTransitionRecord
        failed = (
            select(moves.at).where(moves.order_id == row.id, moves.state == "failed").order_by(moves.id.desc())
        )
        failed_at = await session.scalar(failed.limit(1))
    details: dict[str, Any] = {"new_lineage": event.lineage, "taken_by": max(attempt, row.taken_by or 0)}
    if event.left is not None:
        details["safety_checkpoint"] = event.left
    cause = LineageBegan(attempt, event.at, failed_at)
    await _move(session, job, row, cause, at=event.at, who=_agent(attempt), now=now, **details)


async def take_back(session: AsyncSession, job: models.JobRecord, *, attempt: int, now: float) -> None:
    """An attempt begins: an order that the one before had taken up too late, or whose time is over, ends."""
    row = await desired_state.open_order(session, job.name)
    if row is not None:
        reason = f"attempt {row.taken_by} did not finish it" + ("" if row.overruled in TOO_LATE else " in time")
        await _move(session, job, row, AttemptBegan(attempt, now), at=now, who=SERVER, now=now, reason=reason)


async def lose_open(
    session: AsyncSession, job: models.JobRecord, *, attempt: int, now: float, reason: str
) -> None:
    """An attempt has ended: what it was carrying out, it has not reported how that went."""
    row = await desired_state.open_order(session, job.name)
    if row is not None and row.state == "restoring" and row.taken_by == attempt:
        await _move(session, job, row, Concluded("unknown"), at=now, who=SERVER, now=now, reason=reason)


# ---- what time does -------------------------------------------------------------------------------


async def watch(db: Database, now: float) -> None:
    """Move the open orders that nobody takes up in time, or whose agent falls silent or is heard of again."""
    rows = models.RestoreOrderRecord
    async with db.read() as session:
        query = select(rows, models.JobRecord).join(models.JobRecord, models.JobRecord.name == rows.job)
        found = (await session.execute(query.where(rows.state.in_(OPEN_ORDER_STATES)))).all()
    for order, job in found:
        if desired_state.is_expired(order, now) or order.state in ("restoring", "unknown"):
            await db.write(partial(_look_at, order=order.id, job=job.name, now=now), job=job.name, at_once=True)


async def _look_at(session: AsyncSession, *, order: str, job: str, now: float) -> None:
    row, owner = await session.get(models.RestoreOrderRecord, order), await session.get(models.JobRecord, job)
    if row is None or owner is None or await expire(session, owner, row, now=now):
        return
    silent_seconds = now - owner.last_contact_at
    silent = silent_seconds > LOST_AFTER_SECONDS
    if row.state == "restoring" and silent:
        reason = f"nothing is heard of attempt {row.taken_by} for {spell(silent_seconds)}"
        await _move(session, owner, row, Concluded("unknown"), at=now, who=SERVER, now=now, reason=reason)
    elif row.state == "unknown" and not silent:
        current = await session.get(models.AttemptRecord, (job, owner.uid))
        if current is not None and current.finished is None and current.attempt == row.taken_by:
            reason = f"attempt {row.taken_by} is heard of again"
            await _move(session, owner, row, Concluded("restoring"), at=now, who=SERVER, now=now, reason=reason)


async def expire(
    session: AsyncSession, job: models.JobRecord, row: models.RestoreOrderRecord, *, now: float
) -> bool:
    """End an order whose time is over. Whether it was this that did."""
    if not desired_state.is_expired(row, now):
        return False
    what = "nothing more was heard of it" if row.state == "unknown" else "nobody took it up"
    reason = f"{what} within {spell((row.expires_at or now) - row.created_at)}"
    return await _move(session, job, row, Concluded("expired"), at=now, who=SERVER, now=now, reason=reason)


def spell(seconds: float) -> str:
    """A time as people say it: 7 days, 90 minutes."""
    units = ((86400, "day"), (3600, "hour"), (60, "minute"))
    size, unit = next((each for each in units if seconds >= 2 * each[0]), (1, "second"))
    count = round(seconds / size)
    return f"{count} {unit}" + ("" if count == 1 else "s")


def _agent(attempt: int) -> str:
    return f"{desired_state.AGENT}, attempt {attempt}"


async def _get(session: AsyncSession, job: str, order: str) -> models.RestoreOrderRecord:
    row = await session.get(models.RestoreOrderRecord, order)
    if row is None or row.job != job:
        raise UnknownOrder(job, order)
    return row


async def find(session: AsyncSession, job: str, order: str) -> Order:
    return await _as_order(session, await _get(session, job, order))


async def order_rows(session: AsyncSession, job: str, *, checkpoint: str | None = None, limit: int) -> list[Order]:
    """Newest first; of all, or of those to one checkpoint."""
    orders = models.RestoreOrderRecord
    query = select(orders).where(orders.job == job).order_by(orders.created_at.desc(), orders.id).limit(limit)
    if checkpoint is not None:
        query = query.where(orders.checkpoint == checkpoint)
    return await _as_orders(session, (await session.scalars(query)).all())


async def open_orders(session: AsyncSession, jobs: Iterable[str]) -> dict[str, Order]:
    rows = (await session.scalars(_of_open_orders(), {"jobs": list(jobs)})).all()
    return {order.job: order for order in await _as_orders(session, rows)}


@cache
def _of_open_orders() -> Select[models.RestoreOrderRecord]:
    orders = models.RestoreOrderRecord
    return select(orders).where(orders.job.in_(named_jobs()), orders.state.in_(OPEN_ORDER_STATES))


async def _as_order(session: AsyncSession, row: models.RestoreOrderRecord) -> Order:
    return (await _as_orders(session, [row]))[0]


async def _as_orders(session: AsyncSession, rows: Iterable[models.RestoreOrderRecord]) -> list[Order]:
    if not (rows := list(rows)):
        return []
    moves = models.OrderTransitionRecord
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


async def _undoable(session: AsyncSession, rows: list[models.RestoreOrderRecord]) -> set[str]:
    """Of which the state that was left is still in the store."""
    orders, points = models.RestoreOrderRecord, models.CheckpointRecord
    safety = and_(points.job == orders.job, points.id == orders.safety_checkpoint, points.state == DURABLE)
    restored = [row.id for row in rows if row.state == "restored"]
    return set(await session.scalars(select(orders.id).join(points, safety).where(orders.id.in_(restored))))


async def _current_attempts(session: AsyncSession, jobs: set[str]) -> dict[str, models.AttemptRecord]:
    attempts, job = models.AttemptRecord, models.JobRecord
    current = and_(job.name == attempts.job, job.uid == attempts.uid)
    query = select(attempts).join(job, current).where(attempts.job.in_(jobs))
    return {attempt.job: attempt for attempt in await session.scalars(query)}


def _cancellable(
    row: models.RestoreOrderRecord, moves: list[Transition], current: models.AttemptRecord | None
) -> bool:
    """Before an attempt restores, and again once that attempt is not there any more to finish it."""
    if row.state != "restoring":
        return row.state in OPEN_ORDER_STATES
    at_it = current is not None and current.finished is None and current.attempt >= row.fence
    return not at_it or current is None or moves[-1].who != _agent(current.attempt)
