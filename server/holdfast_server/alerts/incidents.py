"""Alerts from the first sign to the end, and what people do about them. Every move is made here."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import Literal

from sqlalchemy import Select, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.protocol.administration import Alert, AlertRule, AlertState
from holdfast_server import models
from holdfast_server.alerts.conditions import KINDS, SEVERITIES, Verdict
from holdfast_server.alerts.errors import AlertOver, UnknownAlert
from holdfast_server.core.errors import InvalidSetting, UnknownJob
from holdfast_server.db import Database, locked_job, named_jobs
from holdfast_server.records import audit

Step = Literal["begin", "drop", "fire", "replace", "fires_on", "speak", "tell", "clears", "resolve"]

CLEAR_SECONDS = 60.0
"""An alert ends when all has been well for so long."""
MOST_SILENCE_SECONDS = 90 * 86400.0
MAX_ROWS = 500
MAX_MESSAGE = 1000
RULE_OFF = "the rule was switched off, or no longer looks at this job"
ANOTHER = "another one followed"


def step(row: models.AlertRecord | None, rule: AlertRule, verdict: Verdict | None, *, now: float) -> Step | None:
    """What becomes of an alert, or of none, by what is the case now; None: nothing changes."""
    if row is None:
        return "begin" if verdict is not None and verdict.broken else None
    if row.fired_at is None:
        if verdict is None:
            return None
        if not verdict.broken or verdict.subject != row.subject:
            return "drop"
        return "fire" if now - row.since >= rule.for_seconds else None
    if verdict is None or verdict.broken:
        return _still(row, verdict, now=now)
    if not verdict.clear:
        return "fires_on" if row.clear_since is not None else None
    if row.clear_since is None:
        return "clears"
    return "resolve" if now - row.clear_since >= CLEAR_SECONDS else None


def _still(row: models.AlertRecord, verdict: Verdict | None, *, now: float) -> Step | None:
    if verdict is not None and verdict.subject != row.subject:
        return "replace"
    if verdict is not None and row.clear_since is not None:
        return "fires_on"
    if row.silenced_until is not None and row.silenced_until <= now:
        return "speak"
    return "tell" if verdict is not None and verdict.message[:MAX_MESSAGE] != row.message else None


async def open_rows(session: AsyncSession, jobs: Iterable[str]) -> dict[tuple[str, str], models.AlertRecord]:
    """By job and rule, those that have not been told of yet too."""
    rows = await session.scalars(_of_open_rows(), {"jobs": list(jobs)})
    return {(row.job, row.rule): row for row in rows}


@cache
def _of_open_rows() -> Select[models.AlertRecord]:
    rows = models.AlertRecord
    return select(rows).where(rows.job.in_(named_jobs()), rows.resolved_at.is_(None))


async def begin(
    session: AsyncSession, job: str, rule: AlertRule, verdict: Verdict, *, now: float
) -> models.AlertRecord:
    row = models.AlertRecord(
        project=rule.project,
        job=job,
        rule=rule.name,
        kind=rule.kind,
        severity=rule.severity,
        subject=verdict.subject,
        message="",
        since=now,
    )
    session.add(row)
    return row


async def fire(
    session: AsyncSession, row: models.AlertRecord, rule: AlertRule, verdict: Verdict, *, now: float
) -> None:
    """A silence of the same rule and job that is not over yet holds for this one too."""
    row.fired_at, row.severity = now, rule.severity
    row.message = verdict.message[:MAX_MESSAGE]
    row.value = verdict.value if verdict.value is not None and math.isfinite(verdict.value) else None
    earlier = models.AlertRecord
    query = (
        select(earlier)
        .where(earlier.job == row.job, earlier.rule == row.rule, earlier.resolved_at.is_not(None))
        .order_by(earlier.id.desc())
        .limit(1)
    )
    before = (await session.scalars(query)).first()
    if before is not None and before.silenced_until is not None and before.silenced_until > now:
        row.silenced_until, row.silenced_by = before.silenced_until, before.silenced_by


def resolve(row: models.AlertRecord, why: str, *, now: float) -> None:
    row.resolved_at, row.resolved_why = now, why


def quiet(row: models.AlertRecord, *, now: float) -> bool:
    """Nobody wants to hear of it for now."""
    return row.silenced_until is not None and row.silenced_until > now


def state_of(row: models.AlertRecord, *, now: float) -> AlertState:
    if row.resolved_at is not None:
        return "resolved"
    if quiet(row, now=now):
        return "silenced"
    return "acknowledged" if row.acknowledged_at is not None else "firing"


def as_row(row: models.AlertRecord, *, now: float) -> Alert:
    kind = KINDS.get(row.kind)
    own = ("title", "state", "fired_at")
    return Alert(
        **{name: getattr(row, name) for name in Alert.__struct_fields__ if name not in own},
        title=kind.title if kind else row.kind,
        state=state_of(row, now=now),
        fired_at=row.since if row.fired_at is None else row.fired_at,
    )


# ---- what people ask and do -------------------------------------------------------------------


async def listed(
    db: Database,
    *,
    now: float,
    visible_projects: Collection[str] | None = None,
    project: str | None = None,
    job: str | None = None,
    open_only: bool = True,
    before: int | None = None,
    limit: int = 100,
) -> list[Alert]:
    """The newest first; `before` is the number that the page before ended with."""
    rows = models.AlertRecord
    query = select(rows).where(rows.fired_at.is_not(None)).order_by(rows.id.desc()).limit(min(limit, MAX_ROWS))
    if visible_projects is not None:
        query = query.where(rows.project.in_(visible_projects))
    if project is not None:
        query = query.where(rows.project == project)
    if job is not None:
        query = query.where(rows.job == job)
    if open_only:
        query = query.where(rows.resolved_at.is_(None))
    if before is not None:
        query = query.where(rows.id < before)
    async with db.read() as session:
        if job is not None and await session.get(models.JobRecord, job) is None:
            raise UnknownJob(job)
        return [as_row(row, now=now) for row in await session.scalars(query)]


async def open_of_jobs(db: Database, jobs: Sequence[str], *, now: float) -> dict[str, list[Alert]]:
    """What fires, by job: the gravest first. Those that are acknowledged or silenced too."""
    async with db.read() as session:
        rows = (await open_rows(session, jobs)).values()
    order = {"critical": 0, "warning": 1, "info": 2}
    found: dict[str, list[Alert]] = {}
    for row in sorted(rows, key=lambda row: (order.get(row.severity, 3), row.id)):
        if row.fired_at is not None:
            found.setdefault(row.job, []).append(as_row(row, now=now))
    return found


async def open_by_severity(db: Database, *, visible_projects: Collection[str] | None = None) -> dict[str, int]:
    """How many fire, acknowledged and silenced ones too."""
    rows = models.AlertRecord
    query = select(rows.severity, func.count()).where(rows.resolved_at.is_(None), rows.fired_at.is_not(None))
    if visible_projects is not None:
        query = query.where(rows.project.in_(visible_projects))
    async with db.read() as session:
        counted = await session.execute(query.group_by(rows.severity))
        found = {severity: count for severity, count in counted}  # noqa: C416 - rows are not plain tuples
    return {severity: found.get(severity, 0) for severity in SEVERITIES}


async def acknowledge(db: Database, job: str, alert: int, *, who: str, request_id: str, now: float) -> Alert:
    """Somebody is at it. Twice is once. Raises UnknownJob, UnknownAlert, AlertOver."""

    async def work(session: AsyncSession) -> Alert:
        row = await _open(session, job, alert)
        if row.acknowledged_at is None:
            row.acknowledged_at, row.acknowledged_by = now, who
            await session.flush()
            await _note(session, "alert.acknowledge", row, None, who=who, request_id=request_id, now=now)
        return as_row(row, now=now)

    return await db.write(work, job=job)


async def silence(
    db: Database, job: str, alert: int, *, until: float, who: str, request_id: str, now: float
) -> Alert:
    """Nobody is told of it, nor of the same again, until then. Raises as acknowledge does, and InvalidSetting."""
    if not now < until <= now + MOST_SILENCE_SECONDS:
        raise InvalidSetting("until", "a silence ends in the future, and within 90 days")

    async def work(session: AsyncSession) -> Alert:
        row = await _open(session, job, alert)
        row.silenced_until, row.silenced_by = until, who
        await session.flush()
        await _note(session, "alert.silence", row, until, who=who, request_id=request_id, now=now)
        return as_row(row, now=now)

    return await db.write(work, job=job)


async def unsilence(db: Database, job: str, alert: int, *, who: str, request_id: str, now: float) -> Alert:
    """The silence is over at once, and who should hear of it does."""

    async def work(session: AsyncSession) -> Alert:
        row = await _open(session, job, alert)
        if quiet(row, now=now):
            row.silenced_until = now
            await session.flush()
            await _note(session, "alert.unsilence", row, None, who=who, request_id=request_id, now=now)
        return as_row(row, now=now)

    return await db.write(work, job=job)


async def _open(session: AsyncSession, job: str, alert: int) -> models.AlertRecord:
    if await locked_job(session, job) is None:
        raise UnknownJob(job)
    row = await session.get(models.AlertRecord, alert) if 0 <= alert < 2**63 else None
    if row is None or row.job != job or row.fired_at is None:
        raise UnknownAlert(alert)
    if row.resolved_at is not None:
        raise AlertOver(alert)
    return row


async def _note(
    session: AsyncSession,
    action: str,
    row: models.AlertRecord,
    until: float | None,
    *,
    who: str,
    request_id: str,
    now: float,
) -> None:
    after: dict[str, object] = {"alert": row.id, "rule": row.rule}
    await audit.record(
        session,
        who=who,
        action=action,
        job=row.job,
        project=row.project,
        after=after if until is None else {**after, "until": until},
        request_id=request_id,
        now=now,
    )
