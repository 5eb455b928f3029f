"""One checkpoint: what it comes from, what came of it, and what was wanted of the job when it was taken."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.answers import CheckpointRow, CheckpointStory, Edit, LineageRow, Order
from holdfast.protocol import MOST_RANKS_TOLD, parse_checkpoint_id
from holdfast_server import checkpoints, desired, models, orders, verifications
from holdfast_server.checkpoints import DURABLE, as_lineage, as_row
from holdfast_server.db import Database
from holdfast_server.summaries import find_job

ORDERS_TOLD = 20


async def story(db: Database, job: str, checkpoint: str) -> CheckpointStory:
    """Raises UnknownJob, NoSuchCheckpoint with the nearest earlier one, and InvalidSetting for what is no id."""
    async with db.read() as session:
        row = await find_job(session, job)
        found = await checkpoints.find(session, row, checkpoint)
        here = await checkpoints.ancestry_of(session, row)
        lines = await _lines(session, job, here.upto)
        return CheckpointStory(
            checkpoint=as_row(found, here, ranks=MOST_RANKS_TOLD),
            lineage=_descent(lines, found.lineage),
            begun_here=[line for line in lines.values() if line.parent == found.id],
            orders=await _orders(session, job, found.id),
            before=await _neighbour(session, found, later=False),
            after=await _neighbour(session, found, later=True),
            edit=await _edit(session, found),
            verification=await verifications.find(session, job, found.id),
        )


async def _lines(session: AsyncSession, job: str, upto: dict[int, int]) -> dict[int, LineageRow]:
    return {row.lineage: as_lineage(row, upto) for row in await checkpoints.lineages_of(session, job)}


def _descent(lines: dict[int, LineageRow], number: int) -> list[LineageRow]:
    found: list[LineageRow] = []
    while (line := lines.get(number)) is not None and line not in found:
        found.append(line)
        number = parse_checkpoint_id(line.parent)[1] if line.parent else 0
    return found


async def _orders(session: AsyncSession, job: str, checkpoint: str) -> list[Order]:
    return await orders.order_rows(session, job, checkpoint=checkpoint, limit=ORDERS_TOLD)


async def _neighbour(session: AsyncSession, point: models.Checkpoint, *, later: bool) -> CheckpointRow | None:
    rows = models.Checkpoint
    query = select(rows).where(rows.job == point.job, rows.lineage == point.lineage, rows.state == DURABLE)
    if later:
        query = query.where(rows.iteration > point.iteration).order_by(rows.iteration)
    else:
        query = query.where(rows.iteration < point.iteration).order_by(rows.iteration.desc())
    found = (await session.scalars(query.limit(1))).first()
    if found is None:
        return None
    row = await session.get(models.Job, point.job)
    assert row is not None
    return as_row(found, await checkpoints.ancestry_of(session, row))


async def _edit(session: AsyncSession, point: models.Checkpoint) -> Edit | None:
    """By the clock: checkpoints tell no version."""
    versions = models.SettingsVersion
    query = (
        select(versions)
        .where(versions.job == point.job, versions.who != desired.AGENT)
        .where(versions.applied_at <= (point.snapshot_started_at or point.at))
        .order_by(versions.version.desc())
        .limit(1)
    )
    found = (await session.scalars(query)).first()
    return None if found is None else desired.as_edit(found)
