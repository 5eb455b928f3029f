"""The chore that looks at every job, rule by rule."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.protocol.administration import AlertRule
from holdfast_server import models
from holdfast_server.alerts import deliveries, facts, incidents, rules
from holdfast_server.alerts.conditions import KINDS, Verdict
from holdfast_server.alerts.facts import Facts
from holdfast_server.db import Database, lock_job

EVERY_SECONDS = 10.0
AT_REST_EVERY_SECONDS = 120.0
"""Jobs that have ended: nine of ten in a fleet that is some months old. All that may still be said of one is that
an order ran out, or that a checkpoint is damaged."""
JOBS_AT_ONCE = 500
"""Looked at in one read, so that none takes long."""
WRITES_AT_ONCE = 8
"""They share a commit, where a thousand jobs fall silent with one switch; what agents report waits for no more."""
DONE_WELL = "all is well again"


@dataclass(frozen=True, slots=True)
class _Judged:
    rule: AlertRule
    verdict: Verdict | None


async def evaluate(db: Database, now: float, *, at_rest: bool = False) -> None:
    """Begin, go on with and end alerts, each with the messages that it calls for, in one transaction a job.

    `at_rest`: of jobs that have ended and have no open alert, and of the others if not.
    """
    async with db.read() as session:
        names = await facts.candidates(session, at_rest=at_rest, now=now)
    for start in range(0, len(names), JOBS_AT_ONCE):
        part = names[start : start + JOBS_AT_ONCE]
        async with db.read() as session:
            known = await facts.gather(session, part, now=now)
            wanted = {
                project: await rules.rules_of(session, project) for project in {job.project for job in known}
            }
            rows = await incidents.open_rows(session, part)
        open_alerts: dict[str, dict[str, models.AlertRecord]] = {}
        for (name, rule), row in rows.items():
            open_alerts.setdefault(name, {})[rule] = row
        due = []
        for job in known:
            judged, found = _judged(job, wanted[job.project]), open_alerts.get(job.job, {})
            if any(True for _ in _steps(found, judged, now=now)) or _left(found, judged):
                due.append((job.job, partial(_settle, job=job.job, judged=judged, now=now)))
        for begin in range(0, len(due), WRITES_AT_ONCE):
            some = due[begin : begin + WRITES_AT_ONCE]
            await asyncio.gather(*(db.write(settle, job=name) for name, settle in some))


def _judged(job: Facts, wanted: list[AlertRule]) -> list[_Judged]:
    applying = (rule for rule in wanted if rules.applies(rule, job.job))
    return [_Judged(rule, KINDS[rule.kind].judge(job, rule.limit)) for rule in applying]


def _steps(
    rows: dict[str, models.AlertRecord], judged: list[_Judged], *, now: float
) -> Iterator[tuple[models.AlertRecord | None, _Judged, incidents.Step]]:
    for each in judged:
        row = rows.get(each.rule.name)
        step = incidents.step(row, each.rule, each.verdict, now=now)
        if step is not None:
            yield row, each, step


def _left(rows: dict[str, models.AlertRecord], judged: list[_Judged]) -> list[models.AlertRecord]:
    """Of rules that do not look at this job any more."""
    names = {each.rule.name for each in judged}
    return [row for rule, row in rows.items() if rule not in names]


async def _settle(session: AsyncSession, *, job: str, judged: list[_Judged], now: float) -> None:
    """Decided again from what is there now: a person, or another instance, may have been quicker."""
    await lock_job(session, job)
    found = await incidents.open_rows(session, [job])
    rows = {rule: row for (_, rule), row in found.items()}
    for row in _left(rows, judged):
        await _end(session, row, incidents.RULE_OFF, now=now)
    for open_row, each, step in list(_steps(rows, judged, now=now)):
        await _take(session, job, open_row, each, step, now=now)


async def _take(
    session: AsyncSession,
    job: str,
    row: models.AlertRecord | None,
    each: _Judged,
    step: incidents.Step,
    *,
    now: float,
) -> None:
    rule, verdict = each.rule, each.verdict
    match step:
        case "begin" | "replace":
            assert verdict is not None
            if row is not None:
                await _end(session, row, incidents.ANOTHER, now=now)
            begun = await incidents.begin(session, job, rule, verdict, now=now)
            if rule.for_seconds <= 0:
                await _fire(session, begun, each, now=now)
        case "fire":
            assert row is not None
            await _fire(session, row, each, now=now)
        case "drop":
            assert row is not None
            await session.delete(row)
        case "fires_on":
            assert row is not None
            row.clear_since = None
        case "clears":
            assert row is not None
            row.clear_since = now
        case "tell":
            assert row is not None
            assert verdict is not None
            row.message = verdict.message[: incidents.MAX_MESSAGE]
        case "speak":
            assert row is not None
            row.silenced_until = row.silenced_by = None
            if row.acknowledged_at is None:
                await deliveries.tell(session, row, "firing", now=now)
        case "resolve":
            assert row is not None
            await _end(session, row, DONE_WELL, now=now)
    await session.flush()


async def _fire(session: AsyncSession, row: models.AlertRecord, each: _Judged, *, now: float) -> None:
    assert each.verdict is not None
    await incidents.fire(session, row, each.rule, each.verdict, now=now)
    await session.flush()
    if not incidents.quiet(row, now=now):
        await deliveries.tell(session, row, "firing", now=now)


async def _end(session: AsyncSession, row: models.AlertRecord, why: str, *, now: float) -> None:
    if row.fired_at is None:
        await session.delete(row)
    else:
        incidents.resolve(row, why, now=now)
        if not incidents.quiet(row, now=now):
            await deliveries.tell(session, row, "resolved", now=now)
    await session.flush()
