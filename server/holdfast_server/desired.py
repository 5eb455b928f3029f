"""What people want a job to be: versions of it, who made each, and from which iteration on it held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.answers import Change, DesiredChanges, Edit, Order
from holdfast.pacing import parse_budget, parse_every, parse_policy
from holdfast.protocol import OPEN_ORDER_STATES, Desired, Paced, RestoreOrder, VerifyRequest
from holdfast.retention import parse_retention
from holdfast_server import models
from holdfast_server.errors import Conflict, InvalidSetting

T = TypeVar("T")

AGENT = "agent"
"""Who made the versions that no person did: the ones in which an order has ended."""
SCRIPT = "the script's own"
LEAST_HELD_SECONDS, MOST_HELD_SECONDS = 60.0, 30 * 86400.0
"""For how long an interval may be ordered that ends by itself."""
_UNTIL = "%Y-%m-%d %H:%M:%S UTC"
"""How the end of an interval is written where it is told."""
RESTORE, PIN, UNPIN, VERIFY = "restore", "pin", "unpin", "verify"
"""The fields of changes that are about an order or a checkpoint; every other one is a setting."""
NO_SETTINGS = (RESTORE, PIN, UNPIN, VERIFY)

_changes = msgspec.msgpack.Decoder(list[Change])


async def read(session: AsyncSession, job: models.Job, *, now: float) -> Desired:
    return of(job, await open_order(session, job.name), now=now)


def of(job: models.Job, order: models.RestoreOrder | Order | None, *, now: float) -> Desired:
    return Desired(
        version=job.version,
        budget=job.budget,
        policy=job.policy,
        every=job.every,
        paused=job.paused,
        retention=job.retention,
        checkpoint_request=job.checkpoint_request,
        probe_request=job.probe_request,
        pins=None if job.pins is None else tuple(job.pins.split()),
        verify=tuple(verify_requests(job)),
        restore=None if order is None or is_expired(order, now) else _wanted(order, now),
        latest_attempt=job.attempt,
        latest_lineage=job.latest_lineage,
    )


def verify_requests(job: models.Job) -> Iterator[VerifyRequest]:
    """The open ones, the first first."""
    for said in (job.verify or "").split():
        request, checkpoint, *against = said.split(":")
        yield VerifyRequest(id=int(request), checkpoint=checkpoint, against=against[0] if against else None)


def set_verify_requests(job: models.Job, requests: Iterable[VerifyRequest]) -> None:
    job.verify = " ".join(
        ":".join(filter(None, (str(each.id), each.checkpoint, each.against))) for each in requests
    )


def is_expired(order: models.RestoreOrder | Order, now: float) -> bool:
    """Nobody may take it up any more; one that is being carried out has been."""
    return order.state != "restoring" and order.expires_at is not None and order.expires_at <= now


def _wanted(order: models.RestoreOrder | Order, now: float) -> RestoreOrder:
    ends_at = None if order.state == "restoring" else order.expires_at
    return RestoreOrder(
        id=order.id,
        checkpoint=order.checkpoint,
        fence=order.fence,
        expires_in_seconds=None if ends_at is None else ends_at - now,
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

    The settings are what an editor edits: budget, policy, interval, pause, retention, and the request of a
    checkpoint or a probe.
    Versions in which a restore was placed, moved or ended, or a checkpoint pinned or verified, change none of
    them, and take nobody's form away.
    """
    if version > job.version:
        raise Conflict(version=job.version, who="the server", at=job.created_at, what="it is not that far yet")
    versions = models.SettingsVersion
    query = select(versions).where(versions.job == job.name, versions.version > version).order_by(versions.version)
    later = [as_edit(row) for row in await session.scalars(query)]
    missed = [edit for edit in later if any(change.field not in NO_SETTINGS for change in edit.changes)]
    if missed:
        what = "; ".join(edit.summary for edit in missed)
        raise Conflict(version=job.version, who=missed[-1].who, at=missed[-1].at, what=what)


