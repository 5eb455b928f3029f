"""What people want a job to be: versions of it, who made each, and from which iteration on it held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET
from sqlalchemy import Select, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.pacing import parse_budget, parse_every, parse_policy
from holdfast.protocol.jobs import Change, DesiredChanges, Edit, Order
from holdfast.protocol.messages import (
    MOST_PINS,
    OPEN_ORDER_STATES,
    Desired,
    Inventory,
    Paced,
    RestoreOrder,
    VerifyRequest,
)
from holdfast.protocol.retention import parse_retention
from holdfast_server import models
from holdfast_server.core.errors import Conflict, InvalidSetting, NotPossible
from holdfast_server.db import Database, named_jobs
from holdfast_server.records import audit

T = TypeVar("T")

AGENT = "agent"
"""Who made the versions that no person did: the ones in which an order has ended."""
SERVER = "the server"
SCRIPT = "the script's own"
LEAST_HELD_SECONDS, MOST_HELD_SECONDS = 60.0, 30 * 86400.0
"""For how long an interval may be ordered that ends by itself."""
OPEN_VERIFICATIONS = ("requested", "reading")
OVERRIDES_EVERY_SECONDS = 10.0

Setting = Literal["budget", "policy", "interval", "checkpoints", "retention"]
"""What an editor edits, and what can be taken back."""
Field = Setting | Literal["checkpoint", "data probe", "restore", "pin", "unpin", "verify"]
"""The others ask for something that is then done."""
SETTINGS: tuple[Setting, ...] = ("budget", "policy", "interval", "checkpoints", "retention")
EDITED: tuple[Field, ...] = (*SETTINGS, "checkpoint", "data probe")
"""What a form changes; a version without any of them takes nobody's form away."""


class Interval(msgspec.Struct, frozen=True):
    """An interval in iterations, and until when it holds, in seconds since the epoch."""

    every: int | None = None
    until: float | None = None


class Changed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One change as it is stored. `told` renders it for people."""

    field: Field
    before: bool | float | str | Interval | None = None
    """Of a setting, its value; None: the script's own. Of an order, its state. Of what ended, the checkpoint."""
    after: bool | float | str | Interval | None = None
    """The same; of what was asked of a checkpoint, its id."""
    script_budget: float | None = None
    """Of a budget that was the script's own: how much that is, where the agent has said."""
    iteration: int | None = None
    """Of an order, where it leads."""
    against: str | None = None
    """Of a verification, the checkpoint that its tensors are compared with."""


_changes = msgspec.json.Decoder(list[Changed])


# ---- what is desired ----------------------------------------------------------------------------


async def read(session: AsyncSession, job: models.JobRecord, *, now: float) -> Desired:
    asked = await checkpoint_requests(session, [job.name])
    return of(job, await open_order(session, job.name), asked.get(job.name, NOTHING_ASKED), now=now)


class CheckpointRequests(msgspec.Struct):
    """What operators ask of a job's checkpoints."""

    pins: list[str] = []
    verify: list[VerifyRequest] = []
    """The open ones, the first first."""


NOTHING_ASKED = CheckpointRequests()


async def checkpoint_requests(session: AsyncSession, jobs: Sequence[str]) -> dict[str, CheckpointRequests]:
    """By job, of those that have any."""
    found: dict[str, CheckpointRequests] = {}
    for job, checkpoint in await session.execute(_of_pins(), {"jobs": jobs}):
        found.setdefault(job, CheckpointRequests()).pins.append(checkpoint)
    for job, request, checkpoint, against in await session.execute(_of_verifications(), {"jobs": jobs}):
        asked = VerifyRequest(id=request, checkpoint=checkpoint, against=against)
        found.setdefault(job, CheckpointRequests()).verify.append(asked)
    return found


@cache
def _of_pins() -> Select[str, str]:
    rows = models.CheckpointRecord
    return (
        select(rows.job, rows.id).where(rows.job.in_(named_jobs()), rows.pinned_at.is_not(None)).order_by(rows.id)
    )


@cache
def _of_verifications() -> Select[str, int, str, str | None]:
    rows = models.VerificationRecord
    query = select(rows.job, rows.request, rows.checkpoint, rows.against).where(rows.job.in_(named_jobs()))
    return query.where(rows.state.in_(OPEN_VERIFICATIONS)).order_by(rows.request)


