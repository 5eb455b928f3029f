"""Pins, labels and verification of a checkpoint."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from holdfast.protocol.jobs import CheckpointChanges, CheckpointInfo, ScrubReport, Tensors, Verification
from holdfast_server.api.desired_state import MAX_EDIT_BYTES
from holdfast_server.api.openapi import body, returns
from holdfast_server.api.responses import Json, parse
from holdfast_server.control import control
from holdfast_server.control import verification as verifications
from holdfast_server.http.dependencies import Db, Metrics, Now, Who

router = APIRouter(prefix="/jobs/{job}/checkpoints/{checkpoint}", tags=["control"])


class VerificationRequest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Options of a verification."""

    against: str | None = None
    """Id or iteration of a checkpoint to compare each tensor with."""


@router.patch(
    "",
    max_body_size=MAX_EDIT_BYTES,
    openapi_extra=body(CheckpointChanges),
    responses=returns(
        CheckpointInfo,
        _404="No such job or checkpoint: `nearest` is the next earlier one that can be restored",
        _409="It is not in the store, or the limit of pins is reached",
        _422="Invalid label, or no change",
    ),
)
async def change(job: str, checkpoint: str, request: Request, db: Db, who: Who, now: Now) -> Response:
    """Pin or label a checkpoint. Retention keeps a pinned checkpoint. The last change wins.

    `checkpoint` is its id, or the iteration that a restore would use. A pin is in effect once the job's
    `applied_version` has reached it: the agent then stores it with the checkpoint.
    """
    changes = parse(await request.body(), CheckpointChanges)
    return Json(await control.change_checkpoint(db, job, checkpoint, changes, who=who, now=now))


@router.get("/verification", responses=returns(Verification, _404="No such job or checkpoint"))
async def verification(job: str, checkpoint: str, db: Db) -> Response:
    """Return the state of a requested verification, and the last result."""
    return Json(await verifications.verification(db, job, checkpoint))


@router.post(
    "/verification",
    max_body_size=MAX_EDIT_BYTES,
    openapi_extra=body(VerificationRequest),
    responses=returns(
        Verification,
        _404="No such job or checkpoint: `nearest` is the next earlier one that can be restored",
        _409="It is not in the store, or the limit of waiting verifications is reached",
        _422="Invalid checkpoint",
    ),
)
async def verify(job: str, checkpoint: str, request: Request, db: Db, who: Who, now: Now) -> Response:
    """Request that the job compares all bytes with their digests. The server itself never reads a store.

    The job verifies in the background, one checkpoint at a time; a job that is not running, at its next start.
    """
    asked = parse(await request.body(), VerificationRequest)
    return Json(await verifications.verify(db, job, checkpoint, against=asked.against, who=who, now=now))


@router.put(
    "/scrub",
    max_body_size=MAX_EDIT_BYTES,
    openapi_extra=body(ScrubReport),
    responses=returns(Verification, _404="No such job or checkpoint", _422="Invalid report"),
)
async def scrub(job: str, checkpoint: str, request: Request, db: Db, now: Now, metrics: Metrics) -> Response:
    """Record what a scrub found in the store. Damage that remains raises the alert for damaged checkpoints."""
    report = parse(await request.body(), ScrubReport)
    found = await verifications.record_scrub(db, job, checkpoint, report, now=now)
    metrics.scrubbed(report.state)
    return Json(found)


@router.delete("/verification", responses=returns(Verification, _404="No such job or checkpoint"))
async def cancel(job: str, checkpoint: str, db: Db, who: Who, now: Now) -> Response:
    """Cancel the request; earlier results remain."""
    return Json(await verifications.cancel_verification(db, job, checkpoint, who=who, now=now))


@router.get("/tensors", responses=returns(Tensors, _404="No such job or checkpoint"))
async def tensors(job: str, checkpoint: str, db: Db, other: Annotated[str, Query(alias="with")] = "") -> Response:
    """Return a summary of the floating-point tensors, optionally compared with another checkpoint.

    A verification computes it. Tensors with non-finite values come first, then those that differ most. The norm of
    the difference is known if one checkpoint was verified against the other.
    """
    return Json(await verifications.tensors(db, job, checkpoint, other or None))
