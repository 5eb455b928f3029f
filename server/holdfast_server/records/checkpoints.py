"""Checkpoints of jobs, as agents report them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import BindParameter, ColumnElement, Select, and_, func, or_, select, update
from sqlalchemy.orm import Session

from holdfast.protocol import ids, wire
from holdfast.protocol.field_types import MAX_ITERATION, ChangedTensor, RankCheckpointTimes
from holdfast.protocol.jobs import DELETED_BY_RETENTION, CheckpointInfo, RecentFailures
from holdfast.protocol.wire import MAX_CHANGED_TENSORS, MOST_RANK_SPANS
from holdfast_server import models
from holdfast_server.core.encoding import answer_from
from holdfast_server.core.errors import CheckpointNotFound, InvalidSetting
from holdfast_server.db import named_jobs
from holdfast_server.records.ancestry import Ancestry, ancestries, ancestry_of

_PACKED = ("ranks", "changed", "metrics")
_COLUMNS = tuple(name for name in wire.Checkpoint.__struct_fields__ if name not in _PACKED)
_metrics = msgspec.msgpack.Decoder(dict[str, float])
DURABLE = "durable"
DAMAGED = "damaged"
UNDER_WAY = ("snapshot", "persisting")
IN_STORE = (DURABLE, *UNDER_WAY, "damaged")
"""States of checkpoints that are in the store or being written to it; not of failed or retired ones."""
NAMED_AT_ONCE = 1000
"""Most ids in one statement: databases limit the number of parameters."""
ENDED = "the attempt ended before it was durable"


_ranks = msgspec.msgpack.Decoder(list[RankCheckpointTimes])
_changed = msgspec.msgpack.Decoder(list[ChangedTensor])

_rows = models.CheckpointRecord
_DURABLE_COUNTS = (
    select(_rows.job, func.count()).where(_rows.job.in_(named_jobs()), _rows.state == DURABLE).group_by(_rows.job)
)


def as_row(
    checkpoint: models.CheckpointRecord,
    ancestry: Ancestry,
    *,
    ranks: int = 0,
    changed: bool = False,
    metrics: bool = False,
    verdict: str | None = None,
    verified_at: float | None = None,
) -> CheckpointInfo:
    """Return a checkpoint as the API shows it.

    Args:
        ranks: how many ranks at most are shown with their times, the slowest.
        changed: whether to show the tensors of which it stores only rows.
        metrics: whether to show its metrics.
        verdict: what its last complete verification found, at `verified_at`.
    """
    return answer_from(
        checkpoint,
        CheckpointInfo,
        pinned=checkpoint.pinned_at is not None,
        abandoned=(checkpoint.iteration, checkpoint.lineage) not in ancestry,
        restorable=checkpoint.state == DURABLE,
        inexact=ancestry.inexact.get(checkpoint.lineage),
        ranks=_ranks.decode(checkpoint.ranks)[:ranks] if ranks and checkpoint.ranks else [],
        changed=_changed.decode(checkpoint.changed) if changed and checkpoint.changed else [],
        metrics=_metrics.decode(checkpoint.metrics) if metrics and checkpoint.metrics else {},
        verified=verdict,
        verified_at=verified_at,
    )


def taken_at() -> ColumnElement[float]:
    """Return when a checkpoint was taken; of one known only from an inventory, when it was found."""
    return func.coalesce(models.CheckpointRecord.snapshot_started_at, models.CheckpointRecord.at)


def find(session: Session, job: models.JobRecord, checkpoint: str) -> models.CheckpointRecord:
    """Find a checkpoint by its id. Raises CheckpointNotFound; InvalidSetting: it is not an id."""
    row = session.get(models.CheckpointRecord, (job.name, checkpoint))
    if row is not None:
        return row
    try:
        iteration, _ = ids.parse_checkpoint_id(checkpoint)
    except ValueError as error:
        raise InvalidSetting("checkpoint", str(error)) from None
    ancestry = ancestry_of(session, job)
    nearest = at_or_before(session, job.name, ancestry, iteration)
    raise CheckpointNotFound(iteration, as_row(nearest, ancestry) if nearest else None)


class LastDurable(NamedTuple):
    iteration: int
    at: float


def last_durable(session: Session, jobs: list[str]) -> dict[str, models.CheckpointRecord]:
    """Return by job the newest durable checkpoint that stands."""
    return {row.job: row for row in session.scalars(_last_durable_query(), {"jobs": jobs})}


@cache
def _last_durable_query() -> Select[models.CheckpointRecord]:
    query: Select[models.CheckpointRecord] = _newest_standing(select(models.CheckpointRecord), named_jobs())
    return query


def last_durable_of_many(session: Session, jobs: Select[str]) -> dict[str, LastDurable]:
    """Return position and time of the newest durable checkpoint of each job that a query selects."""
    rows = models.CheckpointRecord
    query = _newest_standing(select(rows.job, rows.iteration, rows.at), jobs.correlate(None))
    return {job: LastDurable(iteration, at) for job, iteration, at in session.execute(query)}


def _newest_standing(query: Any, jobs: BindParameter[Any] | Select[str]) -> Any:
    """Restrict a query to the newest durable checkpoint of each lineage in the ancestry, the newest last."""
    rows, ancestry = models.CheckpointRecord, ancestries(jobs)
    newest = (
        select(func.max(rows.iteration))
        .where(rows.job == ancestry.c.job, rows.state == DURABLE, rows.lineage == ancestry.c.lineage)
        .where(rows.iteration <= ancestry.c.upto)
        .scalar_subquery()
    )
    last = select(ancestry.c.job, ancestry.c.lineage, newest.label("iteration")).cte("last_durable")
    same = (rows.job == last.c.job, rows.lineage == last.c.lineage, rows.iteration == last.c.iteration)
    query = query.join(last, and_(*same)).where(rows.state == DURABLE)
    return query.order_by(rows.iteration, rows.lineage)


def newest_standing(
    session: Session, job: str, ancestry: Ancestry, iteration: int
) -> models.CheckpointRecord | None:
    """Return the newest durable checkpoint that stands, at an iteration or before."""
    rows = models.CheckpointRecord
    query = select(rows).where(rows.job == job, rows.state == DURABLE, stands(ancestry))
    query = query.where(rows.iteration <= iteration).order_by(rows.iteration.desc(), rows.lineage.desc())
    return session.scalars(query.limit(1)).first()


def at_or_before(session: Session, job: str, ancestry: Ancestry, iteration: int) -> models.CheckpointRecord | None:
    """Return the best match for a restore to `iteration`: of the job's ancestry, else of any lineage."""
    here = newest_standing(session, job, ancestry, iteration)
    if here is not None and here.iteration == iteration:
        return here
    rows = models.CheckpointRecord
    exact = select(rows).where(rows.job == job, rows.state == DURABLE, rows.iteration == iteration)
    elsewhere = session.scalars(exact.order_by(rows.lineage.desc()).limit(1)).first()
    if elsewhere is not None or here is not None:
        return elsewhere or here
    earlier = select(rows).where(rows.job == job, rows.state == DURABLE, rows.iteration <= iteration)
    return session.scalars(earlier.order_by(rows.iteration.desc()).limit(1)).first()


