"""Retention of reported data by project: its settings, and the background job that applies them."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Select, delete, exists, func, or_, select
from sqlalchemy.orm import Session

from holdfast.protocol.analyses import ReportRetention, ReportRetentionChanges
from holdfast.units import MAX_SECONDS
from holdfast_server import models
from holdfast_server.accounts.projects import require_project
from holdfast_server.core.errors import InvalidSetting
from holdfast_server.db import Database, transaction
from holdfast_server.records import audit, rank_totals
from holdfast_server.samples import compaction

EVERY_SECONDS = 300.0
LEAST_SECONDS = 3600.0
LEAST_BYTES, MOST_BYTES = 2**20, 2**60
ROWS_AT_ONCE = 2000
"""Rows deleted in one transaction, for which reports wait."""

_REPORTS = (models.StallRecord, models.NoticeRecord, models.IntervalDecisionRecord, models.GapRecord)


def get_settings(db: Database, project: str) -> ReportRetention:
    """Return the settings and the stored size of a project. Raises UnknownProject."""
    with db.read() as session:
        require_project(session, project)
        return _settings(session, project)


def _settings(session: Session, project: str) -> ReportRetention:
    row = session.get(models.RetentionRecord, project)
    return ReportRetention(project=project, stored_bytes=_stored_bytes(session, project), **_fields(row))


@transaction
def change(
    session: Session, project: str, changes: ReportRetentionChanges, *, who: str, now: float
) -> ReportRetention:
    """Change the given settings of a project; None: no limit.

    Raises:
        UnknownProject.
        InvalidSetting: a value is too small; names the field.
    """
    for name, value in msgspec.structs.asdict(changes).items():
        is_size = name.endswith("_bytes")
        least, most = (LEAST_BYTES, MOST_BYTES) if is_size else (LEAST_SECONDS, MAX_SECONDS)
        if isinstance(value, float | int) and not least <= value <= most:
            reason = f"{name} is {value!s:.40}: give {least:g} to {most:g}, or null for no limit"
            raise InvalidSetting(name, reason)
    require_project(session, project)
    row = session.get(models.RetentionRecord, project)
    before = _fields(row)
    if row is None:
        row = models.RetentionRecord(project=project)
        session.add(row)
    wanted = {name: value for name, value in msgspec.structs.asdict(changes).items() if value is not msgspec.UNSET}
    for name, value in wanted.items():
        setattr(row, name, value)
    changed = {name: value for name, value in wanted.items() if value != before[name]}
    if changed:
        session.flush()
        audit.record(
            session,
            who=who,
            action="retention.edit",
            now=now,
            project=project,
            before={name: before[name] for name in changed},
            after=changed,
        )
    return _settings(session, project)


def _fields(row: models.RetentionRecord | None) -> dict[str, Any]:
    names = ReportRetentionChanges.__struct_fields__
    return {name: None if row is None else getattr(row, name) for name in names}


def _stored_bytes(session: Session, project: str) -> int:
    all_series = models.SampleSeriesRecord
    query = select(func.sum(all_series.chunk_bytes)).join(
        models.JobRecord, models.JobRecord.name == all_series.job
    )
    return int(session.scalar(query.where(models.JobRecord.project == project)) or 0)


def apply_all(db: Database, now: float) -> None:
    """Apply the settings of all projects, in small transactions so that reports do not wait."""
    with db.read() as session:
        rows = list(session.scalars(select(models.RetentionRecord)))
    for row in rows:
        if row.samples_seconds is not None:
            _thin_by_age(db, row.project, now - row.samples_seconds)
        if row.samples_bytes is not None:
            _thin_by_size(db, row.project, row.samples_bytes)
        if row.fine_seconds is not None:
            _coarsen(db, row.project, now - row.fine_seconds)
        if row.reports_seconds is not None:
            _delete_reports(db, row.project, now - row.reports_seconds)


def _thin_by_age(db: Database, project: str, before: float) -> None:
    """Downsample old samples. A read finds them first: usually there are none, and no write is needed."""
    old = (models.SampleSeriesRecord.chunks > 0, compaction.first_ended_at() < before)
    for series in _series_of(db, project, *old):
        with db.read() as session:
            upto = compaction.first_since(session, series, before)
        if compaction.begin_of(series, upto) > series.chunks_from:
            db.write(partial(compaction.thin_upto, series_id=series.id, iteration=upto), job=series.job)


def _thin_by_size(db: Database, project: str, limit_bytes: int) -> None:
    """Downsample until a project fits its limit, the series that ended first and then the beginning of one."""
    all_series = _series_of(db, project)
    excess = sum(series.chunk_bytes for series in all_series) - limit_bytes
    for series in all_series:
        if excess <= 0:
            return
        if series.chunks:
            upto = _upto(db, series, excess)
            db.write(partial(compaction.thin_upto, series_id=series.id, iteration=upto), job=series.job)
        excess -= series.chunk_bytes


def _upto(db: Database, series: models.SampleSeriesRecord, excess_bytes: int) -> int:
    """Return the iteration up to which the chunks of a series must be removed to free this many bytes."""
    if series.chunk_bytes <= excess_bytes:
        return series.last_iteration + 1
    rows = models.ChunkRecord
    query = (
        select(rows.last_iteration, func.length(rows.columns))
        .where(*compaction.chunks_of(series))
        .order_by(rows.first_iteration)
    )
    with db.read() as session:
        for last, size in session.execute(query):
            excess_bytes -= size
            if excess_bytes <= 0:
                return int(last) + compaction.WIDTH
    return series.last_iteration + 1


def _coarsen(db: Database, project: str, before: float) -> None:
    thinned = models.SampleSeriesRecord.chunks_from > models.SampleSeriesRecord.finest_from
    for series in _series_of(db, project, thinned):
        with db.read() as session:
            begin = compaction.fine_since(session, series, before)
        if begin > series.finest_from:
            db.write(partial(compaction.coarsen_upto, series_id=series.id, begin=begin), job=series.job)


def _series_of(db: Database, project: str, *those: ColumnElement[bool]) -> list[models.SampleSeriesRecord]:
    """Return the series of a project, those that ended first at the front."""
    rows = models.SampleSeriesRecord
    query = (
        select(rows)
        .join(models.JobRecord, models.JobRecord.name == rows.job)
        .where(models.JobRecord.project == project, *those)
    )
    with db.read() as session:
        return list(session.scalars(query.order_by(rows.last_at, rows.id)))


def _delete_reports(db: Database, project: str, before: float) -> None:
    with db.read() as session:
        jobs = list(session.scalars(select(models.JobRecord.name).where(models.JobRecord.project == project)))
    for job in jobs:
        for rows in _REPORTS:
            table = models.table(rows)
            _delete(db, rows, select(table.c.id).where(table.c.job == job, table.c.at < before), job=job)
        notes = models.AnnotationRecord  # those of people stay as long as the job
        by_script = select(notes.id).where(notes.job == job, notes.who.is_(None), notes.written_at < before)
        _delete(db, notes, by_script, job=job)
        db.write(partial(rank_totals.delete_old, job=job, before=before), job=job)
    _delete_alerts(db, project, before)


def _delete_alerts(db: Database, project: str, before: float) -> None:
    """Delete old deliveries, then old alerts without any; firing and silenced alerts stay."""
    alerts, deliveries = models.AlertRecord, models.AlertDeliveryRecord
    channels = select(models.AlertChannelRecord.id).where(models.AlertChannelRecord.project == project)
    _delete(
        db, deliveries, select(deliveries.id).where(deliveries.channel.in_(channels), deliveries.ended_at < before)
    )
    over = (
        select(alerts.id)
        .where(alerts.project == project, alerts.resolved_at < before)
        .where(or_(alerts.silenced_until.is_(None), alerts.silenced_until < before))
        .where(~exists().where(deliveries.alert == alerts.id))
    )
    _delete(db, alerts, over)


def _delete(db: Database, rows: type[models.Base], old: Select[int], *, job: str | None = None) -> None:
    """Delete the rows whose ids `old` selects, in batches."""
    table = models.table(rows)

    def work(session: Session) -> int:
        ids = list(session.scalars(old.limit(ROWS_AT_ONCE)))
        if ids:
            session.execute(delete(rows).where(table.c.id.in_(ids)), execution_options=compaction.QUIETLY)
        return len(ids)

    while db.write(work, job=job) == ROWS_AT_ONCE:
        pass
