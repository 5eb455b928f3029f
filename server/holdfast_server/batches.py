"""The names of the batches that were committed, so that each is stored once."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from sqlalchemy import and_, delete, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from holdfast_server import models

ATTEMPTS_KEPT = 3
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Key:
    """A batch's name for ever."""

    job: str
    uid: str
    rank: int
    sequence: int


def digest_of(body: bytes) -> bytes:
    return blake2b(body, digest_size=DIGEST_BYTES).digest()


async def known(session: AsyncSession, key: Key) -> models.Batch | None:
    """The row that says this batch is stored: its own, or the one that stands for it since it was pruned."""
    rows = models.Batch
    own = rows.sequence == key.sequence
    query = (
        select(rows)
        .where(rows.job == key.job, rows.uid == key.uid, rows.rank == key.rank)
        .where(or_(own, and_(rows.all_before, rows.sequence > key.sequence)))
        .order_by(rows.sequence)
        .limit(1)
    )
    return (await session.scalars(query)).first()


def remember(session: AsyncSession, key: Key, digest: bytes, *, now: float) -> None:
    session.add(
        models.Batch(
            job=key.job, uid=key.uid, rank=key.rank, sequence=key.sequence, received_at=now, digest=digest
        )
    )


async def prune(session: AsyncSession, job: str) -> None:
    """Of attempts before the last three, keep the last name of each rank, which stands for all before it.

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
        .where(later.job == rows.job, later.uid == rows.uid, later.rank == rows.rank)
        .scalar_subquery()
    )
    quietly = {"synchronize_session": False}
    await session.execute(delete(rows).where(*ended, rows.sequence < last), execution_options=quietly)
    await session.execute(update(rows).where(*ended).values(all_before=True), execution_options=quietly)
