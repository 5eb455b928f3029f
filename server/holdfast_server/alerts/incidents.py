"""The life cycle of alerts, and what people do with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Literal

import msgspec
from sqlalchemy import ColumnElement, and_, func, not_, select
from sqlalchemy.orm import Session

from holdfast.protocol.administration import (
    Alert,
    AlertDetails,
    AlertFilter,
    AlertRule,
    AlertState,
    AlertStep,
)
from holdfast.units import duration
from holdfast_server import models
from holdfast_server.alerts.conditions import KINDS, LASTING, SEVERITIES, RuleResult
from holdfast_server.core.encoding import answer_from
from holdfast_server.core.errors import AlertResolved, InvalidSetting, UnknownAlert, UnknownJob
from holdfast_server.core.principal import Principal, Role
from holdfast_server.db import Database, job_transaction, named_jobs
from holdfast_server.queries.fleet import jobs_with
from holdfast_server.queries.job_view import find_job
from holdfast_server.records import audit

Step = Literal[
    "begin", "discard", "fire", "replace", "keep_firing", "end_silence", "update", "start_clearing", "resolve"
]

CLEAR_SECONDS = 60.0
"""An alert resolves after its rule has not been broken for this long."""
MAX_SILENCE_SECONDS = 90 * 86400.0
MAX_ROWS = 500
MAX_MESSAGE = 1000
MAX_COMMENT, MAX_COMMENTS, MAX_SENT = 2000, 200, 50
_UNRESOLVED = select(models.AlertRecord).where(
    models.AlertRecord.job.in_(named_jobs()), models.AlertRecord.resolved_at.is_(None)
)


def next_step(
    row: models.AlertRecord | None, rule: AlertRule, result: RuleResult | None, *, now: float
) -> Step | None:
    """Return the change that a rule's result makes to its open alert, or to none; `None` for no change."""
    if row is None:
        return "begin" if result is not None and result.broken else None
    if row.fired_at is None:
        if result is None:
            return None
        if not result.broken or result.subject != row.subject:
            return "discard"
        return "fire" if now - row.since >= rule.for_seconds else None
    if result is None or result.broken:
        return _step_while_broken(row, rule, result, now=now)
    if not result.clear:
        return "keep_firing" if row.clear_since is not None else None
    if row.clear_since is None:
        return "start_clearing"
    return "resolve" if now - row.clear_since >= CLEAR_SECONDS else None


def message_of(row: models.AlertRecord, rule: AlertRule, result: RuleResult, *, now: float) -> str:
    """Return the text of an alert, with the time for which a rule has been broken that demands one."""
    return result.text(now - row.since if rule.for_seconds > 0 else 0.0)[:MAX_MESSAGE]


def _step_while_broken(
    row: models.AlertRecord, rule: AlertRule, result: RuleResult | None, *, now: float
) -> Step | None:
    if result is not None and result.subject != row.subject:
        return "replace"
    if result is not None and row.clear_since is not None:
        return "keep_firing"
    if row.silenced_until is not None and row.silenced_until <= now:
        return "end_silence"
    if result is None or message_of(row, rule, result, now=now) == row.message:
        return None
    return "update"


def open_rows(session: Session, jobs: Iterable[str]) -> dict[tuple[str, str], models.AlertRecord]:
    """Return the unresolved alerts by job and rule, including those that have not fired yet."""
    rows = session.scalars(_UNRESOLVED, {"jobs": list(jobs)})
    return {(row.job, row.rule): row for row in rows}


def begin(job: str, rule: AlertRule, result: RuleResult, *, now: float) -> models.AlertRecord:
    return models.AlertRecord(
        project=rule.project,
        job=job,
        rule=rule.name,
        kind=rule.kind,
        severity=rule.severity,
        subject=result.subject,
        iteration=result.iteration,
        lineage=result.lineage,
        message=result.text()[:MAX_MESSAGE],
        value=result.value if result.value is not None and math.isfinite(result.value) else None,
        since=now,
    )


def is_announced(row: models.AlertRecord) -> bool:
    """Return whether messages about an alert are sent: not about a spike of the loss that did not last."""
    return row.kind != "loss_spike" or row.message.endswith(LASTING)


def update(row: models.AlertRecord, rule: AlertRule, result: RuleResult, *, now: float) -> None:
    """Take over the newest value, and the text with it."""
    row.message = message_of(row, rule, result, now=now)
    row.value = result.value if result.value is not None and math.isfinite(result.value) else None


