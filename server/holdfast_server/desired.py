"""What people want a job to be: versions of it, who made each, and from which iteration on it held."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.pacing import parse_budget, parse_every, parse_policy
from holdfast.protocol import OPEN_ORDER_STATES, Desired, Paced, RestoreOrder
from holdfast_server import models
from holdfast_server.errors import Conflict, InvalidSetting
from holdfast_server.views import Change, DesiredChanges, Edit, Order

T = TypeVar("T")

AGENT = "agent"
"""Who made the versions that no person did: the ones in which an order has ended."""
SCRIPT = "the script's own"
RESTORE = "restore"
"""The field of a change that is about an order; every other one is a setting."""

_changes = msgspec.msgpack.Decoder(list[Change])


async def read(session: AsyncSession, job: models.Job) -> Desired:
    return of(job, await open_order(session, job.name))


def of(job: models.Job, order: models.RestoreOrder | Order | None) -> Desired:
    return Desired(
        version=job.version,
        budget=job.budget,
        policy=job.policy,
        every=job.every,
        paused=job.paused,
        checkpoint_request=job.checkpoint_request,
        restore=RestoreOrder(id=order.id, checkpoint=order.checkpoint, fence=order.fence) if order else None,
        latest_attempt=job.attempt,
        latest_lineage=job.latest_lineage,
    )


async def open_order(session: AsyncSession, job: str) -> models.RestoreOrder | None:
    orders = models.RestoreOrder
    query = select(orders).where(orders.job == job, orders.state.in_(OPEN_ORDER_STATES))
    return (await session.scalars(query)).one_or_none()


def bump(session: AsyncSession, job: models.Job, changes: list[Change], *, who: str, now: float) -> None:
    """Make these changes a version; whatever changes in `Desired` goes through here."""
    job.version += 1
    session.add(
        models.SettingsVersion(
            job=job.name, version=job.version, who=who, at=now, changes=msgspec.msgpack.encode(changes)
        )
    )


async def check_version(session: AsyncSession, job: models.Job, version: int) -> None:
    """Conflict when a later version than the editor's has changed a setting.

    The settings are what an editor edits: budget, policy, interval, pause, and the request of a checkpoint.
    Versions in which a restore was placed, moved or ended change none of them, and take nobody's form away.
    """
    if version > job.version:
        raise Conflict(version=job.version, who="the server", at=job.created_at, what="it is not that far yet")
    versions = models.SettingsVersion
    query = select(versions).where(versions.job == job.name, versions.version > version).order_by(versions.version)
    later = [as_edit(row) for row in await session.scalars(query)]
    missed = [edit for edit in later if any(change.field != RESTORE for change in edit.changes)]
    if missed:
        what = "; ".join(edit.summary for edit in missed)
        raise Conflict(version=job.version, who=missed[-1].who, at=missed[-1].at, what=what)


def change(job: models.Job, changes: DesiredChanges) -> list[Change]:
    """Write the changes into `job`, and say what they were; InvalidSetting for a value that cannot be one."""
    made: list[Change] = []
    paced = msgspec.msgpack.decode(job.paced, type=Paced) if job.paced else None
    if changes.budget is not UNSET:
        budget = None if changes.budget is None else _parsed("budget", parse_budget, changes.budget)
        made.append(Change(field="budget", before=_budget(job.budget, paced), after=_budget(budget, None)))
        job.budget = budget
    if changes.policy is not UNSET:
        policy = None if changes.policy is None else _parsed("policy", parse_policy, changes.policy)
        made.append(Change(field="policy", before=job.policy or SCRIPT, after=policy or SCRIPT))
        job.policy = policy
    if changes.every is not UNSET:
        every = None if changes.every is None else _parsed("every", parse_every, changes.every)
        made.append(Change(field="interval", before=_every(job.every), after=_every(every)))
        job.every = every
    if changes.paused is not UNSET:
        made.append(Change(field="checkpoints", before=_paused(job.paused), after=_paused(changes.paused)))
        job.paused, job.paused_version = changes.paused, job.version + 1
    if changes.checkpoint_request is not UNSET and changes.checkpoint_request:
        made.append(Change(field="checkpoint", before="", after="now"))
        job.checkpoint_request += 1
    if not made:
        raise InvalidSetting(
            "", "nothing to change: give at least one of budget, policy, every, paused, checkpoint_request"
        )
    return made


async def stamp(session: AsyncSession, job: models.Job, version: int, iteration: int, at: float) -> None:
    """The agent acts on `version`, and so on every earlier one that is not told apart from it any more.

    One that was never made here, but by a server whose data was deleted since, says nothing.
    """
    if version > job.version:
        return
    versions = models.SettingsVersion
    await session.execute(
        update(versions)
        .where(versions.job == job.name, versions.version <= version, versions.applied_iteration.is_(None))
        .values(applied_iteration=iteration, applied_at=at)
    )
    if version > job.applied_version:
        job.applied_version, job.applied_iteration, job.applied_at = version, iteration, at


async def edit_rows(session: AsyncSession, job: str, *, limit: int) -> list[Edit]:
    versions = models.SettingsVersion
    query = (
        select(versions)
        .where(versions.job == job, versions.who != AGENT)
        .order_by(versions.version.desc())
        .limit(limit)
    )
    return [as_edit(row) for row in await session.scalars(query)]


def as_edit(row: models.SettingsVersion) -> Edit:
    changes = _changes.decode(row.changes)
    return Edit(
        version=row.version,
        who=row.who,
        at=row.at,
        summary=_summary(changes),
        changes=changes,
        applied_iteration=row.applied_iteration,
        applied_at=row.applied_at,
    )


def _summary(changes: Iterable[Change]) -> str:
    changes = list(changes)
    told = [change for change in changes if change.before != change.after] or changes
    return ", ".join(
        f"{change.field} {change.before} → {change.after}" if change.before else f"{change.field} {change.after}"
        for change in told
    )


def _parsed(field: str, parse: Callable[[Any], T], value: object) -> T:
    try:
        return parse(value)
    except ValueError as error:
        raise InvalidSetting(field, str(error)) from None


def _budget(budget: float | None, paced: Paced | None) -> str:
    if budget is None:
        return f"{SCRIPT} ({_percent(paced.budget)})" if paced else SCRIPT
    return _percent(budget)


def _percent(fraction: float) -> str:
    return f"{round(fraction * 100, 4):g}%"


def _every(every: int | None) -> str:
    return "automatic" if every is None else f"every {every}"


def _paused(paused: bool) -> str:
    return "paused" if paused else "running"
