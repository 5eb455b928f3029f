"""The facts about jobs that rules check, for many jobs in a few queries."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import and_, func, not_, or_, select
from sqlalchemy.orm import Session, aliased

from holdfast.protocol.jobs import JobStatus, RecentFailures
from holdfast.protocol.wire import INTENDED_ENDS, OPEN_ORDER_STATES
from holdfast_server import models
from holdfast_server.alerts.loss_spikes import NEWEST_LOSSES, NEWEST_SECONDS, Floats, LossHistory, OpenSpike
from holdfast_server.queries import goodput, ranks
from holdfast_server.queries.ranks import RankFindings
from holdfast_server.records import checkpoints, store_disks
from holdfast_server.records.interval_status import paced_of
from holdfast_server.records.job_status import (
    ENDED_WELL,
    RELAUNCHED,
    current_attempt,
    iterations_per_second,
    longest_seconds,
    recent_of,
    remedy_after_giving_up,
    seconds_of_last,
    status_of,
)
from holdfast_server.records.store_disks import StoreDisk
from holdfast_server.samples import sample_codec
from holdfast_server.samples.limits import (
    LOSS,
    median_seconds,
    throughput,
    usual_iteration_seconds,
    usual_throughput,
)

CURRENT_SECONDS = 7 * 86400.0
"""A job without reports for longer than this is evaluated only while it has an open alert."""
MAX_DAMAGED = 100
"""Damaged checkpoints that are listed per job."""
MAX_SPIKE_ITERATIONS = 5000
"""Most of the newest iterations whose losses are checked for spikes."""
SPIKE_CONTEXT_ITERATIONS = 2000
"""Iterations before those that are read as well, to compare them with."""
MAX_EXCEPTION = 300
GOODPUT_SECONDS = 3500.0
"""Least time that a goodput is the share of: the start of a job is not low goodput."""

_Losses = tuple[NDArray[np.int64], Floats, Floats]
_NO_LOSSES: _Losses = (np.empty(0, np.int64), np.empty(0), np.empty(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRestore:
    """The last restore that ended."""

    id: str
    state: str
    iteration: int
    seconds: float | None
    reason: str | None
    ago_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """The state of a job at one time."""

    job: str
    project: str
    status: JobStatus
    status_reason: str = ""
    exception: str = ""
    """First line of the exception that a failed job ended with, without its type; empty if it is unknown."""
    remedy: str = ""
    """What to do after a supervisor gave up."""
    is_paused: bool = False
    """Whether training is paused on request."""
    attempt_uid: str = ""
    host: str = ""
    """Host of rank 0 in the current attempt; empty if it is unknown."""
    silent_seconds: float = 0.0
    stuck_seconds: float | None = None
    """Time from the last report with a new iteration, or from the start, to the last report."""
    longest_iteration_seconds: float = 0.0
    """Longest of the newest iterations."""
    unsaved_iterations: int = 0
    unsaved_gpu_hours: float | None = None
    measured_overhead: float | None = None
    budget: float | None = None
    failing: RecentFailures | None = None
    damaged: tuple[str, ...] = ()
    """Damaged checkpoints in the store, newest first."""
    durable_age_seconds: float | None = None
    """Time from when the last checkpoint became durable, or the attempt started if that is later, to the last
    report."""
    loss: float | None = None
    iteration: int = 0
    lineage: int = 1
    finite_loss_iteration: int | None = None
    """Last iteration whose loss was finite."""
    iterations_per_second: float | None = None
    throughput: float | None = None
    """Tokens per second of the newest iterations where the script reports them, else iterations per second."""
    usual_throughput: float | None = None
    """The same over the last hours of training; `None` until it is known."""
    throughput_unit: str = "iterations"
    iteration_seconds: float | None = None
    """Median of the newest iterations."""
    usual_iteration_seconds: float | None = None
    """The same over the last hours of training; `None` until it is known."""
    goodput: float | None = None
    """Share of the last hour that advanced training, where it was analyzed; `None` for a younger job."""
    ranks: RankFindings | None = None
    """Waits for data and for a slow rank, where they were analyzed."""
    losses: LossHistory | None = None
    """Newest losses, where a rule checks them."""
    start_loss: float = 0.0
    """Median of the first losses; 0 if there is none."""
    newest_losses: tuple[float, ...] = ()
    """The last losses of all."""
    open_spike: OpenSpike | None = None
    """The spike of the open alert of the rule that checks these facts."""
    window: int = 0
    """Window of the rule that checks these facts."""
    store: str = ""
    """Address of the store, where agents report its disk; empty otherwise."""
    store_free_bytes: int | None = None
    """Newest measurement of all jobs that write there; else that of this job's last checkpoint."""
    store_total_bytes: int | None = None
    room_checkpoints: float | None = None
    """Number of further checkpoints of the last one's size that fit into the store."""
    order: EndedRestore | None = None