def fire(session: Session, row: models.AlertRecord, rule: AlertRule, result: RuleResult, *, now: float) -> None:
    """Fire an alert. An unexpired silence of the previous alert of this rule and job applies to it."""
    row.fired_at, row.severity = now, rule.severity
    update(row, rule, result, now=now)
    earlier = models.AlertRecord
    query = (
        select(earlier)
        .where(earlier.job == row.job, earlier.rule == row.rule, earlier.resolved_at.is_not(None))
        .order_by(earlier.id.desc())
        .limit(1)
    )
    before = session.scalars(query).first()
    if before is not None and is_silenced(before, now=now):
        row.silenced_until, row.silenced_by = before.silenced_until, before.silenced_by


def is_silenced(row: models.AlertRecord, *, now: float) -> bool:
    return row.silenced_until is not None and row.silenced_until > now


def state_of(row: models.AlertRecord, *, now: float) -> AlertState:
    if row.resolved_at is not None:
        return "resolved"
    if is_silenced(row, now=now):
        return "silenced"
    return "acknowledged" if row.acknowledged_at is not None else "firing"


def as_answer(row: models.AlertRecord, *, now: float) -> Alert:
    kind = KINDS.get(row.kind)
    return answer_from(
        row,
        Alert,
        title=kind.title if kind else row.kind,
        state=state_of(row, now=now),
        fired_at=row.since if row.fired_at is None else row.fired_at,
        comments=0,
        last_comment=None,
    )


# ---- reading ----------------------------------------------------------------------------------


def list_alerts(
    db: Database,
    *,
    now: float,
    visible_projects: Collection[str] | None = None,
    project: str | None = None,
    job: str | None = None,
    state: AlertFilter = "open",
    severity: str | None = None,
    rule: str | None = None,
    labels: Sequence[str] = (),
    search: str = "",
    before: int | None = None,
    limit: int = 100,
) -> list[Alert]:
    """List alerts with their comments, newest first.

    Args:
        labels: labels of the job that all match, as `FleetQuery.labels`.
        search: a part of the name of the job.
        before: the id that the previous page ended with.
    """
    rows = models.AlertRecord
    query = select(rows).where(rows.fired_at.is_not(None)).order_by(rows.id.desc()).limit(min(limit, MAX_ROWS))
    if visible_projects is not None:
        query = query.where(rows.project.in_(visible_projects))
    if project is not None:
        query = query.where(rows.project == project)
    if job is not None:
        query = query.where(rows.job == job)
    if state != "all":
        query = query.where(*_in_state(state, now=now))
    if rule is not None:
        query = query.where(rows.rule == rule)
    if severity is not None:
        query = query.where(rows.severity == severity)
    if labels:
        query = query.where(rows.job.in_(jobs_with(labels)))
    if search:
        query = query.where(rows.job.icontains(search, autoescape=True))
    if before is not None:
        query = query.where(rows.id < before)
    with db.read() as session:
        if job is not None:
            find_job(session, job)
        found = [as_answer(row, now=now) for row in session.scalars(query)]
        return _with_comments(session, found)


def _with_comments(session: Session, alerts: list[Alert]) -> list[Alert]:
    """Add the number of comments and the last one."""
    notes = models.AlertNoteRecord
    place = func.row_number().over(partition_by=notes.alert, order_by=notes.id.desc()).label("place")
    count = func.count().over(partition_by=notes.alert).label("count")
    of_these = (notes.alert.in_([alert.id for alert in alerts]), notes.kind == "comment")
    ranked = select(notes.alert, notes.at, notes.who, notes.text, place, count).where(*of_these).subquery()
    last = {row.alert: row for row in session.execute(select(ranked).where(ranked.c.place == 1))}
    return [
        msgspec.structs.replace(
            alert,
            comments=row.count,
            last_comment=AlertStep(at=row.at, state="comment", who=row.who, text=row.text),
        )
        if (row := last.get(alert.id)) is not None
        else alert
        for alert in alerts
    ]