def of(
    job: models.JobRecord,
    order: models.RestoreOrderRecord | Order | None,
    asked: CheckpointRequests,
    *,
    now: float,
) -> Desired:
    return Desired(
        version=job.version,
        budget=job.budget,
        policy=job.policy,
        every=job.every,
        paused=job.paused,
        retention=job.retention,
        checkpoint_request=job.checkpoint_request,
        probe_request=job.probe_request,
        pins=tuple(asked.pins) if job.pins_known else None,
        verify=tuple(asked.verify),
        restore=None if order is None or is_expired(order, now) else _wanted(order, now),
        latest_attempt=job.attempt,
        latest_lineage=job.latest_lineage,
    )


def is_expired(order: models.RestoreOrderRecord | Order, now: float) -> bool:
    """Nobody may take it up any more; one that is being carried out has been."""
    return order.state != "restoring" and order.expires_at is not None and order.expires_at <= now


def _wanted(order: models.RestoreOrderRecord | Order, now: float) -> RestoreOrder:
    ends_at = None if order.state == "restoring" else order.expires_at
    return RestoreOrder(
        id=order.id,
        checkpoint=order.checkpoint,
        fence=order.fence,
        expires_in_seconds=None if ends_at is None else ends_at - now,
    )


async def open_order(session: AsyncSession, job: str) -> models.RestoreOrderRecord | None:
    orders = models.RestoreOrderRecord
    query = select(orders).where(orders.job == job, orders.state.in_(OPEN_ORDER_STATES))
    return (await session.scalars(query)).one_or_none()


# ---- versions -----------------------------------------------------------------------------------


def bump(
    session: AsyncSession, job: models.JobRecord, changes: Sequence[Changed], *, who: str, now: float
) -> None:
    """Make these changes a version; whatever changes in `Desired` goes through here."""
    job.version += 1
    told = msgspec.json.encode(changes).decode()
    session.add(models.SettingsVersionRecord(job=job.name, version=job.version, who=who, at=now, changes=told))


async def check_version(session: AsyncSession, job: models.JobRecord, version: int) -> None:
    """Conflict when a later version than the editor's has changed what an editor edits."""
    if version > job.version:
        raise Conflict(version=job.version, who="the server", at=job.created_at, what="it is not that far yet")
    versions = models.SettingsVersionRecord
    query = select(versions).where(versions.job == job.name, versions.version > version).order_by(versions.version)
    later = [as_edit(row) for row in await session.scalars(query)]
    missed = [edit for edit in later if any(change.field in EDITED for change in edit.changes)]
    if missed:
        what = "; ".join(edit.summary for edit in missed)
        raise Conflict(version=job.version, who=missed[-1].who, at=missed[-1].at, what=what)


def change(job: models.JobRecord, changes: DesiredChanges, *, now: float) -> list[Changed]:
    """Write the changes into `job`, and say what they were; InvalidSetting for a value that cannot be one."""
    made: list[Changed] = []
    if changes.budget is not UNSET:
        budget = _parsed("budget", parse_budget, changes.budget)
        paced = msgspec.msgpack.decode(job.paced, type=Paced) if job.paced else None
        known = paced.budget if paced and job.budget is None else None
        made.append(Changed(field="budget", before=job.budget, after=budget, script_budget=known))
        job.budget = budget
    if changes.policy is not UNSET:
        policy = _parsed("policy", parse_policy, changes.policy)
        made.append(Changed(field="policy", before=job.policy, after=policy))
        job.policy = policy
    if changes.every is not UNSET:
        seconds = None if changes.every_seconds is UNSET else changes.every_seconds
        after = _interval(_parsed("every", parse_every, changes.every), seconds, now)
        made.append(Changed(field="interval", before=Interval(job.every, job.every_until), after=after))
        job.every, job.every_until = after.every, after.until
    elif changes.every_seconds is not UNSET:
        raise InvalidSetting("every_seconds", "it is how long an interval is held: give every, too")
    if changes.paused is not UNSET:
        made.append(Changed(field="checkpoints", before=job.paused, after=changes.paused))
        job.paused, job.paused_version = changes.paused, job.version + 1
    if changes.retention is not UNSET:
        parsed = _parsed("retention", parse_retention, changes.retention)
        rules = None if parsed is None else str(parsed)
        made.append(Changed(field="retention", before=job.retention, after=rules))
        job.retention = rules
    if changes.checkpoint_request is not UNSET and changes.checkpoint_request:
        made.append(Changed(field="checkpoint"))
        job.checkpoint_request += 1
    if changes.probe_request is not UNSET and changes.probe_request:
        made.append(Changed(field="data probe"))
        job.probe_request += 1
    if not made:
        fields = "budget, policy, every, paused, retention, checkpoint_request, probe_request"
        raise InvalidSetting("", f"nothing to change: give at least one of {fields}")
    return made


