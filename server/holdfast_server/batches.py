"""The names of the batches that were committed, so that each is stored once."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from sqlalchemy import Connection, bindparam, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from holdfast.protocol import Lane
from holdfast_server import models
from holdfast_server.db import Statement

ATTEMPTS_KEPT = 3
NAMES_KEPT = 1000
"""Of each rank and lane; it is looked after when as many have come since."""
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Key:
    """A batch's name for ever."""

    job: str
    uid: str
    rank: int
    lane: Lane
    sequence: int

    def parameters(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "uid": self.uid,
            "rank": self.rank,
            "lane": self.lane,
            "sequence": self.sequence,
        }


def digest_of(body: bytes) -> bytes:
    return blake2b(body, digest_size=DIGEST_BYTES).digest()


_OF = ("job", "uid", "rank", "lane")
_table = models.table(models.Batch)
_of_one_lane = tuple(_table.c[name] == bindparam(name) for name in _OF)
# No name is kept before one that stands for all before it, so that the next one says it all.
_KNOWN = Statement(
    select(_table.c.sequence, _table.c.digest, _table.c.all_before)
    .where(*_of_one_lane, _table.c.sequence >= bindparam("sequence"))
    .order_by(_table.c.sequence)
    .limit(1)
)
_REMEMBER = Statement(insert(_table))
_NEWEST_TO_PRUNE = Statement(
    select(func.max(_table.c.sequence)).where(*_of_one_lane, _table.c.sequence <= bindparam("sequence"))
)
_PRUNE = Statement(delete(_table).where(*_of_one_lane).where(_table.c.sequence < bindparam("sequence")))
_STAND_FOR_ALL = Statement(
    update(_table)
    .where(*(_table.c[name] == bindparam(f"of_{name}") for name in (*_OF, "sequence")))
    .values(all_before=bindparam("yes"))
)


def known(connection: Connection, key: Key, digest: bytes) -> bool | None:
    """Whether this batch is stored: True; None: another one is, under its name. False: it is new."""
    row = _KNOWN.first(connection, key.parameters())
    if row is None:
        return False
    sequence, first, all_before = row
    if sequence != key.sequence:
        return bool(all_before)
    return True if bytes(first) == digest else None


def remember(connection: Connection, key: Key, digest: bytes, *, now: float) -> None:
    """Its name is never forgotten; that of one long before it stands for all before that.

    That is as safe as the order in which an agent sends: each when the one before is acknowledged or refused.
    """
    named = key.parameters()
    _REMEMBER.run(connection, {**named, "received_at": now, "digest": digest, "all_before": False})
    if key.sequence and key.sequence % NAMES_KEPT == 0:
        (oldest,) = _NEWEST_TO_PRUNE.first(connection, {**named, "sequence": key.sequence - NAMES_KEPT})
        if oldest is not None:
            place = {**named, "sequence": oldest}
            _STAND_FOR_ALL.run(connection, {"yes": True, **{f"of_{name}": place[name] for name in place}})
            _PRUNE.run(connection, place)


async def prune(session: AsyncSession, job: str) -> None:
    """Of attempts before the last three, keep the last name of each rank and lane, which stands for all before it.

    An agent sends in order, and what earlier attempts have left before its own: of such an attempt, what comes
    up to its last name comes a second time, and what comes after it is new.
    """
    attempts, rows, later = models.Attempt, models.Batch, aliased(models.Batch)
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
    await session.execute(delete(rows).where(*ended, rows.sequence < last), execution_options=quietly)
    await session.execute(update(rows).where(*ended).values(all_before=True), execution_options=quietly)