def candidates(session: Session, *, at_rest: bool, now: float) -> list[str]:
    """Return the jobs to evaluate: with `at_rest`, those that ended well and have no open alert; else the
    others."""
    jobs, attempts, alerts = models.JobRecord, models.AttemptRecord, models.AlertRecord
    has_alert = jobs.name.in_(select(alerts.job).where(alerts.resolved_at.is_(None)))
    ended = and_(func.coalesce(attempts.finished, "").in_(ENDED_WELL), attempts.supervisor.is_(None))
    heard = jobs.last_contact_at > now - CURRENT_SECONDS
    chosen = and_(heard, ended, not_(has_alert)) if at_rest else or_(and_(heard, not_(ended)), has_alert)
    query = select(jobs.name).outerjoin(attempts, current_attempt()).where(chosen)
    return list(session.scalars(query.order_by(jobs.name)))


def gather(session: Session, names: list[str], *, now: float) -> list[JobFacts]:
    jobs, attempts = models.JobRecord, models.AttemptRecord
    query = select(jobs, attempts).outerjoin(attempts, current_attempt()).where(jobs.name.in_(names))
    query = query.order_by(jobs.name)
    rows = session.execute(query).all()
    durable = checkpoints.last_durable(session, names)
    failing = checkpoints.failing(session, names)
    damaged = _damaged(session, names)
    orders = _ended_orders(session, names, now=now)
    disks = store_disks.of_jobs(session, names)
    return [
        _facts(
            job,
            attempt,
            durable.get(job.name),
            failing=failing.get(job.name),
            damaged=damaged.get(job.name, ()),
            disk=disks.get(job.name),
            order=orders.get(job.name),
            now=now,
        )
        for job, attempt in rows
    ]


def analyze(session: Session, jobs: Sequence[JobFacts], *, now: float) -> list[JobFacts]:
    """Return the facts of jobs with the goodput and the waits of those that train."""
    rows = models.JobRecord
    training = [job.job for job in jobs if job.status == "running"]
    if not training:
        return list(jobs)
    found = list(session.scalars(select(rows).where(rows.name.in_(training))))
    shares = goodput.shares(session, training, "1h", now=now)
    waits = ranks.findings(session, found, now=now)
    stopped = _stopped_on_request(session, training, since=now - 3600.0)
    whole = {
        name: share.share
        for name, share in shares.items()
        if share.wall_seconds >= GOODPUT_SECONDS and name not in stopped
    }
    return [replace(job, goodput=whole.get(job.job), ranks=waits.get(job.job)) for job in jobs]


def _stopped_on_request(session: Session, names: Sequence[str], *, since: float) -> set[str]:
    """Return the jobs that stood still on request since a time: paused, or from a planned end to a new start."""
    pauses, before, after = models.TrainingPauseRecord, aliased(models.AttemptRecord), models.AttemptRecord
    paused = select(pauses.job).where(
        pauses.job.in_(names), or_(pauses.ended_at > since, and_(pauses.ended_at.is_(None), pauses.at > since))
    )
    ended = (
        select(after.job)
        .join(before, (before.job == after.job) & (before.attempt == after.attempt - 1))
        .where(after.job.in_(names), after.started_at > since)
        .where(before.finished.in_(INTENDED_ENDS), before.finished != RELAUNCHED)
    )
    return {*session.scalars(paused), *session.scalars(ended)}


def _exception_message(attempt: models.AttemptRecord | None) -> str:
    """Return the message of the exception in the output of a failed attempt, without its type."""
    if attempt is None or attempt.exception is None:
        return ""
    _, named, message = attempt.exception.partition(f"{attempt.finished}: ")
    return (message if named else attempt.exception)[:MAX_EXCEPTION]


