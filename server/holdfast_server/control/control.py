"""Actions of operators, which the pages and the HTTP API call: all rules about them are here."""

from __future__ import annotations

from functools import partial

import msgspec
from msgspec import UNSET
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from holdfast.protocol import orders, wire
from holdfast.protocol.field_types import MAX_ATTEMPT, MAX_LINEAGE
from holdfast.protocol.jobs import (
    CheckpointChanges,
    CheckpointInfo,
    DesiredChanges,
    JobNumbers,
    NumberChanges,
    Order,
)
from holdfast.protocol.orders import HaltAction
from holdfast.protocol.values import JobValue, Scalar
from holdfast.protocol.wire import OPEN_ORDER_STATES
from holdfast_server import models
from holdfast_server.core.errors import (
    InvalidSetting,
    NotPossible,
    NotRestorable,
)
from holdfast_server.db import Database, job_transaction
from holdfast_server.queries.job_view import JobView, find_job
from holdfast_server.records import (
    audit,
    checkpoints,
    desired_state,
    job_values,
    last_good,
    pins,
    restore_orders,
    training_halts,
)
from holdfast_server.records.ancestry import ancestry_of
from holdfast_server.records.checkpoints import DAMAGED, DURABLE, as_row
from holdfast_server.records.last_good import LastGood

MAX_KEY = 200
MOST_LABEL = 64
"""Longest label in characters."""


def desired(db: Database, job: str, *, now: float) -> wire.Desired:
    """Return the desired state; empty for an unknown job, whose agent may ask before its first batch."""
    with db.read() as session:
        row = session.get(models.JobRecord, job)
        return desired_state.read(session, row, now=now) if row else wire.Desired(shares=())


def newer_desired(
    db: Database, job: str, *, after: int, alert_pins: str | None, share_number: int | None, now: float
) -> wire.Desired | None:
    """Return the desired state if it is newer than what the agent has, as `desired_state.is_newer` says."""
    with db.read() as session:
        if not desired_state.is_newer(session, job, after=after, alert_pins=alert_pins, share_number=share_number):
            return None
    return desired(db, job, now=now)


@job_transaction
def edit(
    session: Session, job: str, changes: DesiredChanges, *, version: int | None, who: str, now: float
) -> wire.Desired:
    """Change settings; `version` is the version that the editor saw, or None to skip the check for conflicts.

    Raises:
        UnknownJob, InvalidSetting.
        VersionConflict: a later version changed a setting that the edit depends on.
    """
    row = find_job(session, job)
    desired_state.record_edit(session, row, changes, version=version, who=who, now=now)
    return desired_state.read(session, row, now=now)


def undo(db: Database, job: str, edit_version: int, *, version: int, who: str, now: float) -> wire.Desired:
    """Revert one edit; `version` is the version that the editor saw.

    Raises:
        UnknownJob, VersionConflict.
        InvalidSetting: there is no such edit, or it cannot be reverted.
    """
    with db.read() as session:
        row = find_job(session, job)
        found = session.get(models.SettingsVersionRecord, (job, edit_version))
        if found is None:
            raise InvalidSetting("edit", f"there is no version {edit_version}; the newest is {row.version}")
        back = desired_state.reverting_changes(found, now=now)
    return edit(db, job, back, version=version, who=who, now=now)