def _in_state(state: AlertFilter, *, now: float) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions for a state, as `state_of` determines it."""
    rows = models.AlertRecord
    if state == "resolved":
        return (rows.resolved_at.is_not(None),)
    silenced = and_(rows.silenced_until.is_not(None), rows.silenced_until > now)
    acknowledged = rows.acknowledged_at.is_not(None)
    more = {
        "open": (),
        "silenced": (silenced,),
        "acknowledged": (not_(silenced), acknowledged),
        "firing": (not_(silenced), not_(acknowledged)),
    }
    return rows.resolved_at.is_(None), *more[state]


def open_of_jobs(session: Session, jobs: Sequence[str], *, now: float) -> dict[str, list[Alert]]:
    """Return the unresolved alerts by job, the most severe first."""
    rows = open_rows(session, jobs).values()
    order = {"critical": 0, "warning": 1, "info": 2}
    found: dict[str, list[Alert]] = {}
    for row in sorted(rows, key=lambda row: (order.get(row.severity, 3), row.id)):
        if row.fired_at is not None:
            found.setdefault(row.job, []).append(as_answer(row, now=now))
    return found


def details(db: Database, alert: int, *, visible_projects: Collection[str] | None, now: float) -> AlertDetails:
    """Return an alert with its history and its group. Raises UnknownAlert, also for one of another project."""
    rows = models.AlertRecord
    with db.read() as session:
        row = session.get(rows, alert) if 0 <= alert < 2**63 else None
        is_hidden = row is not None and visible_projects is not None and row.project not in visible_projects
        if row is None or row.fired_at is None or is_hidden:
            raise UnknownAlert(alert)
        others = select(rows).where(rows.group_id == row.group_id, rows.project == row.project, rows.id != row.id)
        group = session.scalars(others.order_by(rows.id).limit(MAX_ROWS)) if row.group_id is not None else ()
        rule = session.get(models.AlertRuleRecord, (row.project, row.rule))
        return AlertDetails(
            alert=as_answer(row, now=now),
            runbook=rule.runbook if rule is not None else "",
            steps=_steps(session, row),
            group=[as_answer(other, now=now) for other in group],
        )


def _steps(session: Session, row: models.AlertRecord) -> list[AlertStep]:
    notes, sent, channels = models.AlertNoteRecord, models.AlertDeliveryRecord, models.AlertChannelRecord
    found = [AlertStep(at=row.since, state="began")] if row.since != row.fired_at else []
    if row.fired_at is not None:
        found.append(AlertStep(at=row.fired_at, state="fired", text=row.severity))
    if row.acknowledged_at is not None:
        found.append(AlertStep(at=row.acknowledged_at, state="acknowledged", who=row.acknowledged_by))
    found += [
        AlertStep(at=note.at, state=note.kind, who=note.who, text=note.text)  # type: ignore[arg-type]
        for note in session.scalars(select(notes).where(notes.alert == row.id))
    ]
    query = select(sent.ended_at, sent.event, channels.name).join(channels, channels.id == sent.channel)
    query = query.where(
        sent.group_id == row.group_id, sent.state == "delivered", sent.event != "test",
        channels.project == row.project,
    )  # fmt: skip
    for at, event, name in session.execute(query.order_by(sent.id.desc()).limit(MAX_SENT)):
        if at is not None:
            found.append(AlertStep(at=at, state="sent", who=name, text=event))
    if row.resolved_at is not None:
        found.append(AlertStep(at=row.resolved_at, state="resolved", text=row.resolved_why or ""))
    return sorted(found, key=lambda step: step.at)


def open_by_severity(db: Database, *, visible_projects: Collection[str] | None = None) -> dict[str, int]:
    """Count the unresolved alerts, including acknowledged and silenced ones."""
    rows = models.AlertRecord
    query = select(rows.severity, func.count()).where(rows.resolved_at.is_(None), rows.fired_at.is_not(None))
    if visible_projects is not None:
        query = query.where(rows.project.in_(visible_projects))
    with db.read() as session:
        counted = session.execute(query.group_by(rows.severity))
        found = {severity: count for severity, count in counted}  # noqa: C416 - rows are not plain tuples
    return {severity: found.get(severity, 0) for severity in SEVERITIES}


def firing(db: Database, *, now: float, visible_projects: Collection[str] | None = None) -> int:
    """Count the alerts that are neither acknowledged nor silenced."""
    rows = models.AlertRecord
    query = select(func.count()).where(rows.fired_at.is_not(None), *_in_state("firing", now=now))
    if visible_projects is not None:
        query = query.where(rows.project.in_(visible_projects))
    with db.read() as session:
        return session.scalar(query) or 0


# ---- what people do ---------------------------------------------------------------------------


@job_transaction
def acknowledge(session: Session, job: str, alert: int, *, who: str, now: float) -> Alert:
    """Acknowledge an alert, once. Raises UnknownJob, UnknownAlert, AlertResolved."""
    row = _unresolved(session, job, alert)
    if row.acknowledged_at is None:
        row.acknowledged_at, row.acknowledged_by = now, who
        _record(session, "alert.acknowledge", row, who=who, now=now)
    return as_answer(row, now=now)


def change_all(
    db: Database, alerts: Sequence[int], change: Callable[..., Alert], *, asker: Principal, now: float
) -> None:
    """Apply a change, such as `acknowledge`, to those of some alerts that are open and whose jobs the asker may
    operate."""
    rows = models.AlertRecord
    query = select(rows.id, rows.job, rows.project).where(rows.id.in_(list(alerts)[:MAX_ROWS]))
    with db.read() as session:
        found = session.execute(query).all()
    for alert, job, project in found:
        if (asker.role_in(project) or 0) >= Role.operator:
            with suppress(AlertResolved, UnknownAlert, UnknownJob):  # it resolved or was deleted meanwhile
                change(db, job, alert, who=asker.name, now=now)


@job_transaction
def silence(session: Session, job: str, alert: int, *, until: float, who: str, now: float) -> Alert:
    """Suppress messages about this alert, and about further ones of the same rule and job, until a time.

    Raises:
        UnknownJob, UnknownAlert, AlertResolved, InvalidSetting.
    """
    if not now < until <= now + MAX_SILENCE_SECONDS:
        raise InvalidSetting("until", "a silence must end in the future, within 90 days")
    row = _unresolved(session, job, alert)
    row.silenced_until, row.silenced_by = until, who
    _note(session, row, "silenced", f"for {duration(round(until - now))}", who=who, now=now)
    _record(session, "alert.silence", row, who=who, now=now, until=until)
    return as_answer(row, now=now)


@job_transaction
def unsilence(session: Session, job: str, alert: int, *, who: str, now: float) -> Alert:
    """End a silence. The next evaluation sends the message. Raises as acknowledge does."""
    row = _unresolved(session, job, alert)
    if is_silenced(row, now=now):
        row.silenced_until = now
        _note(session, row, "unsilenced", "", who=who, now=now)
        _record(session, "alert.unsilence", row, who=who, now=now)
    return as_answer(row, now=now)


@job_transaction
def comment(session: Session, job: str, alert: int, text: str, *, who: str, now: float) -> AlertStep:
    """Comment on an alert, also on one that has resolved. Raises UnknownJob, UnknownAlert, InvalidSetting."""
    row = _fired(session, job, alert)
    text = text.strip()
    if not 1 <= len(text) <= MAX_COMMENT:
        raise InvalidSetting("text", f"a comment has 1 to {MAX_COMMENT:,} characters")
    notes = models.AlertNoteRecord
    known = session.scalar(select(func.count()).where(notes.alert == alert, notes.kind == "comment"))
    if (known or 0) >= MAX_COMMENTS:
        raise InvalidSetting("text", f"an alert has at most {MAX_COMMENTS} comments")
    _note(session, row, "comment", text, who=who, now=now)
    _record(session, "alert.comment", row, who=who, now=now)
    return AlertStep(at=now, state="comment", who=who, text=text)


def _note(session: Session, row: models.AlertRecord, kind: str, text: str, *, who: str, now: float) -> None:
    session.add(models.AlertNoteRecord(alert=row.id, at=now, who=who, kind=kind, text=text))


def _fired(session: Session, job: str, alert: int) -> models.AlertRecord:
    find_job(session, job)
    row = session.get(models.AlertRecord, alert) if 0 <= alert < 2**63 else None
    if row is None or row.job != job or row.fired_at is None:
        raise UnknownAlert(alert)
    return row


def _unresolved(session: Session, job: str, alert: int) -> models.AlertRecord:
    row = _fired(session, job, alert)
    if row.resolved_at is not None:
        raise AlertResolved(alert)
    return row


def _record(
    session: Session, action: str, row: models.AlertRecord, *, who: str, now: float, **more: float
) -> None:
    session.flush()
    after = {"alert": row.id, "rule": row.rule, **more}
    audit.record(session, who=who, action=action, job=row.job, project=row.project, after=after, now=now)
