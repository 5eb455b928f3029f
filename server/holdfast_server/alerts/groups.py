"""Groups of alerts, which are sent as one message.

A group has the alerts of a rule and a project that fire within some minutes, and those of the same jobs that they
explain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Select, select
from sqlalchemy.orm import Session, aliased

from holdfast_server import models
from holdfast_server.db import lock_alerts

WINDOW_SECONDS = 600.0
"""Time from the first alert of a group in which others join it: what breaks later wakes again."""
_STOPPED = ("silent", "no_progress", "persist_failing")
CAUSES = dict.fromkeys(("durable_age", "unsaved_gpu_hours", "unsaved_iterations"), _STOPPED) | {
    "throughput_drop": ("iteration_time", "data_wait", "straggler"),
    "iteration_time": ("data_wait", "straggler"),
    "goodput_low": ("silent", "no_progress", "job_failed", "data_wait", "straggler"),
}
"""By kind of rule, kinds of which an open alert of the same job explains that the rule is broken."""

_rows = models.AlertRecord


def join(session: Session, row: models.AlertRecord, *, now: float) -> None:
    """Put an alert that fires into the group of its cause, or of its rule, or into a new one.

    Alerts of the job that it explains join its group, unless a message about theirs was tried already.
    """
    lock_alerts(session)
    cause = open_cause(session, row)
    row.group_id = cause.group_id if cause is not None else _open_group(session, row, now=now) or row.id
    for effect in open_effects(session, row):
        if effect.group_id != row.group_id and not _was_sent(session, effect.group_id):
            effect.group_id = row.group_id
    session.flush()


def open_cause(session: Session, row: models.AlertRecord) -> models.AlertRecord | None:
    """Return an open alert of the same job that explains an alert."""
    causes = CAUSES.get(row.kind, ())
    if not causes:
        return None
    return session.scalars(_open(row).where(_rows.kind.in_(causes)).order_by(_rows.id).limit(1)).first()


def open_effects(session: Session, row: models.AlertRecord) -> list[models.AlertRecord]:
    """Return the open alerts of the same job that an alert explains."""
    kinds = [kind for kind, causes in CAUSES.items() if row.kind in causes]
    return list(session.scalars(_open(row).where(_rows.kind.in_(kinds)).order_by(_rows.id))) if kinds else []


def has_open(session: Session, group: int) -> bool:
    """Return whether an alert of a group has not ended."""
    query = select(_rows.id).where(_rows.group_id == group, _rows.resolved_at.is_(None)).limit(1)
    return session.scalar(query) is not None


def members(session: Session, group: int) -> list[models.AlertRecord]:
    """Return the alerts of a group, earliest first."""
    return list(session.scalars(select(_rows).where(_rows.group_id == group).order_by(_rows.id)))


@dataclass(frozen=True, slots=True)
class SplitAlerts:
    causes: list[models.AlertRecord]
    effects: list[models.AlertRecord]
    """Those that another one of the same job explains."""


def split(alerts: Sequence[models.AlertRecord]) -> SplitAlerts:
    kinds = {(alert.job, alert.kind) for alert in alerts}
    effects = [alert for alert in alerts if any((alert.job, kind) in kinds for kind in CAUSES.get(alert.kind, ()))]
    explained = {id(alert) for alert in effects}
    return SplitAlerts([alert for alert in alerts if id(alert) not in explained], effects)


def _open(row: models.AlertRecord) -> Select[models.AlertRecord]:
    """Select the other open alerts of the job of an alert."""
    return select(_rows).where(
        _rows.job == row.job, _rows.id != row.id, _rows.fired_at.is_not(None), _rows.resolved_at.is_(None)
    )


def _open_group(session: Session, row: models.AlertRecord, *, now: float) -> int | None:
    """Return the newest group of the same rule that is neither over nor older than the window."""
    first = aliased(models.AlertRecord)
    query = (
        select(first.id)
        .join(_rows, _rows.group_id == first.id)
        .where(first.project == row.project, first.rule == row.rule, first.fired_at > now - WINDOW_SECONDS)
        .where(first.id != row.id, _rows.rule == row.rule, _rows.resolved_at.is_(None))
        .order_by(first.id.desc())
        .limit(1)
    )
    return session.scalar(query)


def _was_sent(session: Session, group: int | None) -> bool:
    sent = models.AlertDeliveryRecord
    query = select(sent.id).where(sent.group_id == group, sent.tries > 0).limit(1)
    return session.scalar(query) is not None
