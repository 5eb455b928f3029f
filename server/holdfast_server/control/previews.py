"""Preview of the effects of a restore."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from holdfast.protocol.analyses import RestorePreview
from holdfast_server import models
from holdfast_server.queries.job_view import JobView
from holdfast_server.records import last_good
from holdfast_server.records.ancestry import Ancestry
from holdfast_server.records.checkpoints import DURABLE, as_row, find, stands
from holdfast_server.records.job_status import restore_mode, restore_mode_text, status_of, waiting_host

RESTORES_LOOKED_AT = 5


def preview_restore(view: JobView, checkpoint: str) -> RestorePreview:
    """Preview what a restore would abandon, and how long it would take. Raises CheckpointNotFound."""
    session, row = view.session, view.job
    target = find(session, row, checkpoint)
    attempt = view.attempt
    here = view.ancestry()
    there = view.ancestry(target.lineage)
    fork = here.fork(there, min(target.iteration, row.iteration))
    alive = status_of(row, attempt, now=view.now).alive
    mode = restore_mode(attempt, alive=alive)
    waiting = waiting_host(session, attempt, alive=alive)
    estimate, rests_on = _estimate(session, target)
    if mode == "relaunch":
        estimate, rests_on = _start(attempt)
    seconds = _seconds(session, row, here, fork)
    trouble = last_good.find(session, row, here)
    repeated = trouble if trouble is not None and target.iteration < trouble.iteration else None
    world_size = max(1, attempt.world_size) if attempt else 1
    return RestorePreview(
        checkpoint=as_row(target, here),
        from_iteration=row.iteration,
        to_iteration=target.iteration,
        iterations_abandoned=row.iteration - fork,
        seconds_abandoned=seconds,
        gpu_hours_abandoned=None if seconds is None else seconds * world_size / 3600,
        points_abandoned=_points(session, row, here, fork),
        attempt=attempt.attempt if attempt else row.attempt,
        host=attempt.host if attempt else "",
        world_size=world_size,
        supervised=attempt is not None and attempt.supervised,
        estimated_seconds=estimate,
        estimated_from=rests_on,
        alive=alive,
        mode=mode,
        what=restore_mode_text(attempt, alive=alive, waiting=waiting),
        safety_checkpoint=mode != "next_start",
        repeats=repeated.trouble if repeated else "",
        repeats_at=repeated.iteration if repeated else None,
        batches_an_iteration=(attempt.batches_an_iteration if attempt else None) or 0,
    )


def _seconds(session: Session, job: models.JobRecord, here: Ancestry, fork: int) -> float | None:
    """Return the duration of the iterations after `fork` that stand, of repeated ones the last time."""
    rows = models.ChunkRecord
    newest_first = ((rows.uid == job.uid).desc(), rows.attempt.desc(), rows.uid)
    query = (
        select(rows.uid, rows.lineage, rows.first_iteration, rows.last_iteration, rows.seconds)
        .where(rows.job == job.name, rows.rank == 0, rows.last_iteration > fork, rows.lineage.in_(here.upto))
        .order_by(*newest_first)
    )
    ends = {lineage: min(end, job.iteration) for lineage, end in here.upto.items()}
    seconds, found = 0.0, False
    for _, chunks in groupby(session.execute(query), key=itemgetter(0)):
        begins = dict(ends)
        for _, lineage, first, last, spent in chunks:
            inside = min(last, ends[lineage]) - max(first, fork + 1) + 1
            begins[lineage] = min(begins[lineage], first - 1)
            if inside > 0:
                seconds, found = seconds + spent * inside / (last - first + 1), True
        # from its start on, this attempt repeated iterations of earlier ones
        ends = begins
    return seconds if found else None


def _points(session: Session, job: models.JobRecord, here: Ancestry, fork: int) -> int:
    rows = models.CheckpointRecord
    query = select(func.count()).where(rows.job == job.name, rows.state == DURABLE, rows.iteration > fork)
    return session.scalar(query.where(stands(here))) or 0


def _start(attempt: models.AttemptRecord | None) -> tuple[float | None, str]:
    """Estimate the duration of a restart from that of the attempt's start, and name the source."""
    seconds = None if attempt is None else attempt.start_seconds
    return seconds, "" if seconds is None else "the start of this attempt, up to its first iteration"


def _estimate(session: Session, target: models.CheckpointRecord) -> tuple[float | None, str]:
    """Estimate the duration of a restore from earlier ones, or from the writing of the checkpoint."""
    orders = models.RestoreOrderRecord
    query = (
        select(orders.seconds)
        .where(orders.job == target.job, orders.state == "restored", orders.seconds.is_not(None))
        .order_by(orders.created_at.desc())
        .limit(RESTORES_LOOKED_AT)
    )
    earlier = [seconds for seconds in session.scalars(query) if seconds is not None]
    if earlier:
        times = "the last restore" if len(earlier) == 1 else f"the last {len(earlier)} restores"
        return sum(earlier) / len(earlier), f"{times} of this job"
    if target.persist_seconds is None:
        return None, ""
    return target.persist_seconds + (target.snapshot_seconds or 0.0), "based on its write time"