def _parsed(field: str, parse: Callable[[Any], T], value: object) -> T | None:
    try:
        return None if value is None else parse(value)
    except ValueError as error:
        raise InvalidSetting(field, str(error)) from None


def _interval(every: int | None, seconds: float | None, now: float) -> Interval:
    if seconds is None:
        return Interval(every)
    if not LEAST_HELD_SECONDS <= seconds <= MOST_HELD_SECONDS:
        reason = f"{seconds:g} s is no time to hold an interval for: from 1 min to 30 days"
        raise InvalidSetting("every_seconds", reason)
    if every is None:
        raise InvalidSetting("every_seconds", "an automatic interval does not end: give every, too")
    return Interval(every, now + seconds)


def reversal(row: models.SettingsVersionRecord, *, now: float) -> DesiredChanges:
    """What takes a version back. InvalidSetting for one that asked for something to be done, and has it done.

    An interval that was to end comes back for what is left of its time, and not at all when that is over.
    """
    back: dict[str, Any] = {}
    for made in _changes.decode(row.changes):
        if isinstance(made.before, Interval):
            left = UNSET if made.before.until is None else made.before.until - now
            if left is UNSET or left >= LEAST_HELD_SECONDS:
                back |= {"every": made.before.every, "every_seconds": left}
            else:
                back["every"] = None
        elif made.field in SETTINGS:
            back["paused" if made.field == "checkpoints" else made.field] = made.before
        else:
            what = f"{made.field} {told(made).after}"
            raise InvalidSetting("edit", f"version {row.version} cannot be taken back: {what}")
    return DesiredChanges(**back)


async def delivered(session: AsyncSession, job: str, version: int) -> None:
    """The agent asks for what comes after `version`: so it has that, and every earlier one."""
    jobs = models.JobRecord
    await session.execute(
        update(jobs)
        .where(jobs.name == job, jobs.delivered_version < version, jobs.version >= version)
        .values(delivered_version=version)
    )


async def stamp(session: AsyncSession, job: models.JobRecord, version: int, iteration: int, at: float) -> None:
    """The agent acts on `version`, and so on every earlier one that is not told apart from it any more.

    One that was never made here, but by a server whose data was deleted since, says nothing.
    """
    if version > job.version:
        return
    versions = models.SettingsVersionRecord
    await session.execute(
        update(versions)
        .where(versions.job == job.name, versions.version <= version, versions.applied_iteration.is_(None))
        .values(applied_iteration=iteration, applied_at=at)
    )
    if version > job.applied_version:
        job.applied_version, job.applied_iteration, job.applied_at = version, iteration, at


# ---- versions as people read them ---------------------------------------------------------------


async def edit_rows(session: AsyncSession, job: str, *, limit: int) -> list[Edit]:
    versions = models.SettingsVersionRecord
    query = (
        select(versions)
        .where(versions.job == job, versions.who != AGENT)
        .order_by(versions.version.desc())
        .limit(limit)
    )
    return [as_edit(row) for row in await session.scalars(query)]


def as_edit(row: models.SettingsVersionRecord) -> Edit:
    changes = [told(change) for change in _changes.decode(row.changes)]
    return Edit(
        version=row.version,
        who=row.who,
        at=row.at,
        summary=_summary(changes),
        changes=changes,
        applied_iteration=row.applied_iteration,
        applied_at=row.applied_at,
    )


def _summary(changes: Sequence[Change]) -> str:
    shown = [change for change in changes if change.before != change.after] or changes
    return ", ".join(
        f"{change.field} {change.before} → {change.after}" if change.before else f"{change.field} {change.after}"
        for change in shown
    )