@job_transaction
def set_numbers(session: Session, job: str, changes: NumberChanges, *, who: str, now: float) -> JobNumbers:
    """Set the largest known attempt and lineage numbers of a job, after a report with wrong ones.

    Attempts with larger numbers get the largest number, so that they fence no other; the last of the remaining
    attempts becomes the current one. Reports of lineages with larger numbers stay, but do not raise the number.

    Raises:
        UnknownJob.
        InvalidSetting: no number is given, or one is out of range.
    """
    given = {name: value for name, value in msgspec.structs.asdict(changes).items() if value is not UNSET}
    if not given:
        raise InvalidSetting("", "nothing to change: give latest_attempt, latest_lineage or both")
    for name, value in given.items():
        most = MAX_ATTEMPT if name == "latest_attempt" else MAX_LINEAGE
        if not 0 <= value <= most:
            raise InvalidSetting(name, f"{name} {value} is outside 0 to {most}")
    row = find_job(session, job)
    before = JobNumbers(latest_attempt=row.attempt, latest_lineage=row.latest_lineage)
    attempt, lineage = (
        given.get("latest_attempt", row.attempt),
        given.get("latest_lineage", row.latest_lineage),
    )
    attempts = models.AttemptRecord
    beyond = (attempts.job == job, attempts.attempt > attempt)
    current = session.get(attempts, (job, row.uid))
    if current is not None and (current.attempt > attempt or row.lineage > lineage):
        if current.attempt > attempt:
            own = select(attempts).where(attempts.job == job, attempts.attempt <= attempt)
            newest = own.order_by(attempts.attempt.desc(), attempts.started_at.desc()).limit(1)
            current = session.scalars(newest).first() or current
        row.uid = current.uid
        # until the next report gives the position
        row.iteration, row.lineage = current.last_iteration, min(current.lineage, lineage)
        row.sequence = row.samples_sequence = -1
    session.execute(update(attempts).where(*beyond).values(attempt=attempt))
    row.attempt, row.latest_lineage = attempt, lineage
    checkpoints.reset_report_order(session, job)
    session.flush()
    after = JobNumbers(latest_attempt=attempt, latest_lineage=lineage)
    audit.record(
        session, who=who, action="job.numbers", now=now, job=job, project=row.project,
        before=msgspec.structs.asdict(before), after=msgspec.structs.asdict(after),
    )  # fmt: skip
    return after


async def delivered(db: Database, job: str, version: int) -> None:
    """Record that the agent has a version of the desired state, if that is new.

    After a change of many jobs their agents come at once: they wait for shared commits, without a thread each.
    """
    if await db.ask("agents", partial(_is_new, db, job, version)):
        stored = partial(desired_state.delivered, job=job, version=version)
        await db.stored(stored, job=job, at_once=True)


def _is_new(db: Database, job: str, version: int) -> bool:
    with db.read() as session:
        row = session.get(models.JobRecord, job)
        return row is not None and row.delivered_version < version <= row.version


def place_restore(
    session: Session,
    job: str,
    *,
    checkpoint: str | None,
    iteration: int | None,
    key: str,
    who: str,
    now: float,
    expires_seconds: float | None = None,
    degraded: bool = False,
    skip: wire.DataSkip | None = None,
    is_approved: bool = False,
) -> tuple[Order, bool]:
    """Order a restore to a checkpoint, or to the one at an iteration; return the order and whether it is new.

    It expires after `expires_seconds`, by default a week, unless an attempt has started it. A `degraded` one may
    go to a damaged checkpoint: where the agent finds all important bytes of it, what is lost is replaced.

    Raises:
        UnknownJob.
        InvalidSetting: among others, the key belongs to an order for another checkpoint.
        CheckpointNotFound: with the nearest earlier one, which is only suggested.
        NotRestorable: the checkpoint is damaged, missing or not durable yet.
        OpenOrder: an order for another checkpoint is open.
        NotPossible: the job is protected, and no second person has approved it.
    """
    if not 1 <= len(key) <= MAX_KEY:
        raise InvalidSetting("key", f"an idempotency key has 1 to {MAX_KEY} characters")
    row = find_job(session, job)
    known = restore_orders.find_by_key(session, job, key)
    if known is not None:
        _require_same_target(known, checkpoint, iteration, degraded=degraded, skip=skip)
        return known, False
    _require_approval(row, is_approved=is_approved)
    chosen = restorable(session, row, checkpoint, iteration, degraded=degraded, skip=skip)
    order, new = restore_orders.place(
        session, row, chosen, key=key, who=who, now=now, expires_seconds=expires_seconds, degraded=degraded,
        skip=skip,
    )  # fmt: skip
    if new:
        about = {"order": order.id, "checkpoint": order.checkpoint, "from_iteration": order.from_iteration}
        about |= {"degraded": True} if degraded else {}
        about |= {"skip": msgspec.to_builtins(skip)} if skip is not None else {}
        audit.record(session, who=who, action="restore.order", now=now, job=job, project=row.project, after=about)
    return order, new


