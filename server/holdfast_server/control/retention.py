"""How long what was reported is kept, project by project: what people want, and carrying it out."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Select, delete, exists, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.protocol.questions import Kept, RetentionChanges
from holdfast_server import models
from holdfast_server.core.errors import InvalidSetting, UnknownProject
from holdfast_server.db import Database
from holdfast_server.records import audit
from holdfast_server.records import rank_totals as ranks_work
from holdfast_server.samples import compaction

EVERY_SECONDS = 300.0
LEAST_SECONDS = 3600.0
LEAST_BYTES = 2**20
ROWS_AT_ONCE = 2000
"""Rows that go in one transaction, behind which reports wait."""

_REPORTS = (models.StallRecord, models.NoticeRecord, models.PacingRecord, models.GapRecord)


async def kept(db: Database, project: str) -> Kept:
    """Raises UnknownProject."""
    async with db.read() as session:
        if await session.get(models.ProjectRecord, project) is None:
            raise UnknownProject(project)
        row = await session.get(models.RetentionRecord, project)
        return Kept(project=project, stored_bytes=await _stored_bytes(session, project), **_fields(row))


async def change(
    db: Database, project: str, changes: RetentionChanges, *, who: str, request_id: str, now: float
) -> Kept:
    """What is left out stays as it is; None: without a limit.

    Raises UnknownProject, and InvalidSetting, naming the field.
    """
    for name, value in msgspec.structs.asdict(changes).items():
        least = LEAST_BYTES if name.endswith("_bytes") else LEAST_SECONDS
        if isinstance(value, float | int) and not least <= value < math.inf:
            raise InvalidSetting(name, f"{name} is {value}: give at least {least:g}, or null for no limit")

    async def work(session: AsyncSession) -> None:
        if await session.get(models.ProjectRecord, project) is None:
            raise UnknownProject(project)
        row = await session.get(models.RetentionRecord, project)
        before = _fields(row)
        if row is None:
            row = models.RetentionRecord(project=project)
            session.add(row)
        wanted = {
            name: value for name, value in msgspec.structs.asdict(changes).items() if value is not msgspec.UNSET
        }
        for name, value in wanted.items():
            setattr(row, name, value)
        changed = {name: value for name, value in wanted.items() if value != before[name]}
        if changed:
            await session.flush()
            await audit.record(
                session,
                who=who,
                action="retention.edit",
                now=now,
                project=project,
                before={name: before[name] for name in changed},
                after=changed,
                request_id=request_id,
            )

    await db.write(work)
    return await kept(db, project)


def _fields(row: models.RetentionRecord | None) -> dict[str, Any]:
    names = RetentionChanges.__struct_fields__
    return {name: None if row is None else getattr(row, name) for name in names}


async def _stored_bytes(session: AsyncSession, project: str) -> int:
    stretches = models.StretchRecord
    query = select(func.sum(stretches.chunk_bytes)).join(models.JobRecord, models.JobRecord.name == stretches.job)
    return int(await session.scalar(query.where(models.JobRecord.project == project)) or 0)


async def carry_out(db: Database, now: float) -> None:
    """A chore. In small transactions, so that reports do not wait for it."""
    async with db.read() as session:
        rows = list(await session.scalars(select(models.RetentionRecord)))
    for row in rows:
        if row.samples_seconds is not None:
            await _thin_by_age(db, row.project, now - row.samples_seconds)
        if row.samples_bytes is not None:
            await _thin_by_size(db, row.project, row.samples_bytes)
        if row.fine_seconds is not None:
            await _coarsen(db, row.project, now - row.fine_seconds)
        if row.reports_seconds is not None:
            await _forget_reports(db, row.project, now - row.reports_seconds)


async def _thin_by_age(db: Database, project: str, before: float) -> None:
    """What is to go is looked up first: nearly always it is nothing, and reports do not wait for that."""
    old = (models.StretchRecord.chunks > 0, compaction.first_ended_at() < before)
    for stretch in await _stretches(db, project, *old):
        async with db.read() as session:
            upto = await compaction.first_since(session, stretch, before)
        if compaction.begin_of(stretch, upto) > stretch.whole_from:
            await db.write(partial(_thin, stretch=stretch.id, upto=upto), job=stretch.job)


async def _thin_by_size(db: Database, project: str, limit_bytes: int) -> None:
    """The stretches that ended first go first; of the one at the limit, its beginning."""
    stretches = await _stretches(db, project)
    excess = sum(stretch.chunk_bytes for stretch in stretches) - limit_bytes
    for stretch in stretches:
        if excess <= 0:
            return
        if stretch.chunks:
            upto = await _upto(db, stretch, excess)
            await db.write(partial(_thin, stretch=stretch.id, upto=upto), job=stretch.job)
        excess -= stretch.chunk_bytes


async def _thin(session: AsyncSession, *, stretch: int, upto: int) -> None:
    await compaction.thin_upto(session, await session.get_one(models.StretchRecord, stretch), upto)


async def _upto(db: Database, stretch: models.StretchRecord, excess_bytes: int) -> int:
    """Up to which iteration a stretch's chunks are to go, for so many bytes."""
    if stretch.chunk_bytes <= excess_bytes:
        return stretch.last_iteration + 1
    rows = models.ChunkRecord
    # Seldom asked for, and of one stretch at a time: what is left of it is what is asked for next.
    query = (
        select(rows.last_iteration, func.length(rows.columns))
        .where(rows.job == stretch.job, rows.rank == stretch.rank, rows.lineage == stretch.lineage)
        .where(rows.uid == stretch.uid)
        .order_by(rows.first_iteration)
    )
    async with db.read() as session:
        for last, size in await session.execute(query):
            excess_bytes -= size
            if excess_bytes <= 0:
                return int(last) + compaction.WIDTH
    return stretch.last_iteration + 1