def change(job: models.Job, changes: DesiredChanges, *, now: float) -> list[Change]:
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
        seconds = None if changes.every_seconds is UNSET else _while("every_seconds", changes.every_seconds)
        if every is None and seconds is not None:
            raise InvalidSetting("every_seconds", "an automatic interval does not end: give every, too")
        until = None if seconds is None else now + seconds
        before, after = _every(job.every, job.every_until), _every(every, until)
        made.append(Change(field="interval", before=before, after=after))
        job.every, job.every_until = every, until
    elif changes.every_seconds is not UNSET:
        raise InvalidSetting("every_seconds", "it is how long an interval is held: give every, too")
    if changes.paused is not UNSET:
        made.append(Change(field="checkpoints", before=_paused(job.paused), after=_paused(changes.paused)))
        job.paused, job.paused_version = changes.paused, job.version + 1
    if changes.retention is not UNSET:
        parsed = None if changes.retention is None else _parsed("retention", parse_retention, changes.retention)
        rules = None if parsed is None else str(parsed)
        made.append(Change(field="retention", before=job.retention or SCRIPT, after=rules or SCRIPT))
        job.retention = rules
    if changes.checkpoint_request is not UNSET and changes.checkpoint_request:
        made.append(Change(field="checkpoint", before="", after="now"))
        job.checkpoint_request += 1
    if changes.probe_request is not UNSET and changes.probe_request:
        made.append(Change(field="data probe", before="", after="now"))
        job.probe_request += 1
    if not made:
        fields = "budget, policy, every, paused, retention, checkpoint_request, probe_request"
        raise InvalidSetting("", f"nothing to change: give at least one of {fields}")
    return made


def reversal(edit: Edit, *, now: float) -> DesiredChanges:
    """What takes an edit back. InvalidSetting for one that asked for something to be done, and has it done.

    An interval that was to end comes back for what is left of its time, and not at all when that is over.
    """
    back: dict[str, Any] = {}
    for made in edit.changes:
        match made.field:
            case "budget" | "policy" | "retention":
                back[made.field] = None if made.before.startswith(SCRIPT) else made.before
            case "interval":
                back |= _interval(made.before, now)
            case "checkpoints":
                back["paused"] = made.before == _paused(True)
            case other:
                raise InvalidSetting("edit", f"version {edit.version} cannot be taken back: {other} {made.after}")
    return DesiredChanges(**back)


async def delivered(session: AsyncSession, job: str, version: int) -> None:
    """The agent asks for what comes after `version`: so it has that, and every earlier one."""
    jobs = models.Job
    await session.execute(
        update(jobs)
        .where(jobs.name == job, jobs.delivered_version < version, jobs.version >= version)
        .values(delivered_version=version)
    )


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


def _every(every: int | None, until: float | None) -> str:
    if every is None:
        return "automatic"
    return f"every {every}" + ("" if until is None else f" until {datetime.fromtimestamp(until, UTC):{_UNTIL}}")


def _interval(said: str, now: float) -> dict[str, Any]:
    """What `_every` said, as changes."""
    if not said.startswith("every "):
        return {"every": None}
    every, _, until = said.removeprefix("every ").partition(" until ")
    if not until:
        return {"every": int(every)}
    left = datetime.strptime(until, _UNTIL).replace(tzinfo=UTC).timestamp() - now
    return {"every": int(every), "every_seconds": left} if left >= LEAST_HELD_SECONDS else {"every": None}


def _while(field: str, seconds: float | None) -> float | None:
    if seconds is None:
        return None
    if not LEAST_HELD_SECONDS <= seconds <= MOST_HELD_SECONDS:
        raise InvalidSetting(field, f"{seconds:g} s is no time to hold an interval for: from 1 min to 30 days")
    return seconds


def _paused(paused: bool) -> str:
    return "paused" if paused else "running"
