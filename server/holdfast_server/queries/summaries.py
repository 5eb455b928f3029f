"""Summaries of jobs, for the fleet page and the head of a job's page."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from sqlalchemy import Select, and_, func, select
from sqlalchemy.orm import Session

from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.protocol.jobs import (
    CheckpointInfo,
    ForkFamily,
    ForkInfo,
    ForkSource,
    JobSummary,
    LongestStall,
)
from holdfast_server import models
from holdfast_server.core.encoding import answer_from
from holdfast_server.db import named_jobs
from holdfast_server.queries import ranks, verdicts
from holdfast_server.queries.job_view import JobView
from holdfast_server.records import checkpoints, desired_state, restore_orders
from holdfast_server.records.ancestry import Ancestry, LineageStart, ancestries, lineage_starts
from holdfast_server.records.interval_status import paced_of, reason_of
from holdfast_server.records.job_status import (
    current_attempts,
    iterations_per_second,
    recent_of,
    restore_mode,
    restore_reason,
    seconds_of_last,
    sparkline,
    status_of,
    supervisor_info,
)
from holdfast_server.records.restore_orders import CurrentAttempts
from holdfast_server.samples.limits import throughput

_labels = msgspec.json.Decoder(dict[str, str])

MOST_FORKS = 200
STALL_WINDOW_ITERATIONS = 1000
"""Newest iterations whose longest stall a summary shows."""

_attempts = models.AttemptRecord
_STARTS = (
    select(_attempts.job, func.count())
    # a fork is stored as an ended attempt, which trained nothing
    .where(_attempts.job.in_(named_jobs()), _attempts.finished.is_distinct_from("forked"))
    .group_by(_attempts.job)
)


def job_summary(view: JobView) -> JobSummary:
    return summaries(
        view.session,
        [view.job],
        now=view.now,
        lineages={view.name: view.lineages},
        current={view.name: view.attempt},
    )[0]


def summaries(
    session: Session,
    jobs: Sequence[models.JobRecord],
    *,
    now: float,
    lineages: Mapping[str, list[LineageStart]] | None = None,
    current: CurrentAttempts | None = None,
) -> list[JobSummary]:
    """Summarize jobs, in a fixed number of statements.

    `lineages`, `current`: the lineages and the current attempts by job, if they are known.
    """
    names = [job.name for job in jobs]
    attempts = current_attempts(session, names) if current is None else current
    # rows are not plain tuples
    starts = {job: rows for job, rows in session.execute(_STARTS, {"jobs": names})}  # noqa: C416
    known = lineage_starts(session, names) if lineages is None else lineages
    durable = checkpoints.count(session, names)
    open_orders = restore_orders.open_orders(session, names, current=attempts)
    asked = desired_state.open_requests(session, names)
    last_durable = checkpoints.last_durable(session, names)
    failing = checkpoints.failing(session, names)
    stalls = _longest_stalls(session, names)
    alerts = verdicts.open_alerts(session, names, now=now)
    waits = ranks.findings(session, jobs, now=now)
    rows = []
    for job in jobs:
        starts_of_job = known.get(job.name, [])
        ancestry = Ancestry(starts_of_job, job.lineage)
        last = last_durable.get(job.name)
        open_order = open_orders.get(job.name)
        requests = asked.get(job.name, desired_state.NOTHING_ASKED)
        attempt = attempts.get(job.name)
        summary = _summary(
            job,
            attempt,
            checkpoints.as_row(last, ancestry) if last else None,
            now=now,
            failing=failing.get(job.name),
            open_order=open_order,
            desired=desired_state.of(job, open_order, requests, now=now),
            restarts=max(0, starts.get(job.name, 0) - 1),
            lineages=len(starts_of_job),
            inexact=ancestry.inexact.get(job.lineage),
            left_out=ancestry.left_out,
            on_trouble=(attempt.on_trouble if attempt else None) or "",
            checkpoints_total=durable.get(job.name, 0),
            longest_stall=stalls.get(job.name),
        )
        ended_at = attempt.finished_at if attempt and summary.has_ended else None
        facts = verdicts.VerdictFacts(
            job=summary,
            now=now,
            exception=(attempt.exception if attempt else None) or "",
            ended_seconds=None if ended_at is None else max(0.0, now - ended_at),
            alerts=alerts.get(job.name, ()),
            ranks=waits.get(job.name),
        )
        rows.append(msgspec.structs.replace(summary, verdict=verdicts.verdict(facts)))
    return rows


def _summary(
    job: models.JobRecord,
    attempt: models.AttemptRecord | None,
    last_durable: CheckpointInfo | None,
    *,
    now: float,
    **others: Any,
) -> JobSummary:
    """Summarize a job; `others` are the fields that its row and its attempt do not determine."""
    recent, paced, status = recent_of(job), paced_of(job), status_of(job, attempt, now=now)
    unsaved = max(0, job.iteration - (last_durable.iteration if last_durable else 0))
    unsaved_seconds = seconds_of_last(recent, unsaved)
    world_size = max(1, attempt.world_size) if attempt else 1
    rate, total = iterations_per_second(recent), paced.total_iterations if paced else None
    samples = paced.samples_per_iteration if paced else None
    trains = status.status in ("running", "paused")
    return answer_from(
        job,
        JobSummary,
        job=job.name,
        verdict=None,
        owner=(attempt.owner if attempt else None) or "",
        labels=_labels.decode(attempt.labels) if attempt and attempt.labels else {},
        status=status.status,
        status_reason=status.reason,
        alive=status.alive,
        supervisor=supervisor_info(attempt, status.status),
        restore_mode=restore_mode(attempt, alive=status.alive),
        restore_reason=restore_reason(attempt, alive=status.alive),
        attempt=attempt.attempt if attempt else job.attempt,
        world_size=world_size,
        host=attempt.host if attempt else "",
        iterations_per_second=rate,
        total_iterations=total,
        remaining_seconds=max(0, total - job.iteration) / rate if trains and rate and total else None,
        tokens_per_second=throughput(recent) if recent.tokens else None,
        samples_per_second=samples * rate if samples and rate else None,
        last_contact_seconds=max(0.0, now - job.last_contact_at),
        started_at=attempt.started_at if attempt else None,
        loss=recent.metrics.get("loss"),
        metrics=list(recent.metrics),
        paced=paced,
        measured_overhead=paced.measured_overhead if paced else None,
        measured_window_iterations=paced.measured_window_iterations if paced else 0,
        budget=paced.budget if paced else None,
        interval=paced.interval if paced else None,
        interval_seconds=paced.interval_seconds if paced else None,
        policy=paced.policy if paced else None,
        interval_reason=reason_of(paced),
        unsaved_iterations=unsaved,
        unsaved_seconds=unsaved_seconds,
        unsaved_gpu_hours=None if unsaved_seconds is None else unsaved_seconds * world_size / 3600,
        last_durable=last_durable,
        sparkline=sparkline(recent),
        **others,
    )


def _longest_stalls(session: Session, jobs: list[str]) -> dict[str, LongestStall]:
    """Return the longest stall of each job over its last iterations, except restores, which are requested."""
    return {
        row.job: LongestStall(seconds=row.seconds, kind=row.kind, iteration=row.iteration)  # type: ignore[arg-type]
        for row in session.scalars(_of_longest_stalls(), {"jobs": jobs})
    }


@cache
def _of_longest_stalls() -> Select[models.StallRecord]:
    rows, job, ancestry = models.StallRecord, models.JobRecord, ancestries(named_jobs())
    place = func.row_number().over(partition_by=rows.job, order_by=(rows.seconds.desc(), rows.id.desc()))
    ranked = (
        select(rows.id, place.label("place"))
        .join(job, job.name == rows.job)
        .join(ancestry, and_(ancestry.c.job == rows.job, ancestry.c.lineage == rows.lineage))
        .where(rows.iteration > job.iteration - STALL_WINDOW_ITERATIONS, rows.iteration <= ancestry.c.upto)
        .where(rows.kind != "restore")
        .subquery()
    )
    return select(rows).join(ranked, ranked.c.id == rows.id).where(ranked.c.place == 1)


# ---- forks --------------------------------------------------------------------------------------


def family(view: JobView, *, visible: Collection[str] | None = None) -> ForkFamily:
    """Return the origin of a job, and its forks, newest first.

    `visible`: projects that the user may see; None: all.
    """
    is_fork = any(start.from_job is not None for start in view.lineages)
    origin = origin_of(view.session, view.name) if is_fork else None
    found = ForkFamily(origin=origin, forks=_forks(view.session, view.name, visible))
    return found if visible is None else _as_seen(found, visible)


def origin_of(session: Session, job: str) -> ForkSource | None:
    """Return the checkpoint that a job was forked from; `None` for a job that is no fork."""
    rows, jobs = models.LineageRecord, models.JobRecord
    query = (
        select(rows.from_job, rows.from_checkpoint, rows.from_digest, jobs.project)
        .outerjoin(jobs, jobs.name == rows.from_job)
        .where(rows.job == job, rows.from_job.is_not(None))
        .order_by(rows.lineage)
        .limit(1)
    )
    found = session.execute(query).first()
    if found is None:
        return None
    name, checkpoint, digest, project = found
    assert checkpoint is not None  # the three are written together
    iteration, lineage = parse_checkpoint_id(checkpoint)
    return ForkSource(
        job=name, project=project, checkpoint=checkpoint, iteration=iteration, lineage=lineage, digest=digest or ""
    )


def _forks(session: Session, job: str, visible: Collection[str] | None) -> list[ForkInfo]:
    rows, jobs = models.LineageRecord, models.JobRecord
    query = (
        select(rows, jobs.project)
        .join(jobs, jobs.name == rows.job)
        .where(rows.from_job == job)
        .order_by(rows.at.desc(), rows.job)
        .limit(MOST_FORKS)
    )
    if visible is not None:
        query = query.where(jobs.project.in_(visible))
    return [
        answer_from(row, ForkInfo, project=project, checkpoint=row.from_checkpoint or "")
        for row, project in session.execute(query)
    ]


def _as_seen(found: ForkFamily, visible: Collection[str]) -> ForkFamily:
    """Hide the name of an origin in a project that the user may not see."""
    origin = found.origin
    if origin is not None and origin.project is not None and origin.project not in visible:
        origin = msgspec.structs.replace(origin, job=None, project=None)
    return ForkFamily(origin=origin, forks=found.forks)
