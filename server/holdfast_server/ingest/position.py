"""Position of a job as stored, and how a batch advances it: batch names, position, samples.

Synchronous, with few compiled statements: on SQLite one thread stores a whole group of batches in one transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from sqlalchemy import Connection, and_, bindparam, delete, func, select, update
from sqlalchemy.orm import Session, aliased

from holdfast.protocol import wire
from holdfast_server import models
from holdfast_server.db import Statement, insert
from holdfast_server.ingest.batches import Received
from holdfast_server.records import job_status, rank_totals
from holdfast_server.samples import limits, sample_codec, sample_series
from holdfast_server.samples.sample_codec import BatchSamples

ATTEMPTS_KEPT = 3
NAMES_KEPT = 1000
"""Batch names kept of each rank and lane, which are pruned after as many new batches."""


@dataclass(frozen=True, slots=True)
class JobPosition:
    project: str
    version: int
    uid: str
    last_contact_at: float
    sequence: int
    samples_sequence: int
    iteration: int
    lineage: int
    latest_lineage: int
    attempt: int
    """Largest attempt number of the job."""
    progressed_at: float | None
    recent: bytes
    longest_seconds: float
    attempt_uid: str | None
    """Uid of the batch's attempt; `None` if the attempt is not stored yet."""


@dataclass(frozen=True, slots=True)
class BatchEffect:
    ahead: bool
    left_out: bool
    """Whether metrics were left out, because there were too many."""


_jobs, _attempts = models.table(models.JobRecord), models.table(models.AttemptRecord)
_OF_JOB = tuple(JobPosition.__dataclass_fields__)[:-1]
_lineages, _gaps = models.table(models.LineageRecord), models.table(models.GapRecord)
_CHANGING = (
    "last_contact_at",
    "sequence",
    "samples_sequence",
    "iteration",
    "lineage",
    "latest_lineage",
    "progressed_at",
    "recent",
    "longest_seconds",
)
_FIND = Statement(
    select(*(_jobs.c[name] for name in _OF_JOB), _attempts.c.uid)
    .join_from(
        _jobs, _attempts, and_(_attempts.c.job == _jobs.c.name, _attempts.c.uid == bindparam("uid")), isouter=True
    )
    .where(_jobs.c.name == bindparam("job"))
)
_MOVE = Statement(
    update(_jobs)
    .where(_jobs.c.name == bindparam("job"))
    .values({name: bindparam(f"new_{name}") for name in _CHANGING})
)
_COUNT = (
    update(_attempts)
    .where(_attempts.c.job == bindparam("of_job"), _attempts.c.uid == bindparam("of_uid"))
    .values(iterations=_attempts.c.iterations + bindparam("more"))
)
_MOVE_ATTEMPT, _REACH_ATTEMPT = Statement(_COUNT), Statement(_COUNT.values(last_iteration=bindparam("reached")))
_REACH_LINEAGE = Statement(
    update(_lineages)
    .where(_lineages.c.job == bindparam("of_job"), _lineages.c.lineage == bindparam("of_lineage"))
    .where(_lineages.c.last_iteration < bindparam("least"))
    .values(last_iteration=bindparam("reached"))
)
_ENSURE_LINEAGE = Statement(
    lambda connection: (
        insert(connection, models.LineageRecord)
        .values({name: bindparam(name) for name in ("job", "lineage", "at", "iteration", "last_iteration")})
        .on_conflict_do_nothing()
    )
)
_GAP = Statement(
    _gaps.insert().values({column.name: bindparam(column.name) for column in _gaps.c if column.name != "id"})
)

_OF = ("job", "uid", "rank", "lane")
_batches = models.table(models.BatchRecord)
_of_one_lane = tuple(_batches.c[name] == bindparam(name) for name in _OF)
# No name is kept before one that covers all earlier batches, so the next kept name decides.
_KNOWN = Statement(
    select(_batches.c.sequence, _batches.c.digest, _batches.c.covers_earlier)
    .where(*_of_one_lane, _batches.c.sequence >= bindparam("sequence"))
    .order_by(_batches.c.sequence)
    .limit(1)
)
_REMEMBER = Statement(_batches.insert())
_NEWEST_TO_PRUNE = Statement(
    select(func.max(_batches.c.sequence)).where(*_of_one_lane, _batches.c.sequence <= bindparam("sequence"))
)
_PRUNE = Statement(delete(_batches).where(*_of_one_lane).where(_batches.c.sequence < bindparam("sequence")))
_STAND_FOR_ALL = Statement(
    update(_batches)
    .where(*(_batches.c[name] == bindparam(f"of_{name}") for name in (*_OF, "sequence")))
    .values(covers_earlier=bindparam("yes"))
)


