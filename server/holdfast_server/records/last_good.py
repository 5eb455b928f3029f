"""The last good checkpoint of a job: the newest sound one from before its loss became wrong.

This is the one rule for alerts, the timeline, the page of a job and the dialog of a restore.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import and_, or_, select
from sqlalchemy.orm import Session

from holdfast_server import models
from holdfast_server.records import audit, checkpoints, pins
from holdfast_server.records.ancestry import Ancestry, ancestry_of, lineage_starts
from holdfast_server.records.job_status import recent_of

ENDED = "the job ended"
"""Why an alert resolved that only concerns jobs that train: its trouble was not recovered from."""
_TROUBLES = {
    "loss_spike": ("Loss spike", "the spike"),
    "loss_nan": ("Loss not finite", "the first loss that was not finite"),
}
"""Titles of kinds of alert rules, and names of what breaks them."""
_OTHER = ("Wrong loss", "the trouble")


@dataclass(frozen=True, slots=True, kw_only=True)
class LastGood:
    kind: str
    """Kind of the alert rule that the trouble breaks; empty if it is only an iteration that a person named."""
    iteration: int
    """Iteration at which the trouble began."""
    checkpoint: models.CheckpointRecord | None
    """`None` if none from before it is left."""

    @property
    def title(self) -> str:
        return _TROUBLES.get(self.kind, _OTHER)[0]

    @property
    def trouble(self) -> str:
        return f"{_TROUBLES.get(self.kind, _OTHER)[1]} at {self.iteration:,}"

    @property
    def reason(self) -> str:
        return f"before {self.trouble}"


def find(session: Session, job: models.JobRecord, path: Ancestry, *, before: int | None = None) -> LastGood | None:
    """Return the newest durable checkpoint before the first trouble that the job has not recovered from.

    With `before`, or before that iteration, if it is earlier. `None` if there is no trouble.
    """
    troubles = _troubles(session, job, path)
    if before is not None:
        troubles.append((before, ""))
    if not troubles:
        return None
    iteration, kind = min(troubles, key=lambda trouble: trouble[0])
    # The loss was computed with the weights of the iteration before, whose checkpoint may have the damage already.
    found = checkpoints.newest_standing(session, job.name, path, iteration - 2)
    return LastGood(kind=kind, iteration=iteration, checkpoint=found)


def _troubles(session: Session, job: models.JobRecord, path: Ancestry) -> list[tuple[int, str]]:
    """Return iterations with a wrong loss on the path to the current one, each with a kind of alert rule.

    They are those of open alerts and, of a job that has ended, of the alerts that its end resolved.
    """
    rows = models.AlertRecord
    attempt = session.get(models.AttemptRecord, (job.name, job.uid))
    ended = and_(rows.resolved_why == ENDED, rows.resolved_at >= (attempt.started_at if attempt else 0.0))
    query = select(rows.iteration, rows.lineage, rows.kind)
    query = query.where(rows.job == job.name, rows.iteration.is_not(None))
    query = query.where(or_(rows.resolved_at.is_(None), ended))
    found = [
        (iteration or 0, kind)
        for iteration, lineage, kind in session.execute(query)
        if (iteration or 0, lineage or 0) in path
    ]
    recent = recent_of(job)
    last = recent.finite_loss_iteration
    if last is not None and not math.isfinite(recent.metrics.get("loss", 0.0)) and last < job.iteration:
        found.append((last + 1, "loss_nan"))
    return found


# ---- what open alerts offer ---------------------------------------------------------------------


def abandoned(
    session: Session, job: str, rows: Iterable[models.AlertRecord]
) -> list[tuple[models.AlertRecord, int]]:
    """Return the alerts about iterations that a restore abandoned, each with the iteration restored to."""
    found = session.get_one(models.JobRecord, job)
    starts = lineage_starts(session, [job]).get(job, [])
    here = Ancestry(starts, found.lineage)
    return [
        (row, here.fork(Ancestry(starts, row.lineage), row.iteration))
        for row in rows
        if row.iteration is not None and row.lineage is not None and (row.iteration, row.lineage) not in here
    ]


def is_outdated(session: Session, job: str, rows: Sequence[models.AlertRecord]) -> bool:
    """Return whether the open alerts of a job offer another checkpoint than they should."""
    found = session.get_one(models.JobRecord, job)
    chosen = _offer(session, found, rows)
    return any(row.last_good != (chosen and chosen.id) for row in rows) or (
        chosen is not None and chosen.pinned_at is None
    )


def keep(session: Session, job: str, *, now: float) -> None:
    """Keep the checkpoint that the open alerts of a job offer, and release those that none offers any more.

    The audit log has one row per alert, about the first checkpoint that is kept for it. Its release, by the end of
    the alert, has none, nor have the older checkpoints that follow where retention was faster.
    """
    found, rows = session.get_one(models.JobRecord, job), models.AlertRecord
    query = select(rows).where(rows.job == job, rows.resolved_at.is_(None), rows.iteration.is_not(None))
    offering = session.scalars(query.order_by(rows.id)).all()
    chosen = _offer(session, found, offering)
    for point in pins.kept_for_alerts(session, job):
        if point is chosen:
            point.pinned_by = pins.author(offering[0].id)  # the alert that it was kept for may have ended
        else:
            point.pinned_by = point.pinned_at = None
    if chosen is not None:
        first = offering[0]
        kept = pins.keep_for_alert(session, found, chosen, first.id, now=now)
        if kept and first.last_good is None:
            session.flush()
            audit.record(
                session, who=pins.author(first.id), action="checkpoint.keep", now=now, job=job,
                project=found.project,
                after={"checkpoint": chosen.id, "rule": first.rule, "until": "the alert resolves"},
            )  # fmt: skip
    for row in offering:
        row.last_good = None if chosen is None else chosen.id
    session.flush()


def _offer(
    session: Session, job: models.JobRecord, rows: Sequence[models.AlertRecord]
) -> models.CheckpointRecord | None:
    path = ancestry_of(session, job)
    if not any((row.iteration or 0, row.lineage or 0) in path for row in rows):
        return None
    found = find(session, job, path)
    return None if found is None else found.checkpoint
