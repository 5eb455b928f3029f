"""Pins, labels and verification of a checkpoint."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import Query
from starlette.responses import Response

from holdfast.protocol.jobs import CheckpointChanges, CheckpointInfo, ScrubReport, Tensors, Verification
from holdfast_server.api.desired_state import MAX_EDIT_BYTES
from holdfast_server.api.endpoints import Router
from holdfast_server.api.responses import Json, parse
from holdfast_server.control import control
from holdfast_server.control import verification as verifications
from holdfast_server.core.access import OPERATE, VIEW
from holdfast_server.http.dependencies import Body, Db, Metrics, Now, Who
from holdfast_server.queries.job_view import view_job

router = Router("/api/v1/jobs/{job}/checkpoints/{checkpoint}", tag="control")


class VerificationRequest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Options of a verification."""

    against: str | None = None
    """Id or iteration of a checkpoint to compare each tensor with."""


@router.endpoint(
    "PATCH",
    "",
    access=OPERATE,
    body=CheckpointChanges,
    returns=CheckpointInfo,
    errors={
        404: "No such job or checkpoint: `nearest` is the next earlier one that can be restored",
        409: "It is not in the store, or the limit of pins is reached",
        422: "Invalid label, or no change",
    },
    max_body_bytes=MAX_EDIT_BYTES,
)
def change(job: str, checkpoint: str, body: Body, db: Db, who: Who, now: Now) -> Response:
    """Pin or label a checkpoint. Retention keeps a pinned checkpoint. The last change wins.

    `checkpoint` is its id, or the iteration that a restore would use. A pin is in effect once the job's
    `applied_version` has reached it: the agent then stores it with the checkpoint.
    """
    changes = parse(body, CheckpointChanges)
    return Json(control.change_checkpoint(db, job, checkpoint, changes, who=who, now=now))


@router.endpoint(
    "GET", "/verification", access=VIEW, returns=Verification, errors={404: "No such job or checkpoint"}
)
def verification(job: str, checkpoint: str, db: Db, now: Now) -> Response:
    """Return the state of a requested verification, and the last result."""
    with view_job(db, job, now=now) as view:
        return Json(verifications.verification(view, checkpoint))


@router.endpoint(
    "POST",
    "/verification",
    access=OPERATE,
    body=VerificationRequest,
    returns=Verification,
    errors={
        404: "No such job or checkpoint: `nearest` is the next earlier one that can be restored",
        409: "It is not in the store, or the limit of waiting verifications is reached",
        422: "Invalid checkpoint",
    },
    max_body_bytes=MAX_EDIT_BYTES,
)
def verify(job: str, checkpoint: str, body: Body, db: Db, who: Who, now: Now) -> Response:
    """Request that the job compare all bytes with their digests. The server itself never reads a store.

    The job verifies in the background, one checkpoint at a time; a job that is not running, at its next start.
    """
    asked = parse(body, VerificationRequest)
    return Json(verifications.verify(db, job, checkpoint, against=asked.against, who=who, now=now))


@router.endpoint(
    "PUT",
    "/scrub",
    access=OPERATE,
    body=ScrubReport,
    returns=Verification,
    errors={404: "No such job or checkpoint", 422: "Invalid report"},
    max_body_bytes=MAX_EDIT_BYTES,
)
def scrub(job: str, checkpoint: str, body: Body, db: Db, now: Now, metrics: Metrics) -> Response:
    """Record the result of a scrub in the store. Damage that remains raises the alert for damaged checkpoints."""
    report = parse(body, ScrubReport)
    found = verifications.record_scrub(db, job, checkpoint, report, now=now)
    metrics.scrubbed(report.state)
    return Json(found)


@router.endpoint(
    "DELETE", "/verification", access=OPERATE, returns=Verification, errors={404: "No such job or checkpoint"}
)
def cancel(job: str, checkpoint: str, db: Db, who: Who, now: Now) -> Response:
    """Cancel the request; earlier results remain."""
    return Json(verifications.cancel_verification(db, job, checkpoint, who=who, now=now))


@router.endpoint("GET", "/tensors", access=VIEW, returns=Tensors, errors={404: "No such job or checkpoint"})
def tensors(
    job: str, checkpoint: str, db: Db, now: Now, other: Annotated[str, Query(alias="with")] = ""
) -> Response:
    """Return a summary of the floating-point tensors, optionally compared with another checkpoint.

    A verification computes it. Tensors with non-finite values come first, then those that differ most. The norm of
    the difference is known if one checkpoint was verified against the other.
    """
    with view_job(db, job, now=now) as view:
        return Json(verifications.tensors(view, checkpoint, other or None))