def told(made: Changed) -> Change:
    """A change in words."""
    before, after = _told(made, made.before, made.script_budget), _told(made, made.after, None)
    match made.field:
        case "checkpoint" | "data probe":
            before, after = "", "now"
        case "restore":
            place = f"to {made.iteration}"
            before, after = (before or (place if after else "")), (after or place)
        case "verify" if made.against:
            after = f"{after} beside {made.against}"
    return Change(field=made.field, before=before, after=after)


def _told(made: Changed, value: object, script_budget: float | None) -> str:
    match made.field, value:
        case "budget" | "policy" | "retention", None:
            return SCRIPT if script_budget is None else f"{SCRIPT} ({_percent(script_budget)})"
        case "budget", float() | int():
            return _percent(value)
        case "interval", Interval():
            return _interval_text(value)
        case "checkpoints", _:
            return "paused" if value else "running"
    return "" if value is None else str(value)


def _interval_text(interval: Interval) -> str:
    if interval.every is None:
        return "automatic"
    until = "" if interval.until is None else f" until {datetime.fromtimestamp(interval.until, UTC):%F %T} UTC"
    return f"every {interval.every}{until}"


def _percent(fraction: float) -> str:
    return f"{round(fraction * 100, 4):g}%"


# ---- intervals that were ordered for a while: when it is over, the policy decides again ------------


async def end_overrides(db: Database, now: float) -> None:
    """End the intervals whose time is over."""
    jobs = models.JobRecord
    async with db.read() as session:
        found = (await session.scalars(select(jobs.name).where(jobs.every_until <= now))).all()
    for job in found:
        await db.write(partial(_end_override, job=job, now=now), job=job, at_once=True)


async def _end_override(session: AsyncSession, *, job: str, now: float) -> None:
    row = await session.get(models.JobRecord, job)
    if row is None or row.every_until is None or row.every_until > now:
        return  # another one was ordered meanwhile
    await record_edit(session, row, DesiredChanges(every=None), who=SERVER, now=now)


async def record_edit(
    session: AsyncSession, job: models.JobRecord, changes: DesiredChanges, *, who: str, now: float
) -> None:
    """Make an edit a version, and write it into the audit log."""
    made = change(job, changes, now=now)
    bump(session, job, made, who=who, now=now)
    await session.flush()
    shown = [told(one) for one in made]
    await audit.record(
        session, who=who, action="settings.edit", now=now, job=job.name, project=job.project,
        before={one.field: one.before for one in shown},
        after={one.field: one.after for one in shown} | {"version": job.version},
    )  # fmt: skip


# ---- pins ---------------------------------------------------------------------------------------


async def pin(
    session: AsyncSession,
    job: models.JobRecord,
    row: models.CheckpointRecord,
    *,
    pinned: bool,
    who: str,
    now: float,
) -> bool:
    """Pin or unpin a checkpoint, and whether that is new. Raises NotPossible for one that is not in the store."""
    if pinned == (row.pinned_at is not None):
        return False
    if pinned and row.state != "durable":
        raise NotPossible(f"checkpoint {row.id} is {row.state}: one that is durable can be pinned")
    asked = await checkpoint_requests(session, [job.name])
    if pinned and len(asked.get(job.name, NOTHING_ASKED).pins) >= MOST_PINS:
        raise NotPossible(f"{MOST_PINS} checkpoints of {job.name} are pinned, and no more can be: unpin one first")
    row.pinned_by, row.pinned_at = (who, now) if pinned else (None, None)
    job.pins_known = True
    bump(session, job, [Changed(field="pin" if pinned else "unpin", after=row.id)], who=who, now=now)
    return True


async def adopt_pins(session: AsyncSession, job: models.JobRecord, event: Inventory, *, now: float) -> None:
    """Learn from the store what was pinned by way of a server whose data was deleted, while nobody pins here."""
    if job.pins_known or not event.pinned:
        return
    rows = models.CheckpointRecord
    query = select(rows).where(rows.job == job.name, rows.id.in_(event.pinned[:MOST_PINS]))
    for row in await session.scalars(query):
        row.pinned_by, row.pinned_at = AGENT, event.at
    job.pins_known = True
    bump(session, job, [Changed(field="pin", after="as in the store")], who=AGENT, now=now)
