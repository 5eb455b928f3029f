"""What operators change of one checkpoint."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from holdfast.protocol.jobs import CheckpointChanges, CheckpointRow, Tensors, Verification
from holdfast_server.api.desired_state import MAX_EDIT_BYTES
from holdfast_server.api.openapi import body, returns
from holdfast_server.api.responses import Json, parse
from holdfast_server.control import control
from holdfast_server.http.dependencies import Clock, Db, Who

router = APIRouter(prefix="/jobs/{job}/checkpoints/{checkpoint}", tags=["control"])


class VerificationRequest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What is wanted of a checkpoint beside that it is read back."""

    against: str | None = None
    """Tell how far each tensor is from this checkpoint, by id or iteration."""


@router.patch(
    "",
    max_body_size=MAX_EDIT_BYTES,
    openapi_extra=body(CheckpointChanges),
    responses=returns(
        CheckpointRow,
        _404="No such job or checkpoint: `nearest` is the next earlier one that can be restored",
        _409="It is not in the store, or as many are pinned as can be",
        _422="Not a label, or nothing to change",
    ),
)
async def change(job: str, checkpoint: str, request: Request, db: Db, who: Who, clock: Clock) -> Response:
    """Pin it, so that retention leaves it until it is unpinned, or label it. The last word wins.

    `checkpoint` is its id, or the iteration that a restore would go back to. How far a pin has come is told by the
    job's `applied_version`: from then on it holds in the agent, which notes it in the store.
    """
    changes = parse(await request.body(), CheckpointChanges)
    return Json(await control.change_checkpoint(db, job, checkpoint, changes, who=who, now=clock()))


@router.get("/verification", responses=returns(Verification, _404="No such job or checkpoint"))
async def verification(job: str, checkpoint: str, db: Db) -> Response:
    """Whether anybody asked for it to be read back, how far that is, and what was last found."""
    return Json(await control.verification(db, job, checkpoint))


@router.post(
    "/verification",
    max_body_size=MAX_EDIT_BYTES,
    openapi_extra=body(VerificationRequest),
    responses=returns(
        Verification,
        _404="No such job or checkpoint: `nearest` is the next earlier one that can be restored",
        _409="It is not in the store, or as many wait as can",
        _422="Not a checkpoint",
    ),
)
async def verify(job: str, checkpoint: str, request: Request, db: Db, who: Who, clock: Clock) -> Response:
    """Have its every byte compared with its digests, by the job itself: this server never reads a store.

    The job does it in the background, one checkpoint after the other; one that is not running, at its next start.
    """
    asked = parse(await request.body(), VerificationRequest)
    return Json(await control.verify(db, job, checkpoint, against=asked.against, who=who, now=clock()))


@router.delete("/verification", responses=returns(Verification, _404="No such job or checkpoint"))
async def cancel(job: str, checkpoint: str, db: Db, who: Who, clock: Clock) -> Response:
    """Take the open request back; what was found before stays."""
    return Json(await control.cancel_verification(db, job, checkpoint, who=who, now=clock()))


@router.get("/tensors", responses=returns(Tensors, _404="No such job or checkpoint"))
async def tensors(job: str, checkpoint: str, db: Db, other: Annotated[str, Query(alias="with")] = "") -> Response:
    """What its floating-point tensors come to, beside those of another checkpoint where one is given.

    They are summed up when a checkpoint is verified. Those that hold what is not finite come first, then those
    that differ most; the norm of the difference is known where one was verified against the other.
    """
    return Json(await control.tensors(db, job, checkpoint, other or None))
