"""Verification and scrubs of a job's checkpoints, which the pages and the HTTP API call."""

from __future__ import annotations

from sqlalchemy.orm import Session

from holdfast.protocol.jobs import ScrubReport, Tensors, Verification
from holdfast_server.db import job_transaction
from holdfast_server.queries.job_view import JobView, find_job
from holdfast_server.records import audit, checkpoints, verifications


@job_transaction
def verify(
    session: Session, job: str, checkpoint: str, *, against: str | None = None, who: str, now: float
) -> Verification:
    """Request that an agent verifies a checkpoint by reading it back; an open request is reused.

    Args:
        checkpoint: its id, or its iteration.
        against: another checkpoint, by id or iteration, whose tensors to compare.

    Raises:
        UnknownJob, InvalidSetting.
        CheckpointNotFound: with the nearest earlier one.
        NotPossible: it is not in the store, or the job has as many open requests as it may.
    """
    row = find_job(session, job)
    found = checkpoints.named(session, row, checkpoint)
    other = checkpoints.named(session, row, against) if against else None
    if verifications.request(session, row, found, against=other, who=who, now=now):
        about = {"checkpoint": found.id} | ({"against": other.id} if other else {})
        audit.record(
            session, who=who, action="checkpoint.verify", now=now, job=job, project=row.project, after=about
        )
    return verifications.find(session, job, found.id)


@job_transaction
def cancel_verification(session: Session, job: str, checkpoint: str, *, who: str, now: float) -> Verification:
    """Cancel the open request, if there is one. Raises as `verify` does."""
    row = find_job(session, job)
    found = checkpoints.named(session, row, checkpoint)
    if verifications.cancel(session, row, found.id, who=who, now=now):
        audit.record(
            session, who=who, action="checkpoint.verify_cancel", now=now, job=job, project=row.project,
            after={"checkpoint": found.id},
        )  # fmt: skip
    return verifications.find(session, job, found.id)


@job_transaction
def record_scrub(session: Session, job: str, checkpoint: str, report: ScrubReport, *, now: float) -> Verification:
    """Record the result of a scrub of a checkpoint in the job's store. Raises as `verification` does."""
    row = find_job(session, job)
    found = checkpoints.named(session, row, checkpoint)
    verifications.record_scrub(session, found, report, now=now)
    return verifications.find(session, job, found.id)


def verification(view: JobView, checkpoint: str) -> Verification:
    """Return the verification of a checkpoint. Raises CheckpointNotFound and InvalidSetting."""
    found = checkpoints.named(view.session, view.job, checkpoint)
    return verifications.find(view.session, view.name, found.id)


def tensors(view: JobView, checkpoint: str, other: str | None = None) -> Tensors:
    """Return the norms of a checkpoint's tensors, compared with another's. Raises as `verification` does."""
    here = checkpoints.named(view.session, view.job, checkpoint).id
    there = checkpoints.named(view.session, view.job, other).id if other else None
    return verifications.tensors(view.session, view.name, here, there)
