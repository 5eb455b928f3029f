"""Free and total space of stores by their id: the newest measurement of each day.

An address does not identify a disk: hosts mount one store at different paths, and private disks at the same path.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import ColumnElement, delete, select
from sqlalchemy import func as sql
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased

from holdfast.protocol.store_shares import StoreReport
from holdfast_server import models
from holdfast_server.db import insert

DAY = 86400
KEPT_SECONDS = 40 * DAY

_disks = models.StoreDiskRecord


@dataclass(frozen=True, slots=True)
class StoreDisk:
    """The disk of a job's store, with the address that the job uses."""

    address: str
    free_bytes: int
    total_bytes: int | None


def record(session: Session, store: str, event: StoreReport, *, now: float) -> None:
    """Store a measurement, unless a newer one of that day is known: reports may arrive late."""
    if event.free_bytes is None:
        return
    at = min(event.at, now)
    made = insert(session, _disks).values(
        store=store, day=int(at // DAY) * DAY, at=at, free_bytes=event.free_bytes, total_bytes=event.total_bytes
    )
    newer = {name: made.excluded[name] for name in ("at", "free_bytes", "total_bytes")}
    session.execute(
        made.on_conflict_do_update(
            index_elements=["store", "day"], set_=newer, where=made.excluded.at >= _disks.at
        )
    )


def is_newest(store: InstrumentedAttribute[str]) -> ColumnElement[bool]:
    """Return whether a row of `store_disks` is the newest measurement of a store."""
    other = aliased(_disks)
    newest = select(sql.max(other.day)).where(other.store == store).scalar_subquery()
    return (_disks.store == store) & (_disks.day == newest)


def of_jobs(session: Session, jobs: Collection[str]) -> dict[str, StoreDisk]:
    """Return by job the disk that its current attempt writes to."""
    writers, rows = models.StoreWriterRecord, models.JobRecord
    query = (
        select(writers.job, writers.address, _disks.free_bytes, _disks.total_bytes)
        .join(rows, (rows.name == writers.job) & (rows.uid == writers.uid))
        .join(_disks, is_newest(writers.store))
        .where(writers.job.in_(jobs))
        .order_by(writers.at)
    )
    return {job: StoreDisk(address, free, total) for job, address, free, total in session.execute(query)}


def since(session: Session, stores: Collection[str], at: float) -> dict[str, list[models.StoreDiskRecord]]:
    """Return by store the measurements since a time, oldest first."""
    found: dict[str, list[models.StoreDiskRecord]] = {}
    query = select(_disks).where(_disks.store.in_(stores), _disks.at >= at).order_by(_disks.store, _disks.day)
    for row in session.scalars(query):
        found.setdefault(row.store, []).append(row)
    return found


def delete_old(session: Session, *, now: float) -> None:
    old = delete(_disks).where(_disks.day < now - KEPT_SECONDS - DAY)
    session.execute(old, execution_options={"synchronize_session": False})
