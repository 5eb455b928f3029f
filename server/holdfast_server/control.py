"""What operators want. The pages and the HTTP API call these, and hold no rule of their own."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncSession

from holdfast import protocol
from holdfast_server import checkpoints, models, orders
from holdfast_server import desired as wanted
from holdfast_server.checkpoints import DURABLE, ancestry_of, as_row
from holdfast_server.db import Database
from holdfast_server.errors import InvalidSetting, NoSuchCheckpoint, NotRestorable
from holdfast_server.previews import preview_restore as preview_restore
from holdfast_server.previews import preview_settings as preview_settings
from holdfast_server.samples import MAX_ITERATION
from holdfast_server.summaries import find_job
from holdfast_server.views import CheckpointRow, DesiredChanges, Order

MAX_KEY = 200


async def desired(db: Database, job: str) -> protocol.Desired:
    """Nothing, for a job that has not reported yet: an agent may ask before its first batch."""
    async with db.read() as session:
        row = await session.get(models.Job, job)
        return await wanted.read(session, row) if row else protocol.Desired()


async def edit(
    db: Database, job: str, changes: DesiredChanges, *, version: int | None, who: str, now: float
) -> protocol.Desired:
    """Change what is desired, from the version that the editor was looking at; None asks for no check.

    Raises:
        UnknownJob, InvalidSetting.
        Conflict: somebody changed a setting since. A restore that came or went is no setting.
    """

    async def work(session: AsyncSession) -> protocol.Desired:
        row = await find_job(session, job)
        if version is not None:
            await wanted.check_version(session, row, version)
        made = wanted.change(row, changes)
        wanted.bump(session, row, made, who=who, now=now)
        await session.flush()
        return await wanted.read(session, row)

    return await db.write(work, job=job)


async def order_restore(
    db: Database, job: str, *, checkpoint: str | None, iteration: int | None, key: str, who: str, now: float
) -> Order:
    """Order a job back to a checkpoint, or to the one at an iteration.

    Raises:
        UnknownJob.
        InvalidSetting: among others for a key that an order to another checkpoint has.
        NoSuchCheckpoint: with the nearest earlier one, which is offered and never taken.
        NotRestorable: it is known, and damaged, missing or not durable yet.
        OpenOrder: the job is on its way to another checkpoint.
    """
    order, _ = await place_restore(db, job, checkpoint=checkpoint, iteration=iteration, key=key, who=who, now=now)
    return order


async def place_restore(
    db: Database, job: str, *, checkpoint: str | None, iteration: int | None, key: str, who: str, now: float
) -> tuple[Order, bool]:
    """`order_restore`, saying too whether the order is new."""
    if not 1 <= len(key) <= MAX_KEY:
        raise InvalidSetting("key", f"an idempotency key has 1 to {MAX_KEY} characters")

    async def work(session: AsyncSession) -> tuple[Order, bool]:
        row = await find_job(session, job)
        known = await orders.placed_before(session, job, key)
        if known is not None:
            _same_wish(known, checkpoint, iteration)
            return known, False
        chosen = await _choose(session, row, checkpoint, iteration)
        return await orders.place(session, row, chosen, key=key, who=who, now=now)

    return await db.write(work, job=job)


def _same_wish(known: Order, checkpoint: str | None, iteration: int | None) -> None:
    same = iteration in (None, known.iteration) if checkpoint is None else checkpoint == known.checkpoint
    if not same:
        other = checkpoint or f"iteration {iteration}"
        reason = f"this key is the order to {known.checkpoint} already: give the one to {other} a key of its own"
        raise InvalidSetting("key", reason)


async def cancel_restore(db: Database, job: str, order: str, *, who: str, now: float) -> Order:
    """Raises UnknownJob, UnknownOrder, and NotCancellable while the agent restores or when the order has ended."""

    async def work(session: AsyncSession) -> Order:
        return await orders.cancel(session, await find_job(session, job), order, who=who, now=now)

    return await db.write(work, job=job)


async def checkpoint_at(db: Database, job: str, iteration: int) -> CheckpointRow:
    """What a restore to this iteration would go back to. Raises NoSuchCheckpoint with the nearest earlier one."""
    async with db.read() as session:
        row = await find_job(session, job)
        return as_row(await _at(session, row, iteration), await ancestry_of(session, row))


async def _choose(
    session: AsyncSession, job: models.Job, checkpoint: str | None, iteration: int | None
) -> models.Checkpoint:
    if checkpoint is not None:
        row = await checkpoints.find(session, job, checkpoint)
        if row.state != DURABLE:
            reason = f": {row.reason}" if row.reason else ""
            raise NotRestorable(f"checkpoint {checkpoint} is {row.state}{reason}")
        return row
    if iteration is not None:
        return await _at(session, job, iteration)
    raise InvalidSetting("iteration", "say where to go back to: an iteration, or the id of a checkpoint")


async def _at(session: AsyncSession, job: models.Job, iteration: int) -> models.Checkpoint:
    if not 0 <= iteration <= MAX_ITERATION:
        raise InvalidSetting("iteration", f"iteration {iteration} is outside 0 to {MAX_ITERATION}")
    ancestry = await ancestry_of(session, job)
    found = await checkpoints.at_or_before(session, job.name, ancestry, iteration)
    if found is None or found.iteration != iteration:
        raise NoSuchCheckpoint(iteration, as_row(found, ancestry) if found else None)
    return found