def at(session: Session, job: models.JobRecord, iteration: int) -> models.CheckpointRecord:
    """Return the checkpoint that a restore to an iteration uses. Raises CheckpointNotFound and InvalidSetting."""
    if not 0 <= iteration <= MAX_ITERATION:
        raise InvalidSetting("iteration", f"iteration {iteration} is outside 0 to {MAX_ITERATION}")
    ancestry = ancestry_of(session, job)
    found = at_or_before(session, job.name, ancestry, iteration)
    if found is None or found.iteration != iteration:
        raise CheckpointNotFound(iteration, as_row(found, ancestry) if found else None)
    return found


def damaged_at(session: Session, job: models.JobRecord, iteration: int) -> models.CheckpointRecord | None:
    """Return the damaged checkpoint of the newest lineage at an iteration that has no durable one."""
    rows = models.CheckpointRecord
    query = select(rows).where(rows.job == job.name, rows.iteration == iteration)
    found = session.scalars(query.order_by(rows.lineage.desc())).all()
    if any(row.state == DURABLE for row in found):
        return None
    return next((row for row in found if row.state == DAMAGED), None)


def stands(ancestry: Ancestry) -> ColumnElement[bool]:
    rows = models.CheckpointRecord
    return or_(*(and_(rows.lineage == number, rows.iteration <= end) for number, end in ancestry.upto.items()))


