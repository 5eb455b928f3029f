"""What is known of the checkpoints in a job's store."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import BindParameter, ColumnElement, Select, and_, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.protocol import messages
from holdfast.protocol.jobs import CheckpointRow, Failing
from holdfast.protocol.messages import MAX_ITERATION, MOST_RANKS_TOLD, RankSpan
from holdfast_server import models
from holdfast_server.core.errors import InvalidSetting, NoSuchCheckpoint
from holdfast_server.db import named_jobs
from holdfast_server.records.ancestry import Ancestry, ancestries, ancestry_of

_COLUMNS = tuple(name for name in messages.Checkpoint.__struct_fields__ if name != "ranks")
_OPERATORS = ("label", "pinned_by", "pinned_at")
"""What operators say of it, which no agent's word changes."""
DURABLE = "durable"
UNDER_WAY = ("snapshot", "persisting")
IN_STORE = (DURABLE, *UNDER_WAY, "damaged")
"""What is in the store or on its way there, for good or ill; not what failed, and not what retention took."""
NAMED_AT_ONCE = 1000
"""In one statement: databases take so many parameters and no more."""
ENDED = "the attempt ended before it was durable"


_ranks = msgspec.msgpack.Decoder(list[RankSpan])


def as_row(checkpoint: models.CheckpointRecord, ancestry: Ancestry, *, ranks: int = 0) -> CheckpointRow:
    """`ranks`: of how many, the slowest, it is told what their parts took."""
    return CheckpointRow(
        **{name: getattr(checkpoint, name) for name in (*_COLUMNS, *_OPERATORS)},
        pinned=checkpoint.pinned_at is not None,
        abandoned=(checkpoint.iteration, checkpoint.lineage) not in ancestry,
        restorable=checkpoint.state == DURABLE,
        ranks=_ranks.decode(checkpoint.ranks)[:ranks] if ranks and checkpoint.ranks else [],
    )


def taken_at() -> ColumnElement[float]:
    """When it was taken; of one that is known from an inventory only, when it was found."""
    return func.coalesce(models.CheckpointRecord.snapshot_started_at, models.CheckpointRecord.at)


async def find(session: AsyncSession, job: models.JobRecord, checkpoint: str) -> models.CheckpointRecord:
    """Raises NoSuchCheckpoint with the nearest earlier one, and InvalidSetting for what is no id at all."""
    row = await session.get(models.CheckpointRecord, (job.name, checkpoint))
    if row is not None:
        return row
    try:
        iteration, _ = messages.parse_checkpoint_id(checkpoint)
    except ValueError as error:
        raise InvalidSetting("checkpoint", str(error)) from None
    ancestry = await ancestry_of(session, job)
    nearest = await at_or_before(session, job.name, ancestry, iteration)
    raise NoSuchCheckpoint(iteration, as_row(nearest, ancestry) if nearest else None)


class LastDurable(NamedTuple):
    iteration: int
    at: float


async def last_durable(session: AsyncSession, jobs: list[str]) -> dict[str, models.CheckpointRecord]:
    """The newest on the way to where each job is."""
    return {row.job: row for row in await session.scalars(_of_last_durable(), {"jobs": jobs})}


@cache
def _of_last_durable() -> Select[models.CheckpointRecord]:
    query: Select[models.CheckpointRecord] = _newest_on_the_way(select(models.CheckpointRecord), named_jobs())
    return query


async def last_durable_of_many(session: AsyncSession, jobs: Select[str]) -> dict[str, LastDurable]:
    """The same in short, of all jobs whose names a question finds."""
    rows = models.CheckpointRecord
    query = _newest_on_the_way(select(rows.job, rows.iteration, rows.at), jobs.correlate(None))
    return {job: LastDurable(iteration, at) for job, iteration, at in await session.execute(query)}