order_restore = job_transaction(place_restore)


def _require_approval(job: models.JobRecord, *, is_approved: bool) -> None:
    if job.protected and not is_approved:
        raise NotPossible(f"{job.name} is protected: a second person must approve this")


def _require_sensible(skip: wire.DataSkip, iteration: int) -> None:
    try:
        if orders.skip_of(skip.batches, skip.to_iteration, iteration, skip.loader) is None:
            raise ValueError("give the data to leave out: a number of batches, or up to which iteration")
    except ValueError as error:
        field = "skip" if skip.to_iteration is None or skip.batches is not None else "skip_to"
        raise InvalidSetting(field, str(error)) from None


def _require_same_target(
    known: Order, checkpoint: str | None, iteration: int | None, *, degraded: bool, skip: wire.DataSkip | None
) -> None:
    same = iteration in (None, known.iteration) if checkpoint is None else checkpoint == known.checkpoint
    if not same or (known.degraded, known.skip) != (degraded, skip):
        other = checkpoint or f"iteration {iteration}"
        reason = f"this key belongs to the order for {known.checkpoint}: use another key for {other}"
        raise InvalidSetting("key", reason)


@job_transaction
def cancel_restore(session: Session, job: str, order: str, *, who: str, now: float) -> Order:
    """Cancel an order.

    Raises:
        UnknownJob, UnknownOrder.
        NotCancellable: the agent restores, or the order has ended.
    """
    row = find_job(session, job)
    before = restore_orders.find(session, job, order).state
    cancelled = restore_orders.cancel(session, row, order, who=who, now=now)
    if before != cancelled.state:
        audit.record(
            session, who=who, action="restore.cancel", now=now, job=job, project=row.project,
            before={"order": order, "state": before}, after={"state": cancelled.state},
        )  # fmt: skip
    return cancelled


def undo_target(db: Database, job: str, order: str) -> tuple[str, str]:
    """Return the safety checkpoint of an earlier restore, and the key of its undo, open and done ones included.

    Raises:
        UnknownJob, UnknownOrder.
        NotPossible: the order was not carried out, or its safety checkpoint is no longer in the store.
    """
    with db.read() as session:
        find_job(session, job)
        made = restore_orders.find(session, job, order)
        again, key, number = None, f"undo {made.id}", 1
        while (known := restore_orders.find_by_key(session, job, key)) is not None:
            if known.state == "restored" or known.state in OPEN_ORDER_STATES:
                again = known
                break
            number += 1
            key = f"undo {made.id} {number}"
    if again is None and not made.undoable:
        gone = "its safety checkpoint is no longer in the store"
        left = gone if made.state == "restored" else f"it is {made.state}"
        raise NotPossible(f"the restore to iteration {made.iteration} cannot be undone: {left}")
    return made.safety_checkpoint or "", key


def place_training_order(
    session: Session, job: str, action: HaltAction, *, who: str, now: float, is_approved: bool = False
) -> wire.Desired:
    """Order that training pauses, continues or ends after a checkpoint.

    Raises:
        UnknownJob.
        NotPossible: the job has ended, there is no pause to continue, or the job is protected, and no second
            person has approved it. To continue needs no approval.
    """
    row = find_job(session, job)
    _require_approval(row, is_approved=is_approved or action == "continue")
    training_halts.place(session, row, action, who=who, now=now)
    return desired_state.read(session, row, now=now)


order_training = job_transaction(place_training_order)


def place_value(
    session: Session, job: str, name: str, value: Scalar | None, *, who: str, now: float, is_approved: bool = False
) -> JobValue:
    """Change a value of the script; `None` returns to the script's own.

    Raises:
        UnknownJob, UnknownValue.
        InvalidSetting: the script does not allow the value.
        NotPossible: the job is protected, and no second person has approved it.
    """
    row = find_job(session, job)
    _require_approval(row, is_approved=is_approved)
    job_values.set_value(session, row, name, value, who=who, now=now)
    return next(each for each in job_values.values_of(session, row) if each.definition.name == name)