def named(session: Session, job: models.JobRecord, checkpoint: str) -> models.CheckpointRecord:
    """Return a checkpoint by its id, or by its iteration as `at` does. Raises as they do."""
    if checkpoint.isascii() and checkpoint.isdigit() and len(checkpoint) < 16:
        return at(session, job, int(checkpoint))
    return find(session, job, checkpoint)


def count(session: Session, jobs: Iterable[str]) -> dict[str, int]:
    """Count durable checkpoints by job."""
    found = session.execute(_DURABLE_COUNTS, {"jobs": list(jobs)})
    return {job: rows for job, rows in found}  # noqa: C416 - rows are not plain tuples


def failing(session: Session, jobs: list[str]) -> dict[str, RecentFailures]:
    """Return by job how many checkpoints have failed since the last durable one, of jobs whose newest one failed.

    Checkpoints that an attempt's death interrupted do not count: they say nothing about later ones.
    """
    return {
        row.job: RecentFailures(
            count=row._mapping["count"], reason=row.reason or "no reason given", since=row.since
        )
        for row in session.execute(_of_failing(), {"jobs": jobs})
    }


@cache
def _of_failing() -> Select[Any]:
    rows, at, named = models.CheckpointRecord, taken_at(), models.CheckpointRecord.job.in_(named_jobs())
    settled = rows.state.in_((DURABLE, "damaged"))
    good = select(rows.job, func.max(at).label("at")).where(named, settled).group_by(rows.job).subquery()
    # As a sum, to avoid the index on it, which would read all that succeeded.
    newest_first = ((at + 0.0).desc(), rows.iteration.desc(), rows.lineage.desc())
    ranked = (
        select(
            rows.job,
            rows.reason,
            func.count().over(partition_by=rows.job).label("count"),
            func.min(at).over(partition_by=rows.job).label("since"),
            func.row_number().over(partition_by=rows.job, order_by=newest_first).label("place"),
        )
        .outerjoin(good, good.c.job == rows.job)
        .where(named, rows.state.in_(("failed", "torn")), rows.reason.is_distinct_from(ENDED))
        .where(or_(good.c.at.is_(None), at > good.c.at))
        .subquery()
    )
    return select(ranked).where(ranked.c.place == 1)


def record(
    session: Session, job: str, event: wire.Checkpoint, *, attempt: int, sequence: int, ended: bool
) -> None:
    """Store a report of a checkpoint, unless a newer one, by attempt and sequence, is stored.

    `ended`: the reporting attempt has ended, so its unfinished checkpoints have failed.
    """
    row = session.get(models.CheckpointRecord, (job, event.id))
    if row is None:
        row = models.CheckpointRecord(job=job, id=event.id)
        session.add(row)
    elif (row.attempt, row.sequence) > (attempt, sequence):
        return
    elif event.state == "damaged":
        # An attempt that finds damage does not know how the checkpoint was taken.
        row.state, row.reason, row.attempt, row.sequence = event.state, event.reason, attempt, sequence
        return
    elif event.state == DURABLE and event.snapshot_started_at is None and row.state == "damaged":
        return  # it is described from its manifest alone, which may be sound
    elif event.state == DURABLE and event.snapshot_started_at is None and row.snapshot_started_at is not None:
        # The attempt that took it reported more than its manifest has.
        row.state, row.reason, row.attempt, row.sequence = event.state, event.reason, attempt, sequence
        return
    for name in _COLUMNS:
        setattr(row, name, getattr(event, name))
    row.ranks = msgspec.msgpack.encode(event.ranks[:MOST_RANK_SPANS]) if event.ranks else None
    row.changed = msgspec.msgpack.encode(event.changed[:MAX_CHANGED_TENSORS]) if event.changed else None
    row.metrics = msgspec.msgpack.encode(event.metrics) if event.metrics else None
    row.attempt, row.sequence = attempt, sequence
    if ended and row.state in UNDER_WAY:
        row.state, row.reason = "failed", ENDED