def find(connection: Connection, job: str, uid: str) -> JobPosition | None:
    row = _FIND.first(connection, {"job": job, "uid": uid})
    return None if row is None else JobPosition(*row)


def get(connection: Connection, job: str, uid: str) -> JobPosition:
    """Find the position of a job that is known to be stored."""
    position = find(connection, job, uid)
    assert position is not None
    return position


def _name_of(batch: wire.Batch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in (*_OF, "sequence")}


def find_stored(connection: Connection, received: Received) -> bool | None:
    """Return True if this batch is stored, False if it is new, None if another batch has its name."""
    row = _KNOWN.first(connection, _name_of(received.batch))
    if row is None:
        return False
    sequence, first, covers_earlier = row
    if sequence != received.batch.sequence:
        return bool(covers_earlier)
    return True if bytes(first) == received.digest else None


def remember_name(connection: Connection, received: Received, *, now: float) -> None:
    """Remember the name of a batch; now and then replace the oldest names by one that covers them.

    This is safe because an agent sends each batch only when the previous one was acknowledged or refused.
    """
    named = _name_of(received.batch)
    _REMEMBER.run(connection, {**named, "received_at": now, "digest": received.digest, "covers_earlier": False})
    sequence = received.batch.sequence
    if sequence and sequence % NAMES_KEPT == 0:
        (oldest,) = _NEWEST_TO_PRUNE.first(connection, {**named, "sequence": sequence - NAMES_KEPT})
        if oldest is not None:
            place = {**named, "sequence": oldest}
            _STAND_FOR_ALL.run(connection, {"yes": True, **{f"of_{name}": place[name] for name in place}})
            _PRUNE.run(connection, place)


def prune_names(session: Session, job: str) -> None:
    """Keep only the last name of each rank and lane of attempts before the last three.

    An agent sends in order, and the spools of earlier attempts before its own batches. Of such an attempt, a batch
    up to the last name is a repetition, and a later one is new.
    """
    attempts, rows, later = models.AttemptRecord, models.BatchRecord, aliased(models.BatchRecord)
    newest = select(attempts.attempt).where(attempts.job == job).distinct().order_by(attempts.attempt.desc())
    oldest_kept = newest.offset(ATTEMPTS_KEPT - 1).limit(1).scalar_subquery()
    ended = (
        rows.job == job,
        rows.uid.in_(select(attempts.uid).where(attempts.job == job, attempts.attempt < oldest_kept)),
    )
    last = (
        select(func.max(later.sequence))
        .where(later.job == rows.job, later.uid == rows.uid, later.rank == rows.rank, later.lane == rows.lane)
        .scalar_subquery()
    )
    quietly = {"synchronize_session": False}
    session.execute(delete(rows).where(*ended, rows.sequence < last), execution_options=quietly)
    session.execute(update(rows).where(*ended).values(covers_earlier=True), execution_options=quietly)


