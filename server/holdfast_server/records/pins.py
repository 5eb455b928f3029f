"""Pinned checkpoints, which retention keeps.

Every change by an operator is a version of the desired state; a checkpoint that an open alert keeps is none.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from holdfast.protocol.jobs import is_alert
from holdfast.protocol.wire import MAX_PINS, Inventory
from holdfast_server import models
from holdfast_server.core.errors import NotPossible
from holdfast_server.records import desired_state
from holdfast_server.records.desired_state import AGENT, StoredChange


def pin(
    session: Session,
    job: models.JobRecord,
    row: models.CheckpointRecord,
    *,
    pinned: bool,
    who: str,
    now: float,
) -> bool:
    """Pin or unpin a checkpoint for an operator; return whether that changed anything.

    The pin replaces that of an alert, which ends with the alert.

    Raises:
        NotPossible: it is not durable, an open alert keeps it, or the job has as many pins as it may.
    """
    by_alert = is_alert(row.pinned_by)
    if not pinned and by_alert:
        raise NotPossible(f"checkpoint {row.id} is kept for an open alert, which offers to restore it")
    if pinned == (row.pinned_at is not None) and not by_alert:
        return False
    if pinned and row.state != "durable":
        raise NotPossible(f"checkpoint {row.id} is {row.state}: only a durable checkpoint can be pinned")
    if pinned and not by_alert and not _has_room(session, job):
        raise NotPossible(f"{job.name} has {MAX_PINS} pinned checkpoints, the maximum: unpin one first")
    row.pinned_by, row.pinned_at = (who, now) if pinned else (None, None)
    job.pins_known = True
    desired_state.add_version(
        session, job, [StoredChange(field="pin" if pinned else "unpin", after=row.id)], who=who, now=now
    )
    return True


def author(alert: int) -> str:
    """Return the name of an alert as an actor, which `is_alert` recognizes."""
    return f"alert {alert}"


def keep_for_alert(
    session: Session, job: models.JobRecord, row: models.CheckpointRecord, alert: int, *, now: float
) -> bool:
    """Keep a durable checkpoint while an alert is open, unless it is pinned or there is no room.

    That is no version of the desired state: the alert changes no setting. Return whether it is newly kept.
    """
    if row.pinned_at is not None or row.state != "durable" or not _has_room(session, job):
        return False
    row.pinned_by, row.pinned_at, job.pins_known = author(alert), now, True
    return True


def kept_for_alerts(session: Session, job: str) -> Sequence[models.CheckpointRecord]:
    rows = models.CheckpointRecord
    pinned = session.scalars(select(rows).where(rows.job == job, rows.pinned_at.is_not(None)))
    return [row for row in pinned if is_alert(row.pinned_by)]


def _has_room(session: Session, job: models.JobRecord) -> bool:
    asked = desired_state.open_requests(session, [job.name])
    return len(asked.get(job.name, desired_state.NOTHING_ASKED).pins) < MAX_PINS


def adopt_pins(session: Session, job: models.JobRecord, event: Inventory, *, now: float) -> None:
    """Adopt the pins of the store, set through an earlier database, unless this one has had a pin."""
    if job.pins_known or not event.pinned:
        return
    rows = models.CheckpointRecord
    query = select(rows).where(rows.job == job.name, rows.id.in_(event.pinned[:MAX_PINS]))
    for row in session.scalars(query):
        row.pinned_by, row.pinned_at = AGENT, event.at
    job.pins_known = True
    desired_state.add_version(
        session, job, [StoredChange(field="pin", after="as in the store")], who=AGENT, now=now
    )
