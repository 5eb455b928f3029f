"""What time does to restore orders: one that nobody takes up ends, one whose agent falls silent is unknown."""

from __future__ import annotations

from functools import partial

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.protocol import OPEN_ORDER_STATES
from holdfast_server import models, orders
from holdfast_server.db import Database
from holdfast_server.desired import is_expired
from holdfast_server.status import SILENT_AFTER_SECONDS

EVERY_SECONDS = 5.0
LOST_AFTER_SECONDS = SILENT_AFTER_SECONDS
"""An agent is heard of every second, while it restores too."""


async def watch(db: Database, now: float) -> None:
    """Move the open orders of which something has become without anybody saying so."""
    rows = models.RestoreOrder
    async with db.read() as session:
        query = select(rows, models.Job).join(models.Job, models.Job.name == rows.job)
        found = (await session.execute(query.where(rows.state.in_(OPEN_ORDER_STATES)))).all()
    for order, job in found:
        if is_expired(order, now) or order.state in ("restoring", "unknown"):
            await db.write(partial(_look_at, order=order.id, job=job.name, now=now), job=job.name, at_once=True)


async def _look_at(session: AsyncSession, *, order: str, job: str, now: float) -> None:
    row, owner = await session.get(models.RestoreOrder, order), await session.get(models.Job, job)
    if row is None or owner is None or await orders.expire(session, owner, row, now=now):
        return
    silent_seconds = now - owner.last_contact_at
    silent = silent_seconds > LOST_AFTER_SECONDS
    if row.state == "restoring" and silent:
        reason = f"nothing is heard of attempt {row.taken_by} for {orders.spell(silent_seconds)}"
        await orders.lose(session, row, now=now, reason=reason)
    elif row.state == "unknown" and not silent:
        current = await session.get(models.Attempt, (job, owner.uid))
        if current is not None and current.finished is None and current.attempt == row.taken_by:
            await orders.resume(session, row, now=now)
