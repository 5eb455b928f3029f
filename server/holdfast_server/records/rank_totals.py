"""Totals of ranks, updated in the transaction of their batches: one row for ten minutes of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from sqlalchemy import Connection, case, delete
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import Session

from holdfast.protocol import wire
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
    """Add samples of one rank, given by job, uid and rank, on one lineage."""
    _ADD.run(connection, *({**rank, "lineage": lineage, **row} for row in _by_bucket(samples)))


def add_event(session: Session, job: str, uid: str, rank: int, event: wire.RankTotals) -> None:
    """Add a rank's report of its totals. Rank 0's iterations arrive as samples, which count already."""
    counts = rank != 0
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
        "iterations": event.iterations if counts else 0,
        "seconds": event.seconds if counts else 0.0,
        "longest_seconds": event.longest_seconds if counts else 0.0,
        "stall_seconds": event.stall_seconds if counts else 0.0,
        "data_seconds": event.data_seconds if counts else 0.0,
        "barrier_iterations": event.barrier_iterations,
        "barrier_seconds": event.barrier_seconds,
    }
    session.execute(_upsert(session), [row])


def delete_old(session: Session, job: str, before: float) -> None:
    """Delete old totals of ranks other than 0; the few rows of rank 0 stay, for the job's goodput."""
    rows = models.RankTotalsRecord
    old = delete(rows).where(rows.job == job, rows.rank > 0, rows.bucket < bucket_of(before))
    session.execute(old, execution_options={"synchronize_session": False})


def _by_bucket(samples: Table) -> Iterator[dict[str, Any]]:
    buckets = (samples.at // BUCKET_SECONDS).astype(np.int64)
    found = set(buckets.tolist())
    for bucket in sorted(found):
        of_it = samples if len(found) == 1 else samples.rows(buckets == bucket)
        iteration, at = of_it.iteration, of_it.at
        spans = of_it.values[1 : len(BUILT_IN)]
        spans = np.where(np.isfinite(spans), spans, 0.0)
        seconds, stalls, data = spans.sum(axis=1).tolist()
        yield {
            "bucket": bucket,
            "first_iteration": int(iteration[0]),
            "last_iteration": int(iteration[-1]),
            "begins_at": max(0.0, float((at - spans[0]).min())),
            "ends_at": float(at.max()),
            "iterations": len(of_it),
            "seconds": seconds,
            "longest_seconds": float(spans[0].max()),
            "stall_seconds": stalls,
            "data_seconds": data,
            "barrier_iterations": 0,
            "barrier_seconds": 0.0,
        }


def _upsert(session: Session | Connection) -> postgresql.Insert:
    made = insert(session, models.RankTotalsRecord)
    old, new = models.RankTotalsRecord, made.excluded
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