async def _coarsen(db: Database, project: str, before: float) -> None:
    thinned = models.StretchRecord.whole_from > models.StretchRecord.fine_from
    for stretch in await _stretches(db, project, thinned):
        async with db.read() as session:
            begin = await compaction.fine_since(session, stretch, before)
        if begin > stretch.fine_from:
            await db.write(partial(_coarsen_one, stretch=stretch.id, begin=begin), job=stretch.job)


async def _coarsen_one(session: AsyncSession, *, stretch: int, begin: int) -> None:
    await compaction.coarsen_upto(session, await session.get_one(models.StretchRecord, stretch), begin)


async def _stretches(db: Database, project: str, *those: ColumnElement[bool]) -> list[models.StretchRecord]:
    """Those that ended first, first."""
    rows = models.StretchRecord
    query = (
        select(rows)
        .join(models.JobRecord, models.JobRecord.name == rows.job)
        .where(models.JobRecord.project == project, *those)
    )
    async with db.read() as session:
        return list(await session.scalars(query.order_by(rows.last_at, rows.id)))


async def _forget_reports(db: Database, project: str, before: float) -> None:
    async with db.read() as session:
        jobs = list(
            await session.scalars(select(models.JobRecord.name).where(models.JobRecord.project == project))
        )
    for job in jobs:
        for rows in _REPORTS:
            table = models.table(rows)
            await _forget(db, rows, select(table.c.id).where(table.c.job == job, table.c.at < before), job=job)
        await db.write(partial(ranks_work.forget_ranks, job=job, before=before), job=job)
    await _forget_alerts(db, project, before)


async def _forget_alerts(db: Database, project: str, before: float) -> None:
    """What was told of them, then they. One that fires stays, however old, and so does a silence that holds."""
    alerts, told = models.AlertRecord, models.AlertDeliveryRecord
    channels = select(models.AlertChannelRecord.id).where(models.AlertChannelRecord.project == project)
    await _forget(db, told, select(told.id).where(told.channel.in_(channels), told.ended_at < before))
    over = (
        select(alerts.id)
        .where(alerts.project == project, alerts.resolved_at < before)
        .where(or_(alerts.silenced_until.is_(None), alerts.silenced_until < before))
        .where(~exists().where(told.alert == alerts.id))
    )
    await _forget(db, alerts, over)


async def _forget(db: Database, rows: type[models.Base], old: Select[int], *, job: str | None = None) -> None:
    """The rows whose ids `old` finds, some at a time."""
    table = models.table(rows)

    async def work(session: AsyncSession) -> int:
        ids = list(await session.scalars(old.limit(ROWS_AT_ONCE)))
        if ids:
            await session.execute(delete(rows).where(table.c.id.in_(ids)), execution_options=compaction.QUIETLY)
        return len(ids)

    while await db.write(work, job=job) == ROWS_AT_ONCE:
        pass