def _newest_on_the_way(query: Any, jobs: BindParameter[Any] | Select[str]) -> Any:
    """Of checkpoints: one a lineage on the way; the last of a job's is the newest."""
    rows, way = models.CheckpointRecord, ancestries(jobs)
    newest = (
        select(func.max(rows.iteration))
        .where(rows.job == way.c.job, rows.state == DURABLE, rows.lineage == way.c.lineage)
        .where(rows.iteration <= way.c.upto)
        .scalar_subquery()
    )
    last = select(way.c.job, way.c.lineage, newest.label("iteration")).cte("last_durable")
    same = (rows.job == last.c.job, rows.lineage == last.c.lineage, rows.iteration == last.c.iteration)
    query = query.join(last, and_(*same)).where(rows.state == DURABLE)
    return query.order_by(rows.iteration, rows.lineage)


async def _upto(
    session: AsyncSession, job: str, ancestry: Ancestry, iteration: int
) -> models.CheckpointRecord | None:
    """The newest durable one on the way that is not after an iteration."""
    rows = models.CheckpointRecord
    query = select(rows).where(rows.job == job, rows.state == DURABLE, on_the_way(ancestry))
    query = query.where(rows.iteration <= iteration).order_by(rows.iteration.desc(), rows.lineage.desc())
    return (await session.scalars(query.limit(1))).first()


async def at_or_before(
    session: AsyncSession, job: str, ancestry: Ancestry, iteration: int
) -> models.CheckpointRecord | None:
    """What a restore to `iteration` can mean: the lineage that the job is on first, then any other."""
    here = await _upto(session, job, ancestry, iteration)
    if here is not None and here.iteration == iteration:
        return here
    rows = models.CheckpointRecord
    exact = select(rows).where(rows.job == job, rows.state == DURABLE, rows.iteration == iteration)
    elsewhere = (await session.scalars(exact.order_by(rows.lineage.desc()).limit(1))).first()
    if elsewhere is not None or here is not None:
        return elsewhere or here
    earlier = select(rows).where(rows.job == job, rows.state == DURABLE, rows.iteration <= iteration)
    return (await session.scalars(earlier.order_by(rows.iteration.desc()).limit(1))).first()


async def at(session: AsyncSession, job: models.JobRecord, iteration: int) -> models.CheckpointRecord:
    """What a restore to an iteration goes back to. Raises NoSuchCheckpoint with the nearest earlier one."""
    if not 0 <= iteration <= MAX_ITERATION:
        raise InvalidSetting("iteration", f"iteration {iteration} is outside 0 to {MAX_ITERATION}")
    ancestry = await ancestry_of(session, job)
    found = await at_or_before(session, job.name, ancestry, iteration)
    if found is None or found.iteration != iteration:
        raise NoSuchCheckpoint(iteration, as_row(found, ancestry) if found else None)
    return found


def on_the_way(ancestry: Ancestry) -> ColumnElement[bool]:
    rows = models.CheckpointRecord
    return or_(*(and_(rows.lineage == number, rows.iteration <= end) for number, end in ancestry.upto.items()))


async def count(session: AsyncSession, jobs: Iterable[str]) -> dict[str, int]:
    """Durable ones, by job."""
    found = await session.execute(_of_durable(), {"jobs": list(jobs)})
    return {job: rows for job, rows in found}  # noqa: C416 - rows are not plain tuples


@cache
def _of_durable() -> Select[str, int]:
    rows = models.CheckpointRecord
    named = rows.job.in_(named_jobs())
    return select(rows.job, func.count()).where(named, rows.state == DURABLE).group_by(rows.job)


async def failing(session: AsyncSession, jobs: list[str]) -> dict[str, Failing]:
    """Of jobs whose newest settled checkpoint came to nothing: how many did so since one was durable.

    What was under way when an attempt died is left out: that says nothing of the ones to come.
    """
    return {
        row.job: Failing(count=row._mapping["count"], reason=row.reason or "no reason was given", since=row.since)
        for row in await session.execute(_of_failing(), {"jobs": jobs})
    }


@cache
def _of_failing() -> Select[Any]:
    rows, at, named = models.CheckpointRecord, taken_at(), models.CheckpointRecord.job.in_(named_jobs())
    settled = rows.state.in_((DURABLE, "damaged"))
    good = select(rows.job, func.max(at).label("at")).where(named, settled).group_by(rows.job).subquery()
    # As a sum: the index on it would lead past all that succeeded.
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


