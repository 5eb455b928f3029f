"""Where a job stands by what is stored of it, and how a batch moves it on: its position, its pulse, its samples.

Core, in few statements, and synchronous: on SQLite a whole group of batches is stored by one thread at one go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from sqlalchemy import Connection, and_, bindparam, select, update

from holdfast.protocol import Gap, Lane
from holdfast_server import columns, models, samples, status, stretches, work
from holdfast_server.columns import Taken
from holdfast_server.db import Statement, insert

_recent = msgspec.msgpack.Decoder(samples.Recent)


@dataclass(frozen=True, slots=True)
class Said:
    """What of a batch moves a job on."""

    job: str
    uid: str
    attempt: int
    rank: int
    lane: Lane
    sequence: int
    sent_at: float
    iteration: int
    lineage: int
    samples: Taken | None
    gaps: Sequence[Gap]
    empty: bool
    """A sign of life and nothing else."""


@dataclass(frozen=True, slots=True)
class Standing:
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
    """The largest attempt number of the job."""
    progressed_at: float | None
    recent: bytes
    longest_seconds: float
    attempt_uid: str | None
    """Of the batch's own attempt; None where it is not known yet."""

    def ahead(self, said: Said) -> bool:
        """Whether a batch is the newest of its lane, and speaks for the job; a replayed one does not."""
        reached = self.sequence if said.lane == "control" else self.samples_sequence
        return said.rank == 0 and said.uid == self.uid and said.sequence > reached

    @property
    def fresh(self) -> bool:
        """The current attempt has only shown that it lives."""
        return max(self.sequence, self.samples_sequence) < 0


@dataclass(frozen=True, slots=True)
class Moved:
    ahead: bool
    left_out: bool
    """Metrics, for there were too many."""


_jobs, _attempts = models.table(models.Job), models.table(models.Attempt)
_OF_JOB = tuple(Standing.__dataclass_fields__)[:-1]
_lineages, _gaps = models.table(models.Lineage), models.table(models.Gap)
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
        insert(connection, models.Lineage)
        .values({name: bindparam(name) for name in ("job", "lineage", "at", "iteration", "last_iteration")})
        .on_conflict_do_nothing()
    )
)
_GAP = Statement(
    _gaps.insert().values({column.name: bindparam(column.name) for column in _gaps.c if column.name != "id"})
)


def find(connection: Connection, job: str, uid: str) -> Standing | None:
    row = _FIND.first(connection, {"job": job, "uid": uid})
    return None if row is None else Standing(*row)


def move_on(connection: Connection, standing: Standing, said: Said, *, now: float) -> Moved:
    """Store what a new batch measured, and where it says that the job is. Its attempt and job are known."""
    ahead = standing.ahead(said)
    changes: dict[str, Any] = {}
    if said.uid == standing.uid and said.rank == 0:
        changes["last_contact_at"] = now
    if ahead and not said.empty:
        changes["sequence" if said.lane == "control" else "samples_sequence"] = said.sequence
        changes |= _position(standing, said, now=now)
    latest = max(
        standing.latest_lineage, *(number for number, _ in (said.samples.tables if said.samples else ())), 0
    )
    if "lineage" in changes and said.lineage > latest:
        latest = said.lineage
        ensure_lineage(connection, said.job, said.lineage, at=said.sent_at)
    left_out = _measured(connection, said)
    if ahead and said.samples is not None:
        recent = _moved(_recent.decode(standing.recent) if standing.recent else samples.Recent(), said.samples)
        changes |= {"recent": msgspec.msgpack.encode(recent), "longest_seconds": status.longest_seconds(recent)}
    if latest > standing.latest_lineage:
        changes["latest_lineage"] = latest
    if changes:
        moved = {f"new_{name}": changes.get(name, getattr(standing, name)) for name in _CHANGING}
        _MOVE.run(connection, {"job": said.job, **moved})
    _attempt(connection, said, reached="iteration" in changes)
    return Moved(ahead, left_out)


def _position(standing: Standing, said: Said, *, now: float) -> Mapping[str, Any]:
    """The lanes overtake each other: of what they say the furthest counts, and a restore begins a new lineage."""
    here, there = (standing.lineage, standing.iteration), (said.lineage, said.iteration)
    if there < here and not standing.fresh:
        return {}
    moved = {"iteration": said.iteration, "lineage": said.lineage}
    return moved if here == there else {**moved, "progressed_at": now}


def _attempt(connection: Connection, said: Said, *, reached: bool) -> None:
    place = {"of_job": said.job, "of_uid": said.uid}
    more = len(said.samples) if said.samples is not None and said.rank == 0 else 0
    if reached:
        _REACH_ATTEMPT.run(connection, {**place, "more": more, "reached": said.iteration})
    elif more:
        _MOVE_ATTEMPT.run(connection, {**place, "more": more})


def _measured(connection: Connection, said: Said) -> bool:
    left_out = False
    for lineage, table in said.samples.tables if said.samples is not None else ():
        place = stretches.Place(said.job, said.uid, said.attempt, said.rank, said.sequence, lineage)
        added = stretches.add(connection, place, table)
        left_out = left_out or added.left_out
        work.add_samples(connection, job=said.job, uid=said.uid, rank=said.rank, lineage=lineage, samples=table)
        if added.new:
            ensure_lineage(connection, said.job, lineage, at=float(table.at[0]))
        last = int(table.iteration[-1])
        _REACH_LINEAGE.run(connection, {"of_job": said.job, "of_lineage": lineage, "least": last, "reached": last})
    if said.gaps:
        told = {"job": said.job, "uid": said.uid, "rank": said.rank, "at": said.sent_at}
        _GAP.run(connection, *({**told, **msgspec.structs.asdict(gap)} for gap in said.gaps))
    return left_out


def ensure_lineage(connection: Connection, job: str, lineage: int, *, at: float) -> None:
    """Its samples may be here before its beginning is: batches need not come in order."""
    row = {"job": job, "lineage": lineage, "at": at, "iteration": 0, "last_iteration": 0}
    _ENSURE_LINEAGE.run(connection, row)


def _moved(recent: samples.Recent, found: Taken) -> samples.Recent:
    newest = found.tables[-1][1]
    if len(newest) < samples.RECENT_ITERATIONS and len(found.tables) > 1:
        names = list(dict.fromkeys(name for _, table in found.tables for name in table.metrics))
        metrics = [columns.aligned(table.values, table.metrics, names) for _, table in found.tables]
        whole = np.concatenate(metrics, axis=1)
        newest = columns.Table(np.arange(whole.shape[1]), tuple(names), whole)
    last = dict(zip(newest.metrics, newest.values[len(columns.BUILT_IN) :, -1].tolist(), strict=True))
    loss = newest.metric(samples.LOSS)
    return samples.latest(
        recent,
        newest.seconds[-samples.RECENT_ITERATIONS :].tolist(),
        [] if loss is None else loss[-samples.RECENT_ITERATIONS :].tolist(),
        last,
    )


def recent_of(job: models.Job) -> samples.Recent:
    return _recent.decode(job.recent) if job.recent else samples.Recent()