def fail_unfinished(session: Session, job: str, *, before_attempt: int) -> None:
    """Mark the unfinished checkpoints of earlier attempts as failed.

    This is an inference, so attempt and sequence stay: a late report or an inventory overrules it.
    """
    rows = models.CheckpointRecord
    session.execute(
        update(rows)
        .where(rows.job == job, rows.state.in_(UNDER_WAY), rows.attempt < before_attempt)
        .values(state="failed", reason=ENDED)
    )


def reset_report_order(session: Session, job: str) -> None:
    """Let any next report overrule the stored ones, because attempts count from 1 again."""
    rows = models.CheckpointRecord
    session.execute(update(rows).where(rows.job == job).values(attempt=0, sequence=-1))


def take_inventory(session: Session, job: str, event: wire.Inventory, *, attempt: int, sequence: int) -> None:
    """Apply an inventory of the store: its checkpoints are durable, and other durable ones are missing."""
    listed = set(event.checkpoints)
    known = _known(session, job, listed)
    newest = max((ids.parse_checkpoint_id(each)[::-1] for each in listed), default=(0, 0))
    for row in known.values():
        state, reason = _state_in(row, event, present=row.id in listed, newest=newest, attempt=attempt)
        if (row.attempt, row.sequence) <= (attempt, sequence):
            row.copy_place = event.copies.get(row.id)
            if state != row.state:
                row.state, row.reason, row.attempt, row.sequence = state, reason, attempt, sequence
    for checkpoint in listed - known.keys():
        iteration, lineage = ids.parse_checkpoint_id(checkpoint)
        session.add(
            models.CheckpointRecord(
                job=job,
                id=checkpoint,
                iteration=iteration,
                lineage=lineage,
                at=event.at,
                kind="scheduled",
                state=DURABLE,
                copy_place=event.copies.get(checkpoint),
                attempt=attempt,
                sequence=sequence,
            )
        )


def _known(session: Session, job: str, listed: Collection[str]) -> dict[str, models.CheckpointRecord]:
    """Return the checkpoints that an inventory may change: not those that retention removed, which are most."""
    rows = models.CheckpointRecord
    of_job = select(rows).where(rows.job == job)
    known = {row.id: row for row in session.scalars(of_job.where(rows.state.in_(IN_STORE)))}
    others = iter([checkpoint for checkpoint in listed if checkpoint not in known])
    while some := list(islice(others, NAMED_AT_ONCE)):
        known |= {row.id: row for row in session.scalars(of_job.where(rows.id.in_(some)))}
    return known


def _state_in(
    row: models.CheckpointRecord, event: wire.Inventory, *, present: bool, newest: tuple[int, int], attempt: int
) -> tuple[str, str | None]:
    """Return the state and its reason. `newest`: lineage and iteration of the newest checkpoint in the store."""
    if present:
        # a damaged checkpoint stays in the store
        return (row.state, row.reason) if row.state == "damaged" else (DURABLE, None)
    if row.state in (DURABLE, "damaged"):
        why = event.deleted.get(row.id)
        if why is None and _was_retired(row, newest=newest, attempt=attempt):
            why = f"inferred, since attempt {row.attempt} ended before it could report that"
        return "missing", f"{DELETED_BY_RETENTION}: {why}" if why else "it is no longer in the store"
    if row.state in UNDER_WAY and row.attempt < attempt:
        return "failed", ENDED
    return row.state, row.reason


def _was_retired(row: models.CheckpointRecord, *, newest: tuple[int, int], attempt: int) -> bool:
    """Return whether a checkpoint that is gone without a reason was deleted by retention, as far as one can know.

    An attempt that was killed between a deletion and its report says nothing, and the next one lists what is left.
    Retention deletes neither pinned checkpoints nor the newest one; a store that was emptied has an attempt 0.
    """
    return 0 < row.attempt < attempt and row.pinned_by is None and (row.lineage, row.iteration) < newest
