"""What operators want. The pages and the HTTP API call these, and hold no rule of their own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
from msgspec import UNSET
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.protocol import messages
from holdfast.protocol.jobs import (
    BulkOutcome,
    CheckpointChanges,
    CheckpointRow,
    DesiredChanges,
    JobNumbers,
    NumberChanges,
    Order,
    Tensors,
    Verification,
)
from holdfast.protocol.messages import MAX_ATTEMPT, MAX_LINEAGE, OPEN_ORDER_STATES
from holdfast_server import models
from holdfast_server.core.errors import InvalidSetting, NotPossible, NotRestorable, Refused, UnknownJob
from holdfast_server.core.principal import Principal, Role
from holdfast_server.db import Database
from holdfast_server.queries.summaries import find_job
from holdfast_server.records import audit, checkpoints, restore_orders, verifications
from holdfast_server.records import desired_state as wanted
from holdfast_server.records.ancestry import ancestry_of
from holdfast_server.records.checkpoints import DURABLE, as_row

MAX_KEY = 200
MOST_LABEL = 64
"""Characters."""
MOST_JOBS = 200
"""Changed at once."""


async def desired(db: Database, job: str, *, now: float) -> messages.Desired:
    """Nothing, for a job that has not reported yet: an agent may ask before its first batch."""
    async with db.read() as session:
        row = await session.get(models.JobRecord, job)
        return await wanted.read(session, row, now=now) if row else messages.Desired()


async def edit(
    db: Database, job: str, changes: DesiredChanges, *, version: int | None, who: str, now: float
) -> messages.Desired:
    """Change what is desired, from the version that the editor was looking at; None asks for no check.

    Raises:
        UnknownJob, InvalidSetting.
        Conflict: somebody changed a setting since. A restore that came or went is no setting.
    """

    async def work(session: AsyncSession) -> messages.Desired:
        row = await find_job(session, job)
        if version is not None:
            await wanted.check_version(session, row, version)
        await wanted.record_edit(session, row, changes, who=who, now=now)
        return await wanted.read(session, row, now=now)

    return await db.write(work, job=job, at_once=True)


async def undo(
    db: Database, job: str, edit_version: int, *, version: int, who: str, now: float
) -> messages.Desired:
    """Take one edit back, from the version that the editor was looking at.

    Raises:
        UnknownJob, Conflict.
        InvalidSetting: there is no such edit, or nothing of it that can be taken back.
    """
    async with db.read() as session:
        row = await find_job(session, job)
        found = await session.get(models.SettingsVersionRecord, (job, edit_version))
        if found is None:
            raise InvalidSetting(
                "edit", f"nothing was changed in version {edit_version}; the newest is {row.version}"
            )
        back = wanted.reversal(found, now=now)
    return await edit(db, job, back, version=version, who=who, now=now)


async def set_budgets(
    db: Database, jobs: Sequence[str], budget: float | str | None, *, asker: Principal, now: float
) -> list[BulkOutcome]:
    """What became of each, in their order. None: back to the script's own.

    Raises:
        InvalidSetting: no job, or too many. What one job refuses is its own outcome.
    """
    names = list(dict.fromkeys(jobs))
    if not 1 <= len(names) <= MOST_JOBS:
        raise InvalidSetting(
            "jobs", f"{len(names)} jobs are selected: from 1 to {MOST_JOBS} can be changed at once"
        )
    return [await _set_budget(db, job, budget, asker=asker, now=now) for job in names]


async def _set_budget(
    db: Database, job: str, budget: float | str | None, *, asker: Principal, now: float
) -> BulkOutcome:
    try:
        await _require_operator(db, job, asker)
        changes = DesiredChanges(budget=budget)
        made = await edit(db, job, changes, version=None, who=asker.name, now=now)
    except Refused as refusal:
        return BulkOutcome(job=job, version=None, refusal=str(refusal))
    return BulkOutcome(job=job, version=made.version, refusal="")


async def _require_operator(db: Database, job: str, asker: Principal) -> None:
    """UnknownJob, as for a job that is not there, to those who may not see it."""
    async with db.read() as session:
        row = await session.get(models.JobRecord, job)
    role = None if row is None else asker.role_in(row.project)
    if row is None or role is None:
        raise UnknownJob(job)
    if role < Role.operator:
        raise Refused(f"you may see {job}, and not change it")


async def set_numbers(db: Database, job: str, changes: NumberChanges, *, who: str, now: float) -> JobNumbers:
    """Set the largest attempt and lineage numbers known of a job, after a report with wrong ones.

    Attempts beyond are numbered down to the largest, so that they fence none; the last of the others is the
    current one again. What was reported of lineages beyond stays, and counts for no number.

    Raises:
        UnknownJob.
        InvalidSetting: nothing is given, or a number out of its bounds.
    """
    given = {name: value for name, value in msgspec.structs.asdict(changes).items() if value is not UNSET}
    if not given:
        raise InvalidSetting("", "nothing to change: give latest_attempt, latest_lineage or both")
    for name, value in given.items():
        most = MAX_ATTEMPT if name == "latest_attempt" else MAX_LINEAGE
        if not 0 <= value <= most:
            raise InvalidSetting(name, f"{name} {value} is outside 0 to {most}")

    async def work(session: AsyncSession) -> JobNumbers:
        row = await find_job(session, job)
        before = JobNumbers(latest_attempt=row.attempt, latest_lineage=row.latest_lineage)
        attempt, lineage = (
            given.get("latest_attempt", row.attempt),
            given.get("latest_lineage", row.latest_lineage),
        )
        attempts = models.AttemptRecord
        beyond = (attempts.job == job, attempts.attempt > attempt)
        current = await session.get(attempts, (job, row.uid))
        if current is not None and (current.attempt > attempt or row.lineage > lineage):
            if current.attempt > attempt:
                own = select(attempts).where(attempts.job == job, attempts.attempt <= attempt)
                newest = own.order_by(attempts.attempt.desc(), attempts.started_at.desc()).limit(1)
                current = (await session.scalars(newest)).first() or current
            row.uid = current.uid
            # Until the next report says where the job is.
            row.iteration, row.lineage = current.last_iteration, min(current.lineage, lineage)
            row.sequence = row.samples_sequence = -1
        await session.execute(update(attempts).where(*beyond).values(attempt=attempt))
        row.attempt, row.latest_lineage = attempt, lineage
        await checkpoints.forget_who_spoke(session, job)
        await session.flush()
        after = JobNumbers(latest_attempt=attempt, latest_lineage=lineage)
        await audit.record(
            session, who=who, action="job.numbers", now=now, job=job, project=row.project,
            before=msgspec.structs.asdict(before), after=msgspec.structs.asdict(after),
        )  # fmt: skip
        return after

    return await db.write(work, job=job, at_once=True)


async def delivered(db: Database, job: str, version: int) -> None:
    """Note that the agent has a version of what is desired; one that it has shown to have before costs nothing."""
    async with db.read() as session:
        row = await session.get(models.JobRecord, job)
        new = row is not None and row.delivered_version < version <= row.version
    if new:
        await db.write(partial(wanted.delivered, job=job, version=version), job=job, at_once=True)


async def order_restore(
    db: Database,
    job: str,
    *,
    checkpoint: str | None,
    iteration: int | None,
    key: str,
    who: str,
    now: float,
    expires_seconds: float | None = None,
) -> tuple[Order, bool]:
    """Order a job back to a checkpoint, or to the one at an iteration; the order, and whether it is new.

    It ends after `expires_seconds`, or a week, unless an attempt has taken it up.

    Raises:
        UnknownJob.
        InvalidSetting: among others for a key that an order to another checkpoint has.
        NoSuchCheckpoint: with the nearest earlier one, which is offered and never taken.
        NotRestorable: it is known, and damaged, missing or not durable yet.
        OpenOrder: the job is on its way to another checkpoint.
    """
    if not 1 <= len(key) <= MAX_KEY:
        raise InvalidSetting("key", f"an idempotency key has 1 to {MAX_KEY} characters")

    async def work(session: AsyncSession) -> tuple[Order, bool]:
        row = await find_job(session, job)
        known = await restore_orders.placed_before(session, job, key)
        if known is not None:
            _same_wish(known, checkpoint, iteration)
            return known, False
        chosen = await _choose(session, row, checkpoint, iteration)
        order, new = await restore_orders.place(
            session, row, chosen, key=key, who=who, now=now, expires_seconds=expires_seconds
        )
        if new:
            about = {"order": order.id, "checkpoint": order.checkpoint, "from_iteration": order.from_iteration}
            await audit.record(
                session, who=who, action="restore.order", now=now, job=job, project=row.project, after=about
            )
        return order, new

    return await db.write(work, job=job, at_once=True)


def _same_wish(known: Order, checkpoint: str | None, iteration: int | None) -> None:
    same = iteration in (None, known.iteration) if checkpoint is None else checkpoint == known.checkpoint
    if not same:
        other = checkpoint or f"iteration {iteration}"
        reason = f"this key is the order to {known.checkpoint} already: give the one to {other} a key of its own"
        raise InvalidSetting("key", reason)


async def cancel_restore(db: Database, job: str, order: str, *, who: str, now: float) -> Order:
    """Raises UnknownJob, UnknownOrder, and NotCancellable while the agent restores or when the order has ended."""

    async def work(session: AsyncSession) -> Order:
        row = await find_job(session, job)
        before = (await restore_orders.find(session, job, order)).state
        cancelled = await restore_orders.cancel(session, row, order, who=who, now=now)
        if before != cancelled.state:
            await audit.record(
                session, who=who, action="restore.cancel", now=now, job=job, project=row.project,
                before={"order": order, "state": before}, after={"state": cancelled.state},
            )  # fmt: skip
        return cancelled

    return await db.write(work, job=job, at_once=True)


async def undo_restore(db: Database, job: str, order: str, *, who: str, now: float) -> tuple[Order, bool]:
    """Order a job back to the state that a restore left; asked twice, it is one order, unless the first came to
    nothing.

    Raises:
        UnknownJob, UnknownOrder.
        NotPossible: it did not go there, or what it left is not in the store any more.
        OpenOrder: the job is on its way to another checkpoint.
    """
    async with db.read() as session:
        await find_job(session, job)
        made = await restore_orders.find(session, job, order)
        again, key, number = None, f"undo {made.id}", 1
        while (known := await restore_orders.placed_before(session, job, key)) is not None:
            if known.state == "restored" or known.state in OPEN_ORDER_STATES:
                again = known
                break
            number += 1
            key = f"undo {made.id} {number}"
    if again is None and not made.undoable:
        left = "what it left is not in the store any more" if made.state == "restored" else f"it is {made.state}"
        raise NotPossible(f"the restore to iteration {made.iteration} cannot be undone: {left}")
    return await order_restore(
        db, job, checkpoint=made.safety_checkpoint, iteration=None, key=key, who=who, now=now
    )


async def change_checkpoint(
    db: Database, job: str, checkpoint: str, changes: CheckpointChanges, *, who: str, now: float
) -> CheckpointRow:
    """Pin or unpin a checkpoint, label it, or both; the last word wins.

    Args:
        db: where it is stored.
        job: the name of the job.
        checkpoint: its id, or the iteration that a restore would go back to.
        changes: what is to be changed.
        who: the name of the one who asked.
        now: seconds since the epoch.

    Raises:
        UnknownJob, InvalidSetting.
        NoSuchCheckpoint: with the nearest earlier one.
        NotPossible: it is not in the store, or the job has as many pins as it may.
    """
    if changes.pinned is UNSET and changes.label is UNSET:
        raise InvalidSetting("", "nothing to change: give pinned, label or both")
    label = UNSET if changes.label is UNSET else _label(changes.label)

    async def work(session: AsyncSession) -> CheckpointRow:
        row = await find_job(session, job)
        found = await _named(session, row, checkpoint)
        acts: list[tuple[str, dict[str, str | None], dict[str, str | None]]] = []
        if changes.pinned is not UNSET:
            before = {"pinned_by": found.pinned_by}
            if await wanted.pin(session, row, found, pinned=changes.pinned, who=who, now=now):
                acts.append(("pin" if changes.pinned else "unpin", before, {"pinned_by": found.pinned_by}))
        if label is not UNSET and label != found.label:
            acts.append(("label", {"label": found.label}, {"label": label}))
            found.label = label
        await session.flush()
        for act, before, after in acts:
            await audit.record(
                session, who=who, action=f"checkpoint.{act}", now=now, job=job, project=row.project,
                before=before, after=after | {"checkpoint": found.id},
            )  # fmt: skip
        return as_row(found, await ancestry_of(session, row))

    return await db.write(work, job=job, at_once=True)


def _label(label: str | None) -> str | None:
    """Raises InvalidSetting for one that is too long, or that has what nobody can read."""
    label = (label or "").strip()
    if len(label) > MOST_LABEL:
        raise InvalidSetting("label", f"a label has at most {MOST_LABEL} characters, and this one {len(label)}")
    if not label.isprintable():
        raise InvalidSetting("label", "a label is one line of text: leave out line breaks and control characters")
    return label or None


async def verify(
    db: Database, job: str, checkpoint: str, *, against: str | None = None, who: str, now: float
) -> Verification:
    """Have whoever holds the store read a checkpoint back, beside training. Asked twice, it is read once.

    Args:
        db: where it is stored.
        job: the name of the job.
        checkpoint: its id, or the iteration that a restore would go back to.
        against: another one, by id or iteration, to tell how far each tensor is from it.
        who: the name of the one who asked.
        now: seconds since the epoch.

    Raises:
        UnknownJob, InvalidSetting.
        NoSuchCheckpoint: with the nearest earlier one.
        NotPossible: it is not in the store, or as many wait as can.
    """

    async def work(session: AsyncSession) -> Verification:
        row = await find_job(session, job)
        found = await _named(session, row, checkpoint)
        other = await _named(session, row, against) if against else None
        if await verifications.ask(session, row, found, against=other, who=who, now=now):
            about = {"checkpoint": found.id} | ({"against": other.id} if other else {})
            await audit.record(
                session, who=who, action="checkpoint.verify", now=now, job=job, project=row.project, after=about
            )
        return await verifications.find(session, job, found.id)

    return await db.write(work, job=job, at_once=True)


async def cancel_verification(db: Database, job: str, checkpoint: str, *, who: str, now: float) -> Verification:
    """Take the open request back; without one nothing changes. Raises as `verify` does."""

    async def work(session: AsyncSession) -> Verification:
        row = await find_job(session, job)
        found = await _named(session, row, checkpoint)
        if await verifications.cancel(session, row, found.id, who=who, now=now):
            await audit.record(
                session, who=who, action="checkpoint.verify_cancel", now=now, job=job, project=row.project,
                after={"checkpoint": found.id},
            )  # fmt: skip
        return await verifications.find(session, job, found.id)

    return await db.write(work, job=job, at_once=True)


async def verification(db: Database, job: str, checkpoint: str) -> Verification:
    """Raises UnknownJob, NoSuchCheckpoint and InvalidSetting."""
    async with db.read() as session:
        row = await find_job(session, job)
        return await verifications.find(session, job, (await _named(session, row, checkpoint)).id)


async def tensors(db: Database, job: str, checkpoint: str, other: str | None = None) -> Tensors:
    """What the tensors of a checkpoint come to, beside those of another. Raises as `verification` does."""
    async with db.read() as session:
        row = await find_job(session, job)
        here = (await _named(session, row, checkpoint)).id
        there = (await _named(session, row, other)).id if other else None
        return await verifications.tensors(session, job, here, there)


async def _named(session: AsyncSession, job: models.JobRecord, checkpoint: str) -> models.CheckpointRecord:
    if checkpoint.isascii() and checkpoint.isdigit() and len(checkpoint) < 16:
        return await checkpoints.at(session, job, int(checkpoint))
    return await checkpoints.find(session, job, checkpoint)


async def checkpoint_at(db: Database, job: str, iteration: int) -> CheckpointRow:
    """What a restore to this iteration would go back to. Raises NoSuchCheckpoint with the nearest earlier one."""
    async with db.read() as session:
        row = await find_job(session, job)
        return as_row(await checkpoints.at(session, row, iteration), await ancestry_of(session, row))


async def _choose(
    session: AsyncSession, job: models.JobRecord, checkpoint: str | None, iteration: int | None
) -> models.CheckpointRecord:
    if checkpoint is not None:
        row = await checkpoints.find(session, job, checkpoint)
        if row.state != DURABLE:
            reason = f": {row.reason}" if row.reason else ""
            raise NotRestorable(f"checkpoint {checkpoint} is {row.state}{reason}")
        return row
    if iteration is not None:
        return await checkpoints.at(session, job, iteration)
    raise InvalidSetting("iteration", "say where to go back to: an iteration, or the id of a checkpoint")
