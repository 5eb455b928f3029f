"""Orders to pause, continue or end training, and the reports of agents about them."""

from __future__ import annotations

import uuid

import msgspec
from sqlalchemy import update
from sqlalchemy.orm import Session

from holdfast.protocol.orders import HaltAction, HaltReport, TrainingOrder
from holdfast_server import models
from holdfast_server.core.errors import NotPossible
from holdfast_server.records import audit, desired_state
from holdfast_server.records.desired_state import StoredChange
from holdfast_server.records.job_status import status_of


def place(session: Session, job: models.JobRecord, action: HaltAction, *, who: str, now: float) -> TrainingOrder:
    """Order to pause, continue or end training; an open order for the same stays as it is.

    Raises:
        NotPossible: the job has ended, or there is no pause to continue.
    """
    known = _newest(job)
    status = status_of(job, session.get(models.AttemptRecord, (job.name, job.uid)), now=now)
    if action == "continue" and not has_pause(job.training_order, job.training_paused_at):
        raise NotPossible(f"training of {job.name} is not paused")
    if action != "continue" and not status.alive:
        raise NotPossible(f"training of {job.name} does not run: the job is {status.status}")
    if known is not None and known.action == action != "continue":
        return known  # an agent that has carried it out and goes on has it removed
    order = TrainingOrder(id=uuid.uuid4().hex, action=action, who=who)
    _replace(session, job, order, who=who, now=now)
    session.flush()
    audit.record(
        session, who=who, action=f"training.{action}", now=now, job=job.name, project=job.project,
        after={"order": order.id, "iteration": job.iteration},
    )  # fmt: skip
    return order


def has_pause(training_order: str | None, training_paused_at: float | None) -> bool:
    """Return whether training is paused, or a pause is ordered, by these columns of a job."""
    known = _decoded(training_order)
    return training_paused_at is not None or (known is not None and known.action == "pause")


def _newest(job: models.JobRecord) -> TrainingOrder | None:
    return _decoded(job.training_order)


def _decoded(order: str | None) -> TrainingOrder | None:
    return None if order is None else msgspec.json.decode(order, type=TrainingOrder)


def _replace(
    session: Session, job: models.JobRecord, order: TrainingOrder | None, *, who: str, now: float
) -> None:
    before = _newest(job)
    job.training_order = None if order is None else msgspec.json.encode(order).decode()
    changed = StoredChange(
        field="training",
        before=None if before is None else before.action,
        after="done" if order is None else order.action,
    )
    desired_state.add_version(session, job, [changed], who=who, now=now)


def report(
    session: Session,
    job: models.JobRecord,
    attempt: models.AttemptRecord,
    event: HaltReport,
    *,
    current: bool,
    now: float,
) -> None:
    """Apply a report that training is paused, continues, ends, or could not end."""
    end_pauses(session, job.name, attempt.uid, at=event.at)
    if event.state == "paused":
        session.add(
            models.TrainingPauseRecord(
                job=job.name, uid=attempt.uid, who=event.by, at=event.at, iteration=event.iteration,
                lineage=event.lineage, ended_at=None,
            )
        )  # fmt: skip
    if event.state == "ended":
        attempt.ended_by = event.by
    if current:
        is_paused = event.state == "paused"
        job.training_paused_at, job.training_paused_by = (event.at, event.by) if is_paused else (None, None)
        job.progressed_at = now  # the time of the pause is no lack of progress
    known = _newest(job)
    if known is not None and event.state != "paused" and event.order == known.id and known.action != "continue":
        _replace(session, job, None, who=desired_state.AGENT, now=now)


def begin_attempt(job: models.JobRecord, attempt: models.AttemptRecord) -> None:
    """Forget the pause of the attempt before: one that stays paused reports it."""
    if attempt.uid == job.uid:
        job.training_paused_at = job.training_paused_by = None


def end_pauses(session: Session, job: str, uid: str, *, at: float) -> None:
    """End the pause of an attempt."""
    rows = models.TrainingPauseRecord
    session.execute(
        update(rows).where(rows.job == job, rows.uid == uid, rows.ended_at.is_(None)).values(ended_at=at)
    )