set_value = job_transaction(place_value)


@job_transaction
def change_checkpoint(
    session: Session, job: str, checkpoint: str, changes: CheckpointChanges, *, who: str, now: float
) -> CheckpointInfo:
    """Pin or unpin a checkpoint, label it, or both.

    Args:
        checkpoint: its id, or its iteration.

    Raises:
        UnknownJob, InvalidSetting.
        CheckpointNotFound: with the nearest earlier one.
        NotPossible: it is not durable, or the job has as many pins as it may.
    """
    if changes.pinned is UNSET and changes.label is UNSET:
        raise InvalidSetting("", "nothing to change: give pinned, label or both")
    label = UNSET if changes.label is UNSET else _label(changes.label)
    row = find_job(session, job)
    found = checkpoints.named(session, row, checkpoint)
    acts: list[tuple[str, dict[str, str | None], dict[str, str | None]]] = []
    if changes.pinned is not UNSET:
        before = {"pinned_by": found.pinned_by}
        if pins.pin(session, row, found, pinned=changes.pinned, who=who, now=now):
            acts.append(("pin" if changes.pinned else "unpin", before, {"pinned_by": found.pinned_by}))
    if label is not UNSET and label != found.label:
        acts.append(("label", {"label": found.label}, {"label": label}))
        found.label = label
    session.flush()
    for act, before, after in acts:
        audit.record(
            session, who=who, action=f"checkpoint.{act}", now=now, job=job, project=row.project,
            before=before, after=after | {"checkpoint": found.id},
        )  # fmt: skip
    return as_row(found, ancestry_of(session, row))


def _label(label: str | None) -> str | None:
    """Return a label without surrounding spaces; None for an empty one. Raises InvalidSetting."""
    label = (label or "").strip()
    if len(label) > MOST_LABEL:
        raise InvalidSetting("label", f"a label has at most {MOST_LABEL} characters; this one has {len(label)}")
    if not label.isprintable():
        raise InvalidSetting("label", "a label must not contain line breaks or control characters")
    return label or None


def checkpoint_at(view: JobView, iteration: int) -> CheckpointInfo:
    """Return the checkpoint that a restore to an iteration uses.

    Raises:
        CheckpointNotFound: there is none; with the nearest earlier one.
    """
    return as_row(checkpoints.at(view.session, view.job, iteration), view.ancestry())


def find_last_good(view: JobView, *, before: int | None = None) -> LastGood | None:
    """Return the last good checkpoint, as `last_good.find` does."""
    return last_good.find(view.session, view.job, view.ancestry(), before=before)


def restorable(
    session: Session,
    job: models.JobRecord,
    checkpoint: str | None,
    iteration: int | None,
    *,
    degraded: bool,
    skip: wire.DataSkip | None,
) -> models.CheckpointRecord:
    """Return the checkpoint that such a restore uses. Raises as `place_restore`."""
    chosen = _choose(session, job, checkpoint, iteration, degraded=degraded)
    if skip is not None:
        _require_sensible(skip, chosen.iteration)
    return chosen


def _choose(
    session: Session,
    job: models.JobRecord,
    checkpoint: str | None,
    iteration: int | None,
    *,
    degraded: bool,
) -> models.CheckpointRecord:
    if checkpoint is not None:
        row = checkpoints.find(session, job, checkpoint)
        if row.state != DURABLE and not (degraded and row.state == DAMAGED):
            reason = f": {row.reason}" if row.reason else ""
            raise NotRestorable(f"checkpoint {checkpoint} is {row.state}{reason}")
        return row
    if iteration is not None:
        damaged = checkpoints.damaged_at(session, job, iteration) if degraded else None
        return damaged or checkpoints.at(session, job, iteration)
    raise InvalidSetting("iteration", "give the target of the restore: an iteration, or the id of a checkpoint")