def advance(connection: Connection, position: JobPosition, received: Received, *, now: float) -> BatchEffect:
    """Store the samples and the position of a new batch, whose job and attempt are stored."""
    batch, measured = received.batch, received.samples
    changes: dict[str, Any] = {}
    speaks = batch.rank == 0 and batch.uid == position.uid
    if speaks:
        changes["last_contact_at"] = now
    reached = "sequence" if batch.lane == "control" else "samples_sequence"
    ahead = speaks and batch.sequence > getattr(position, reached)
    if ahead and not received.empty:
        changes[reached] = batch.sequence
        changes |= _position_changes(position, batch, now=now)
    latest = max([position.latest_lineage, *(number for number, _ in (measured.tables if measured else ()))])
    if "lineage" in changes and batch.lineage > latest:
        latest = batch.lineage
        ensure_lineage(connection, batch.job, batch.lineage, at=batch.sent_at)
    left_out = _store_samples(connection, received)
    if ahead and measured is not None:
        recent = _recent_samples(limits.recent_samples(position.recent), measured)
        changes |= {
            "recent": msgspec.msgpack.encode(recent),
            "longest_seconds": job_status.longest_seconds(recent),
        }
    if latest > position.latest_lineage:
        changes["latest_lineage"] = latest
    if changes:
        moved = {f"new_{name}": changes.get(name, getattr(position, name)) for name in _CHANGING}
        _MOVE.run(connection, {"job": batch.job, **moved})
    more = len(measured) if measured is not None and batch.rank == 0 else 0
    place = {"of_job": batch.job, "of_uid": batch.uid, "more": more}
    if "iteration" in changes:
        _REACH_ATTEMPT.run(connection, {**place, "reached": batch.iteration})
    elif more:
        _MOVE_ATTEMPT.run(connection, place)
    return BatchEffect(ahead, left_out)


def _position_changes(position: JobPosition, batch: wire.Batch, *, now: float) -> Mapping[str, Any]:
    """Return the columns of the job that the batch's position changes.

    The lanes overtake each other: the furthest position counts, and a restore begins a new lineage.
    """
    here, there = (position.lineage, position.iteration), (batch.lineage, batch.iteration)
    shows_life_only = max(position.sequence, position.samples_sequence) < 0
    if there < here and not shows_life_only:
        return {}
    moved = {"iteration": batch.iteration, "lineage": batch.lineage}
    return moved if here == there else {**moved, "progressed_at": now}


def _store_samples(connection: Connection, received: Received) -> bool:
    """Store samples and gaps; return whether metrics were left out."""
    batch, left_out = received.batch, False
    key = {"job": batch.job, "uid": batch.uid, "rank": batch.rank}
    for lineage, table in received.samples.tables if received.samples is not None else ():
        place = {**key, "attempt": batch.attempt, "sequence": batch.sequence, "lineage": lineage}
        added = sample_series.add(connection, place, table)
        left_out = left_out or added.left_out
        rank_totals.add_samples(connection, key, lineage, table)
        if added.new:
            ensure_lineage(connection, batch.job, lineage, at=float(table.at[0]))
        last = int(table.iteration[-1])
        _REACH_LINEAGE.run(
            connection, {"of_job": batch.job, "of_lineage": lineage, "least": last, "reached": last}
        )
    if batch.gaps:
        place = {**key, "at": batch.sent_at}
        _GAP.run(connection, *({**place, **msgspec.structs.asdict(gap)} for gap in batch.gaps))
    return left_out


def ensure_lineage(connection: Connection, job: str, lineage: int, *, at: float) -> None:
    """Add the row of a lineage if it is missing: samples may arrive before the event that starts the lineage."""
    row = {"job": job, "lineage": lineage, "at": at, "iteration": 0, "last_iteration": 0}
    _ENSURE_LINEAGE.run(connection, row)


def _recent_samples(recent: limits.RecentSamples, found: BatchSamples) -> limits.RecentSamples:
    newest = found.tables[-1][1]
    finite = None
    if (losses := newest.metric(limits.LOSS)) is not None and (places := np.flatnonzero(np.isfinite(losses))).size:
        finite = int(newest.iteration[places[-1]])
    if len(newest) < limits.RECENT_ITERATIONS and len(found.tables) > 1:
        names = list(dict.fromkeys(name for _, table in found.tables for name in table.metrics))
        metrics = [sample_codec.aligned(table.values, table.metrics, names) for _, table in found.tables]
        whole = np.concatenate(metrics, axis=1)
        newest = sample_codec.Table(np.arange(whole.shape[1]), tuple(names), whole)
    last = dict(zip(newest.metrics, newest.values[len(sample_codec.BUILT_IN) :, -1].tolist(), strict=True))
    loss, tokens = newest.metric(limits.LOSS), newest.metric(limits.TOKENS)
    return limits.latest(
        recent,
        newest.seconds[-limits.RECENT_ITERATIONS :].tolist(),
        [] if loss is None else loss[-limits.RECENT_ITERATIONS :].tolist(),
        last,
        finite,
        [] if tokens is None else tokens[-limits.RECENT_ITERATIONS :].tolist(),
    )
