"""What operators change of one checkpoint."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from holdfast_server import control
from holdfast_server.api.answers import Json, parse
from holdfast_server.api.desired import MAX_EDIT_BYTES
from holdfast_server.api.schema import body, returns
from holdfast_server.dependencies import Clock, Db, Who
from holdfast_server.views import CheckpointChanges, CheckpointRow

router = APIRouter(prefix="/jobs/{job}/checkpoints/{checkpoint}", tags=["control"])


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
