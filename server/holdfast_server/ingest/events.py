"""Effects of events on the tables."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from sqlalchemy.orm import Session

from holdfast.protocol import wire
from holdfast.protocol.field_types import MAX_ANNOTATION
from holdfast.protocol.orders import HaltReport
from holdfast.protocol.store_shares import StoreReport
from holdfast.protocol.values import ValueReport
from holdfast.protocol.wire import MAX_LABELS
from holdfast_server import models
from holdfast_server.db import on_connection
from holdfast_server.ingest import position
from holdfast_server.ingest.batches import MAX_LABEL
from holdfast_server.records import (
    attempt_reports,
    checkpoints,
    desired_state,
    job_status,
    job_values,
    pins,
    rank_totals,
    restore_orders,
    store_shares,
    training_halts,
    verifications,
)
from holdfast_server.records.ancestry import Ancestry, lineage_starts
from holdfast_server.samples import reading


@dataclass(frozen=True, slots=True)
class EventSource:
    """The batch that contains an event."""

    session: Session
    job: models.JobRecord
    attempt: models.AttemptRecord
    rank: int
    sequence: int
    ahead: bool
    """Whether it is the newest batch of the job; a replayed one from a spool is not."""
    now: float

    @property
    def current(self) -> bool:
        """Whether it is from rank 0 of the current attempt, which reports for the job."""
        return self.rank == 0 and self.attempt.uid == self.job.uid


def record(source: EventSource, event: wire.Event) -> None:
    session, job, attempt = source.session, source.job, source.attempt
    match event:
        case wire.AttemptStarted():
            _started(attempt, event)
            training_halts.begin_attempt(job, attempt)
            restore_orders.end_stale(session, job, attempt=attempt.attempt, now=source.now)
            checkpoints.fail_unfinished(session, job.name, before_attempt=attempt.attempt)
            position.prune_names(session, job.name)
        case wire.AttemptFinished():
            _finished(source, event)
        case wire.LineageStarted():
            _lineage(source, event)
        case wire.Checkpoint():
            _checkpoint(source, event)
        case wire.Inventory() if source.ahead:
            checkpoints.take_inventory(session, job.name, event, attempt=attempt.attempt, sequence=source.sequence)
            pins.adopt_pins(session, job, event, now=source.now)
        case wire.VerificationReport() if source.rank == 0:
            verifications.record(session, job, event, attempt=attempt.attempt, now=source.now)
        case wire.Stall():
            session.add(models.StallRecord(job=job.name, **msgspec.structs.asdict(event)))
        case wire.IntervalDecision():
            _paced(source, event)
        case wire.RankTotals():
            rank_totals.add_event(session, job.name, attempt.uid, source.rank, event)
        case wire.MachineSample():
            on_connection(
                session, attempt_reports.add_machine_sample, attempt, source.rank, event, source.sequence
            )
        case wire.DesiredStateApplied() if source.current:
            desired_state.record_applied(session, job, event.version, event.iteration, event.at)
        case wire.OrderStateChange():
            restore_orders.report(session, job, event, attempt=attempt.attempt, now=source.now)
        case HaltReport() if source.rank == 0:
            training_halts.report(session, job, attempt, event, current=source.current, now=source.now)
        case wire.RestoreModeReport() if source.rank == 0:
            _restore_mode(attempt, event)
        case wire.ConfigurationReport() if source.rank == 0:
            attempt_reports.record_configuration(session, attempt, event)
        case wire.OutputReport():
            attempt_reports.record_output(session, attempt, event)
        case wire.SupervisorReport() if attempt.uid == job.uid:
            job_status.record_supervisor(attempt, event, now=source.now)
        case wire.MemoryReport() if attempt.uid == job.uid:
            attempt_reports.record_memory(session, attempt, source.rank, event)
        case wire.RankPlace() if attempt.uid == job.uid:
            attempt_reports.record_place(session, attempt, source.rank, event)
        case StoreReport() if source.current:
            store_shares.record(session, job.name, attempt.uid, event, now=source.now)
        case wire.AnnotationReport():
            _annotate(source, event)
        case ValueReport() if source.rank == 0:
            job_values.record(session, job, event, current=source.current)
        case wire.Notice():
            notice(session, job.name, event)


def _checkpoint(source: EventSource, event: wire.Checkpoint) -> None:
    attempt = source.attempt
    checkpoints.record(
        source.session,
        source.job.name,
        event,
        attempt=attempt.attempt,
        sequence=source.sequence,
        ended=attempt.finished is not None or attempt.uid != source.job.uid,
    )


def notice(session: Session, job: str, event: wire.Notice) -> None:
    session.add(models.NoticeRecord(job=job, **msgspec.structs.asdict(event)))


def _annotate(source: EventSource, event: wire.AnnotationReport) -> None:
    """Store an annotation of the script at the lineage that trained the iteration."""
    job = source.job
    path = Ancestry(lineage_starts(source.session, [job.name]).get(job.name, []), event.lineage)
    lineage = path.lineage_at(event.iteration)
    at = event.at
    if event.iteration < job.iteration:  # it may be about an earlier iteration than the one it was written at
        at = min(at, reading.time_of(source.session, job.name, lineage, event.iteration) or at)
    source.session.add(
        models.AnnotationRecord(
            job=job.name,
            iteration=event.iteration,
            lineage=lineage,
            at=at,
            text=event.text[:MAX_ANNOTATION],
            written_at=event.at,
        )
    )


def _started(attempt: models.AttemptRecord, event: wire.AttemptStarted) -> None:
    # Heartbeats from before it loaded its checkpoint belong to it as well.
    attempt.started_at = min(attempt.started_at, event.at)
    attempt.iteration, attempt.lineage = event.iteration, event.lineage
    attempt.resumed_from, attempt.previous_exit = event.resumed_from, event.previous_exit
    attempt.host, attempt.pid, attempt.world_size = event.host, event.pid, event.world_size
    attempt.supervised, attempt.versions = event.supervised, msgspec.msgpack.encode(event.versions)
    if event.previous_exit is None and attempt.supervisor_until is None:
        attempt.supervisor = None  # a start by hand, while a supervisor was about to restart the script
    attempt.owner = event.owner[:MAX_LABEL] or None
    attempt.stores = msgspec.json.encode(event.stores).decode() if event.stores else None
    labels = {key[:MAX_LABEL]: value[:MAX_LABEL] for key, value in list(event.labels.items())[:MAX_LABELS]}
    attempt.labels = msgspec.json.encode(labels).decode() if labels else None


def _finished(source: EventSource, event: wire.AttemptFinished) -> None:
    session, job, attempt = source.session, source.job, source.attempt
    job_status.record_end(attempt, event)
    training_halts.end_pauses(session, job.name, attempt.uid, at=event.at)
    # Its own checkpoints as well: an agent reports its end after it has stopped writing.
    checkpoints.fail_unfinished(session, job.name, before_attempt=attempt.attempt + 1)
    reason = f"attempt {attempt.attempt} ended ({event.reason}) without reporting a result"
    restore_orders.mark_unknown(session, job, attempt=attempt.attempt, now=source.now, reason=reason)


def _restore_mode(attempt: models.AttemptRecord, event: wire.RestoreModeReport) -> None:
    attempt.restore_mode, attempt.restore_reason = event.mode, event.reason or None
    attempt.start_seconds = event.start_seconds
    attempt.on_trouble, attempt.batches_an_iteration = event.on_trouble or None, event.batches_an_iteration


def _lineage(source: EventSource, event: wire.LineageStarted) -> None:
    on_connection(source.session, position.ensure_lineage, source.job.name, event.lineage, at=event.at)
    row = source.session.get_one(models.LineageRecord, (source.job.name, event.lineage), populate_existing=True)
    source.job.latest_lineage = max(source.job.latest_lineage, event.lineage)
    row.at, row.iteration, row.parent, row.order_id = event.at, event.iteration, event.parent, event.order
    row.last_iteration = max(row.last_iteration, event.iteration)
    row.inexact = event.inexact
    row.left_out = msgspec.json.encode(event.left_out).decode() if event.left_out else None
    if event.origin is not None:
        origin = event.origin
        row.from_job, row.from_checkpoint = origin.job, origin.checkpoint
        row.from_digest = origin.digest[:MAX_LABEL]
    if event.order is not None or event.left is not None:
        job_values.supersede_by_restore(source.session, source.job.name, event.lineage)
    restore_orders.record_lineage(
        source.session, source.job, event, attempt=source.attempt.attempt, now=source.now
    )


def _paced(source: EventSource, event: wire.IntervalDecision) -> None:
    if source.ahead:
        source.job.paced = msgspec.msgpack.encode(event)
    source.session.add(
        models.IntervalDecisionRecord(
            job=source.job.name,
            at=event.at,
            iteration=event.iteration,
            lineage=event.lineage,
            interval=event.interval,
            interval_seconds=event.interval_seconds,
            budget=event.budget,
            measured_overhead=event.measured_overhead,
        )
    )