def _facts(
    job: models.JobRecord,
    attempt: models.AttemptRecord | None,
    durable: models.CheckpointRecord | None,
    *,
    failing: RecentFailures | None,
    damaged: tuple[str, ...],
    disk: StoreDisk | None,
    order: EndedRestore | None,
    now: float,
) -> JobFacts:
    recent, paced = recent_of(job), paced_of(job)
    status = status_of(job, attempt, now=now)
    unsaved = max(0, job.iteration - (durable.iteration if durable else 0))
    unsaved_seconds = seconds_of_last(recent, unsaved)
    ranks = max(1, attempt.world_size) if attempt else 1
    since = max(attempt.started_at if attempt else job.created_at, durable.at if durable else 0.0)
    # what a silent job does since is unknown: only `silent` is about that
    reported = min(now, job.last_contact_at)
    size = durable.payload_bytes - durable.reused_bytes if durable else 0
    free = disk.free_bytes if disk else durable.store_free_bytes if durable else None
    return JobFacts(
        job=job.name,
        project=job.project,
        status=status.status,
        status_reason=status.reason,
        exception=_exception_message(attempt) if status.status == "failed" else "",
        remedy=remedy_after_giving_up(attempt),
        is_paused=job.training_paused_at is not None,
        attempt_uid=job.uid,
        host=attempt.host or "" if attempt else "",
        silent_seconds=max(0.0, now - job.last_contact_at),
        stuck_seconds=None if job.progressed_at is None else max(0.0, reported - job.progressed_at),
        longest_iteration_seconds=longest_seconds(recent),
        unsaved_iterations=unsaved,
        unsaved_gpu_hours=None if unsaved_seconds is None else unsaved_seconds * ranks / 3600,
        measured_overhead=paced.measured_overhead if paced else None,
        budget=paced.budget if paced else None,
        failing=failing,
        damaged=damaged,
        durable_age_seconds=max(0.0, reported - since),
        loss=recent.metrics.get("loss"),
        iteration=job.iteration,
        lineage=job.lineage,
        start_loss=statistics.median(recent.start_losses or [0.0]),
        newest_losses=tuple(recent.loss[-NEWEST_LOSSES:]),
        finite_loss_iteration=recent.finite_loss_iteration,
        iterations_per_second=iterations_per_second(recent),
        throughput=throughput(recent),
        usual_throughput=usual_throughput(recent),
        throughput_unit="tokens" if recent.tokens else "iterations",
        iteration_seconds=median_seconds(recent.seconds),
        usual_iteration_seconds=usual_iteration_seconds(recent),
        store=disk.address if disk else "",
        store_free_bytes=free,
        store_total_bytes=disk.total_bytes if disk else None,
        room_checkpoints=free / size if size and free is not None else None,
        order=order,
    )


def _damaged(session: Session, names: list[str]) -> dict[str, tuple[str, ...]]:
    rows = models.CheckpointRecord
    newest = func.row_number().over(partition_by=rows.job, order_by=(rows.iteration.desc(), rows.id.desc()))
    ranked = (
        select(rows.job, rows.id, newest.label("place"))
        .where(rows.job.in_(names), rows.state == "damaged")
        .subquery()
    )
    query = select(ranked.c.job, ranked.c.id).where(ranked.c.place <= MAX_DAMAGED).order_by(ranked.c.place)
    found: dict[str, tuple[str, ...]] = {}
    for job, checkpoint in session.execute(query):
        found[job] = (*found.get(job, ()), checkpoint)
    return found


def _ended_orders(session: Session, names: Sequence[str], *, now: float) -> dict[str, EndedRestore]:
    orders, moves = models.RestoreOrderRecord, models.OrderTransitionRecord
    newest = func.row_number().over(partition_by=orders.job, order_by=(orders.created_at.desc(), orders.id))
    ranked = (
        select(orders.id, newest.label("place"))
        .where(orders.job.in_(names), orders.state.not_in(OPEN_ORDER_STATES))
        .subquery()
    )
    ended_at = select(func.max(moves.at)).where(moves.order_id == orders.id).correlate(orders).scalar_subquery()
    query = select(orders, ended_at).join(ranked, ranked.c.id == orders.id).where(ranked.c.place == 1)
    return {
        row.job: EndedRestore(
            id=row.id,
            state=row.state,
            iteration=row.iteration,
            seconds=row.seconds,
            reason=row.reason,
            ago_seconds=max(0.0, now - at),
        )
        for row, at in session.execute(query)
    }