async def record(
    session: AsyncSession, job: str, event: messages.Checkpoint, *, attempt: int, sequence: int, ended: bool
) -> None:
    """The newest word on a checkpoint wins; newest by attempt and sequence, not by arrival.

    `ended`: the attempt that says so is over, and what it had under way comes to nothing.
    """
    row = await session.get(models.CheckpointRecord, (job, event.id))
    if row is None:
        row = models.CheckpointRecord(job=job, id=event.id)
        session.add(row)
    elif (row.attempt, row.sequence) > (attempt, sequence):
        return
    elif event.state == "damaged":
        # Whoever finds it damaged was not there when it was taken.
        row.state, row.reason, row.attempt, row.sequence = event.state, event.reason, attempt, sequence
        return
    for name in _COLUMNS:
        setattr(row, name, getattr(event, name))
    row.ranks = msgspec.msgpack.encode(event.ranks[:MOST_RANKS_TOLD]) if event.ranks else None
    row.attempt, row.sequence = attempt, sequence
    if ended and row.state in UNDER_WAY:
        row.state, row.reason = "failed", ENDED


async def give_up(session: AsyncSession, job: str, *, before_attempt: int) -> None:
    """What earlier attempts had under way comes to nothing: nobody is left to finish it.

    That is a conclusion and no word from the store, so that whoever spoke last stays noted as such: what the
    attempt itself still has to say of it, and any inventory, overrules it.
    """
    rows = models.CheckpointRecord
    await session.execute(
        update(rows)
        .where(rows.job == job, rows.state.in_(UNDER_WAY), rows.attempt < before_attempt)
        .values(state="failed", reason=ENDED)
    )


async def forget_who_spoke(session: AsyncSession, job: str) -> None:
    """Attempts count from 1 again: whatever the next one says of a checkpoint is the newest word on it."""
    rows = models.CheckpointRecord
    await session.execute(update(rows).where(rows.job == job).values(attempt=0, sequence=-1))


async def take_inventory(
    session: AsyncSession, job: str, event: messages.Inventory, *, attempt: int, sequence: int
) -> None:
    """What the store holds is durable; what was durable and is not there is missing."""
    listed = set(event.checkpoints)
    known = await _known(session, job, listed)
    for row in known.values():
        state, reason = _state_in(row, present=row.id in listed, attempt=attempt)
        if state != row.state and (row.attempt, row.sequence) <= (attempt, sequence):
            row.state, row.reason, row.attempt, row.sequence = state, reason, attempt, sequence
    for checkpoint in listed - known.keys():
        iteration, lineage = messages.parse_checkpoint_id(checkpoint)
        session.add(
            models.CheckpointRecord(
                job=job,
                id=checkpoint,
                iteration=iteration,
                lineage=lineage,
                at=event.at,
                kind="scheduled",
                state=DURABLE,
                attempt=attempt,
                sequence=sequence,
            )
        )


async def _known(session: AsyncSession, job: str, listed: Collection[str]) -> dict[str, models.CheckpointRecord]:
    """Those that an inventory may have something to say of. What retention took long ago is not looked at: in the
    life of a job that is nearly all, and an inventory comes with each one that goes."""
    rows = models.CheckpointRecord
    of_job = select(rows).where(rows.job == job)
    known = {row.id: row for row in await session.scalars(of_job.where(rows.state.in_(IN_STORE)))}
    others = iter([checkpoint for checkpoint in listed if checkpoint not in known])
    while some := list(islice(others, NAMED_AT_ONCE)):
        known |= {row.id: row for row in await session.scalars(of_job.where(rows.id.in_(some)))}
    return known


def _state_in(row: models.CheckpointRecord, *, present: bool, attempt: int) -> tuple[str, str | None]:
    if present:
        # A damaged one is still in the store; what made it damaged has not gone away.
        return (row.state, row.reason) if row.state == "damaged" else (DURABLE, None)
    if row.state in (DURABLE, "damaged"):
        return "missing", "it is no longer in the store"
    if row.state in UNDER_WAY and row.attempt < attempt:
        return "failed", ENDED
    return row.state, row.reason
