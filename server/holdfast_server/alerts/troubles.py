"""The newest wrong loss of a job, and the last good checkpoint before it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sqlalchemy import select

from holdfast.protocol.jobs import CheckpointInfo
from holdfast_server import models
from holdfast_server.alerts.conditions import KINDS
from holdfast_server.db import Database
from holdfast_server.queries.summaries import read_job
from holdfast_server.records import checkpoints
from holdfast_server.records.ancestry import ancestry_of
from holdfast_server.records.checkpoints import as_row
from holdfast_server.records.job_position import recent_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """An iteration with a wrong loss."""

    title: str
    """The rule that it breaks."""
    iteration: int
    good: CheckpointInfo | None
    """Newest durable checkpoint before it, if one is left."""


async def newest(db: Database, job: str) -> Trouble | None:
    """Return the iteration from which the loss is not finite, else the newest one that an alert is about.

    Only iterations of the current attempt that are on the path to the current one count. Raises UnknownJob.
    """
    rows = models.AlertRecord
    async with read_job(db, job) as (session, found):
        path, recent = await ancestry_of(session, found), recent_of(found)
        attempt = await session.get(models.AttemptRecord, (job, found.uid))
        place: tuple[str, int] | None = None
        last = recent.finite_loss_iteration
        if last is not None and not math.isfinite(recent.metrics.get("loss", 0.0)) and last < found.iteration:
            place = KINDS["loss_nan"].title, last + 1
        else:
            query = select(rows).where(rows.job == job, rows.iteration.is_not(None), rows.fired_at.is_not(None))
            query = query.where(rows.fired_at >= (attempt.started_at if attempt else 0.0))
            for row in await session.scalars(query.order_by(rows.id.desc()).limit(20)):
                if (row.iteration or 0, row.lineage or 0) in path and row.kind in KINDS:
                    place = KINDS[row.kind].title, row.iteration or 0
                    break
        if place is None:
            return None
        good = await checkpoints.last_good(session, found, place[1])
        return Trouble(title=place[0], iteration=place[1], good=None if good is None else as_row(good, path))
