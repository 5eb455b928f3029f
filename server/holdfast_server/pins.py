"""What operators say of one checkpoint: that it is kept against retention, and what it is called."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast import protocol
from holdfast.answers import Change
from holdfast.protocol import MOST_PINS
from holdfast_server import desired, models
from holdfast_server.checkpoints import DURABLE
from holdfast_server.errors import InvalidSetting, NotPossible

MOST_LABEL = 64
"""Characters."""


async def pin(
    session: AsyncSession, job: models.Job, row: models.Checkpoint, *, pinned: bool, who: str, now: float
) -> bool:
    """Pin or unpin it, and whether that is new. Raises NotPossible, as for one that is not in the store."""
    if pinned == (row.pinned_at is not None):
        return False
    if pinned and row.state != DURABLE:
        raise NotPossible(f"checkpoint {row.id} is {row.state}: one that is durable can be pinned")
    if pinned and len((job.pins or "").split()) >= MOST_PINS:
        raise NotPossible(f"{MOST_PINS} checkpoints of {job.name} are pinned, and no more can be: unpin one first")
    row.pinned_by, row.pinned_at = (who, now) if pinned else (None, None)
    made = Change(field=desired.PIN if pinned else desired.UNPIN, before="", after=row.id)
    await _tell_agent(session, job, made, who=who, now=now)
    return True


async def adopt(session: AsyncSession, job: models.Job, event: protocol.Inventory, *, now: float) -> None:
    """Learn from the store what was pinned by way of a server whose data was deleted, while nobody pins here."""
    if job.pins is not None or not event.pinned:
        return
    rows = models.Checkpoint
    query = select(rows).where(rows.job == job.name, rows.id.in_(event.pinned[:MOST_PINS]))
    for row in await session.scalars(query):
        row.pinned_by, row.pinned_at = desired.AGENT, event.at
    made = Change(field=desired.PIN, before="", after="as in the store")
    await _tell_agent(session, job, made, who=desired.AGENT, now=now)


async def _tell_agent(session: AsyncSession, job: models.Job, made: Change, *, who: str, now: float) -> None:
    rows = models.Checkpoint
    await session.flush()
    query = select(rows.id).where(rows.job == job.name, rows.pinned_at.is_not(None)).order_by(rows.id)
    job.pins = " ".join(await session.scalars(query))
    desired.bump(session, job, [made], who=who, now=now)


def parse_label(label: str | None) -> str | None:
    """Raises InvalidSetting for one that is too long, or that has what nobody can read."""
    label = (label or "").strip()
    if len(label) > MOST_LABEL:
        raise InvalidSetting("label", f"a label has at most {MOST_LABEL} characters, and this one {len(label)}")
    if not label.isprintable():
        raise InvalidSetting("label", "a label is one line of text: leave out line breaks and control characters")
    return label or None
