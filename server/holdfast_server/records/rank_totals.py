"""Adding up what ranks did, in the transaction that takes in their reports: one row for ten minutes of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from sqlalchemy import Connection, case, delete
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.protocol import messages
from holdfast_server import models
from holdfast_server.db import Statement, insert
from holdfast_server.samples.sample_codec import BUILT_IN, Table

BUCKET_SECONDS = 600

_KEY = ("job", "rank", "bucket", "uid", "lineage")
_LOWEST, _HIGHEST = ("first_iteration", "begins_at"), ("last_iteration", "ends_at", "longest_seconds")
_SUMS = ("iterations", "seconds", "stall_seconds", "data_seconds", "barrier_iterations", "barrier_seconds")


def bucket_of(at: float) -> int:
    return int(at // BUCKET_SECONDS)


def add_samples(connection: Connection, rank: Mapping[str, Any], lineage: int, samples: Table) -> None:
    """Of one rank, given by its job, uid and number, on one lineage."""
    _ADD.run(connection, *({**rank, "lineage": lineage, **row} for row in _by_bucket(samples)))


async def add_event(session: AsyncSession, job: str, uid: str, rank: int, event: messages.RankWork) -> None:
    """What one of several ranks said of itself. Rank 0's iterations come as samples, and count once."""
    told = rank != 0
    row = {
        "job": job,
        "uid": uid,
        "rank": rank,
        "lineage": event.lineage,
        "bucket": bucket_of(event.at),
        "first_iteration": event.first_iteration,
        "last_iteration": event.last_iteration,
        "begins_at": max(0.0, event.at - event.seconds),
        "ends_at": event.at,
        "iterations": event.iterations if told else 0,
        "seconds": event.seconds if told else 0.0,
        "longest_seconds": event.longest_seconds if told else 0.0,
        "stall_seconds": event.stall_seconds if told else 0.0,
        "data_seconds": event.data_seconds if told else 0.0,
        "barrier_iterations": event.barrier_iterations,
        "barrier_seconds": event.barrier_seconds,
    }
    await session.execute(_upsert(session), [row])


async def forget_ranks(session: AsyncSession, job: str, before: float) -> None:
    """What ranks other than 0 told that long ago. Rank 0's few rows stay: they are the account of the job."""
    rows = models.WorkRecord
    old = delete(rows).where(rows.job == job, rows.rank > 0, rows.bucket < bucket_of(before))
    await session.execute(old, execution_options={"synchronize_session": False})


def _by_bucket(samples: Table) -> Iterator[dict[str, Any]]:
    buckets = (samples.at // BUCKET_SECONDS).astype(np.int64)
    found = set(buckets.tolist())
    for bucket in sorted(found):
        of_it = samples if len(found) == 1 else samples.rows(buckets == bucket)
        iteration, at = of_it.iteration, of_it.at
        spans = of_it.values[1 : len(BUILT_IN)]
        seconds, stalls, data = np.where(np.isfinite(spans), spans, 0.0)
        yield {
            "bucket": bucket,
            "first_iteration": int(iteration[0]),
            "last_iteration": int(iteration[-1]),
            "begins_at": max(0.0, float((at - seconds).min())),
            "ends_at": float(at.max()),
            "iterations": len(of_it),
            "seconds": float(seconds.sum()),
            "longest_seconds": float(seconds.max()),
            "stall_seconds": float(stalls.sum()),
            "data_seconds": float(data.sum()),
            "barrier_iterations": 0,
            "barrier_seconds": 0.0,
        }


def _upsert(session: AsyncSession | Connection) -> postgresql.Insert:
    made = insert(session, models.WorkRecord)
    old, new = models.WorkRecord, made.excluded
    return made.on_conflict_do_update(
        index_elements=_KEY,
        set_={
            **{name: getattr(old, name) + new[name] for name in _SUMS},
            **{
                name: case((new[name] < getattr(old, name), new[name]), else_=getattr(old, name))
                for name in _LOWEST
            },
            **{
                name: case((new[name] > getattr(old, name), new[name]), else_=getattr(old, name))
                for name in _HIGHEST
            },
        },
    )


_ADD = Statement(_upsert)
