"""What was done to jobs in a window, and by whom: restores, settings, annotations, acknowledgements, restarts."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, and_, func, or_, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from holdfast.protocol.jobs import is_alert
from holdfast.protocol.report import ActorKind, ReportAction
from holdfast_server import models
from holdfast_server.records.desired_state import AGENT, SERVER, as_edit
from holdfast_server.records.restore_orders import POLICY

MOST_ROWS = 200
"""Most actions of each source that are read."""

Jobs = Select[str, str]
"""Query of the names and projects of jobs."""


def actions(session: Session, jobs: Jobs, begins_at: float) -> tuple[list[ReportAction], int]:
    """Return the newest actions on some jobs since a time, newest first, and the number of all."""
    made: list[ReportAction] = []
    total = 0
    for source in (_restores, _edits, _annotations, _acknowledgements, _restarts):
        rows, count = source(session, jobs, begins_at)
        made += rows
        total += count
    return sorted(made, key=lambda row: row.at, reverse=True)[:MOST_ROWS], total


def _kind(actor: str) -> ActorKind:
    if actor == POLICY:
        return "policy"
    if actor == SERVER:
        return "server"
    return "alert" if is_alert(actor) else "person"


def _read(
    session: Session, jobs: Jobs, table: Any, at: InstrumentedAttribute[Any], *conditions: Any
) -> tuple[list[tuple[Any, str]], int]:
    """Return the newest rows of a table with their projects, and the number of all."""
    named = jobs.subquery()
    query = select(table, named.c.project).join(named, named.c.name == table.job).where(*conditions)
    count = session.scalar(query.with_only_columns(func.count(), maintain_column_froms=True)) or 0
    found = session.execute(query.order_by(at.desc()).limit(MOST_ROWS)).all() if count else []
    return [(row, project) for row, project in found], count


def _restores(session: Session, jobs: Jobs, begins_at: float) -> tuple[list[ReportAction], int]:
    rows = models.RestoreOrderRecord
    found, count = _read(session, jobs, rows, rows.created_at, rows.created_at >= begins_at)
    return [
        ReportAction(
            at=row.created_at, job=row.job, project=project, actor=row.who, kind=_kind(row.who),
            text=_restore_text(row),
        )
        for row, project in found
    ], count  # fmt: skip


def _restore_text(row: models.RestoreOrderRecord) -> str:
    left_out = ", leaving out data" if row.skip else ""
    text = f"restore to {row.iteration:,} from {row.from_iteration:,}{left_out}: {row.state}"
    return f"{text}, {row.reason}" if row.reason and row.state != "restored" else text


def _edits(session: Session, jobs: Jobs, begins_at: float) -> tuple[list[ReportAction], int]:
    """Return changes of settings; restores are listed by their orders, and pins of alerts by the alerts."""
    rows = models.SettingsVersionRecord
    by_others = (rows.who != AGENT, rows.who.not_like("alert %"), rows.who.not_like("an alert%"))
    of_order = rows.changes.not_like('[{"field":"restore"%')
    found, count = _read(session, jobs, rows, rows.at, rows.at >= begins_at, *by_others, of_order)
    return [
        ReportAction(
            at=row.at, job=row.job, project=project, actor=row.who, kind=_kind(row.who), text=as_edit(row).summary
        )
        for row, project in found
    ], count


def _annotations(session: Session, jobs: Jobs, begins_at: float) -> tuple[list[ReportAction], int]:
    rows = models.AnnotationRecord
    found, count = _read(session, jobs, rows, rows.written_at, rows.written_at >= begins_at, rows.who.is_not(None))
    return [
        ReportAction(
            at=row.written_at, job=row.job, project=project, actor=row.who, kind="person",
            text=f"annotation at {row.iteration:,}: {row.text}",
        )
        for row, project in found
    ], count  # fmt: skip


def _acknowledgements(session: Session, jobs: Jobs, begins_at: float) -> tuple[list[ReportAction], int]:
    rows = models.AlertRecord
    found, count = _read(session, jobs, rows, rows.acknowledged_at, rows.acknowledged_at >= begins_at)
    return [
        ReportAction(
            at=row.acknowledged_at, job=row.job, project=project, actor=row.acknowledged_by or "", kind="person",
            text=f"acknowledged: {row.message}",
        )
        for row, project in found
    ], count  # fmt: skip


def _restarts(session: Session, jobs: Jobs, begins_at: float) -> tuple[list[ReportAction], int]:
    """Return what supervisors started again, one row for each job."""
    rows, named = models.AttemptRecord, jobs.subquery()
    since = (rows.started_at >= begins_at, rows.supervised, rows.previous_exit.is_not(None))
    counted = (
        select(named.c.name, named.c.project, func.count(), func.max(rows.started_at))
        .join(rows, rows.job == named.c.name)
        .where(*since)
        .group_by(named.c.name, named.c.project)
    )
    found = sorted(session.execute(counted).all(), key=lambda each: each[3], reverse=True)
    newest = {(job, at): (project, times) for job, project, times, at in found[:MOST_ROWS]}
    if not newest:
        return [], 0
    wanted = or_(*(and_(rows.job == job, rows.started_at == at) for job, at in newest))
    made = {
        row.job: _restart(row, *newest[row.job, row.started_at])
        for row in session.scalars(select(rows).where(wanted))
    }
    return list(made.values()), len(found)


def _restart(row: models.AttemptRecord, project: str, count: int) -> ReportAction:
    times = f"{count} times, last" if count > 1 else "once,"
    text = f"started the script again {times} from iteration {row.iteration:,} ({row.previous_exit})"
    return ReportAction(
        at=row.started_at, job=row.job, project=project, actor=f"holdfast run on {row.host}",
        kind="supervisor", text=text,
    )  # fmt: skip