def read_losses(session: Session, jobs: Sequence[JobFacts]) -> dict[str, LossHistory]:
    """Read the newest losses of the jobs that train and report one; of few jobs at once, as each takes memory."""
    reads = {job.job: _first_iteration(job) for job in jobs if job.status == "running" and job.loss is not None}
    if not reads:
        return {}
    replayed = _replayed_until(session, list(reads))
    lineages, starts = {job.job: job.lineage for job in jobs}, {job.job: job.start_loss for job in jobs}
    rows = models.ChunkRecord
    wanted = or_(
        *(
            and_(rows.job == name, rows.lineage == lineages[name], rows.last_iteration >= first)
            for name, first in reads.items()
        )
    )
    query = select(rows.job, rows.attempt, rows.columns).where(rows.rank == 0, wanted).order_by(rows.id)
    chunks: dict[str, list[tuple[int, bytes]]] = {}
    for name, attempt, columns in session.execute(query):
        chunks.setdefault(name, []).append((attempt, columns))
    made = {name: _join_chunks(found, reads[name]) for name, found in chunks.items()}
    return {
        name: LossHistory(*columns, replayed_until=replayed.get(name, 0), start=starts[name])
        for name, columns in made.items()
        if columns is not None
    }


def read_open_spikes(session: Session, alerts: Sequence[models.AlertRecord]) -> dict[tuple[str, str], OpenSpike]:
    """Return by job and rule the spikes of open alerts, with the losses before them on the same lineage."""
    rows, found = models.ChunkRecord, {}
    for alert in alerts:
        if alert.iteration is None or alert.lineage is None:
            continue
        first = alert.iteration - SPIKE_CONTEXT_ITERATIONS
        query = select(rows.columns).where(
            rows.job == alert.job, rows.rank == 0, rows.lineage == alert.lineage,
            rows.last_iteration >= first, rows.first_iteration < alert.iteration,
        )  # fmt: skip
        contents = list(session.scalars(query))
        joined = _join_losses(contents, first)
        iterations, losses, _ = _NO_LOSSES if joined is None else joined
        found[alert.job, alert.rule] = OpenSpike(
            subject=alert.subject,
            message=alert.message,
            value=alert.value,
            iteration=alert.iteration,
            lineage=alert.lineage,
            before=losses[: np.searchsorted(iterations, alert.iteration)],
        )
    return found


def _first_iteration(job: JobFacts) -> int:
    """Return the first iteration to read: enough for the window of any rule, also if not each one has a loss."""
    newest = min(MAX_SPIKE_ITERATIONS, math.ceil((job.iterations_per_second or 1.0) * NEWEST_SECONDS))
    return job.iteration - SPIKE_CONTEXT_ITERATIONS - newest


def _join_chunks(chunks: list[tuple[int, bytes]], first: int) -> _Losses | None:
    """Return the losses of the newest attempt."""
    newest = max(attempt for attempt, _ in chunks)
    return _join_losses([columns for attempt, columns in chunks if attempt == newest], first)


def _join_losses(contents: list[bytes], first: int) -> _Losses | None:
    """Return iterations, losses and times, ascending by iteration, from an iteration on."""
    parts = [part for columns in contents if (part := _losses_of(columns, first)) is not None]
    if not parts:
        return None
    iterations, losses, at = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.argsort(iterations, kind="stable")
    return iterations[order], losses[order], at[order]


def _losses_of(columns: bytes, first: int) -> _Losses | None:
    """Return those of a chunk as copies: it may have many metrics and iterations, which nothing keeps then."""
    table = sample_codec.unpack(columns)
    since = slice(int(np.searchsorted(table.iteration, first)), None)
    loss = table.metric(LOSS)
    if loss is None:
        return None
    return table.iteration[since].copy(), loss[since].copy(), table.at[since].copy()


def _replayed_until(session: Session, names: list[str]) -> dict[str, int]:
    """Return by job the last iteration of its other lineages and earlier attempts."""
    jobs, lineages, attempts = models.JobRecord, models.LineageRecord, models.AttemptRecord
    found: dict[str, int] = {}
    for rows, other in (
        (lineages, lineages.lineage != jobs.lineage),
        (attempts, attempts.uid != jobs.uid),
    ):
        query = select(rows.job, func.max(rows.last_iteration)).join(jobs, jobs.name == rows.job)
        for name, last in session.execute(query.where(rows.job.in_(names), other).group_by(rows.job)):
            found[name] = max(found.get(name, 0), last)
    return found
