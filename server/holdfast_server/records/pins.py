"""Pinned checkpoints, which retention keeps: every change of them is a version of the desired state."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.protocol.messages import MAX_PINS, Inventory
from holdfast_server import models
from holdfast_server.core.errors import NotPossible
from holdfast_server.records import desired_state
from holdfast_server.records.desired_state import AGENT, StoredChange

ALERT = "an alert"
"""Author of the pin of a checkpoint that an open alert offers; not a possible name of a user."""


async def pin(
    session: AsyncSession,
    job: models.JobRecord,
    row: models.CheckpointRecord,
    *,
    pinned: bool,
    who: str,
    now: float,
) -> bool:
    """Pin or unpin a checkpoint; return whether that changed anything.

    A person's pin replaces that of an alert, which ends with the alert.

    Raises:
        NotPossible: it is not durable, an open alert keeps it, or the job has as many pins as it may.
    """
    adopted = pinned and row.pinned_by == ALERT != who
    if not pinned and row.pinned_by == ALERT != who:
        raise NotPossible(f"checkpoint {row.id} is kept for an open alert, which offers to restore it")
    if pinned == (row.pinned_at is not None) and not adopted:
        return False
    if pinned and row.state != "durable":
        raise NotPossible(f"checkpoint {row.id} is {row.state}: only a durable checkpoint can be pinned")
    asked = await desired_state.checkpoint_requests(session, [job.name])
    if pinned and not adopted and len(asked.get(job.name, desired_state.NOTHING_ASKED).pins) >= MAX_PINS:
        raise NotPossible(f"{job.name} has {MAX_PINS} pinned checkpoints, the maximum: unpin one first")
    row.pinned_by, row.pinned_at = (who, now) if pinned else (None, None)
    job.pins_known = True
    desired_state.add_version(
        session, job, [StoredChange(field="pin" if pinned else "unpin", after=row.id)], who=who, now=now
    )
    return True


async def adopt_pins(session: AsyncSession, job: models.JobRecord, event: Inventory, *, now: float) -> None:
    """Adopt the pins of the store, set through an earlier database, unless this one has had a pin."""
    if job.pins_known or not event.pinned:
        return
    rows = models.CheckpointRecord
    query = select(rows).where(rows.job == job.name, rows.id.in_(event.pinned[:MAX_PINS]))
    for row in await session.scalars(query):
        row.pinned_by, row.pinned_at = AGENT, event.at
    job.pins_known = True
    desired_state.add_version(
        session, job, [StoredChange(field="pin", after="as in the store")], who=AGENT, now=now
    )
