"""The last good checkpoint of a job: the newest sound one from before its loss became wrong.

This is the one rule for alerts, the timeline, the page of a job and the dialog of a restore.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sqlalchemy import and_, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast_server import models
from holdfast_server.records import checkpoints
from holdfast_server.records.ancestry import Ancestry
from holdfast_server.records.job_position import recent_of

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
    def reason(self) -> str:
        return f"before {_TROUBLES.get(self.kind, _OTHER)[1]} at {self.iteration:,}"


async def find(
    session: AsyncSession, job: models.JobRecord, path: Ancestry, *, before: int | None = None
) -> LastGood | None:
    """Return the newest durable checkpoint before the first trouble that the job has not recovered from.

    With `before`, or before that iteration, if it is earlier. `None` if there is no trouble.
    """
    troubles = await _troubles(session, job, path)
    if before is not None:
        troubles.append((before, ""))
    if not troubles:
        return None
    iteration, kind = min(troubles, key=lambda trouble: trouble[0])
    # The loss was computed with the weights of the iteration before, whose checkpoint may have the damage already.
    found = await checkpoints.newest_standing(session, job.name, path, iteration - 2)
    return LastGood(kind=kind, iteration=iteration, checkpoint=found)


async def _troubles(session: AsyncSession, job: models.JobRecord, path: Ancestry) -> list[tuple[int, str]]:
    """Return iterations with a wrong loss on the path to the current one, each with a kind of alert rule.

    They are those of open alerts and, of a job that has ended, of the alerts that its end resolved.
    """
    rows = models.AlertRecord
    attempt = await session.get(models.AttemptRecord, (job.name, job.uid))
    ended = and_(rows.resolved_why == ENDED, rows.resolved_at >= (attempt.started_at if attempt else 0.0))
    query = select(rows.iteration, rows.lineage, rows.kind)
    query = query.where(rows.job == job.name, rows.iteration.is_not(None))
    query = query.where(or_(rows.resolved_at.is_(None), ended))
    found = [
        (iteration or 0, kind)
        for iteration, lineage, kind in await session.execute(query)
        if (iteration or 0, lineage or 0) in path
    ]
    recent = recent_of(job)
    last = recent.finite_loss_iteration
    if last is not None and not math.isfinite(recent.metrics.get("loss", 0.0)) and last < job.iteration:
        found.append((last + 1, "loss_nan"))
    return found
