"""Restore orders."""

from __future__ import annotations

import uuid
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from holdfast.protocol.jobs import Order
from holdfast.protocol.questions import RestorePreview
from holdfast_server.api.desired_state import MAX_EDIT_BYTES
from holdfast_server.api.openapi import body, returns
from holdfast_server.api.responses import Json, parse
from holdfast_server.control import control, previews
from holdfast_server.http.dependencies import Clock, Db, Who
from holdfast_server.queries import timeline

router = APIRouter(prefix="/jobs/{job}/restores", tags=["restores"])


class RestoreRequest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Where to go back to: an iteration, or a checkpoint by its id."""

    iteration: int | None = None
    checkpoint: str | None = None
    key: str | None = None
    """Names the wish: sent again with the same key, it is the same order."""
    expires_seconds: float | None = None
    """After which it ends unless an attempt has taken it up; a week, if nothing is said."""


@router.post(
    "",
    status_code=201,
    max_body_size=MAX_EDIT_BYTES,
    openapi_extra=body(RestoreRequest),
    responses=returns(
        Order,
        201,
        _200="The order that this key, or the first click, has made already",
        _404="No such job, or no restorable checkpoint there: `nearest` is the next earlier one",
        _409="Another restore is under way, or this checkpoint cannot be restored",
        _422="Not a restore",
    ),
)
async def place(job: str, request: Request, db: Db, who: Who, clock: Clock) -> Response:
    asked = parse(await request.body(), RestoreRequest)
    order, new = await control.order_restore(
        db,
        job,
        checkpoint=asked.checkpoint,
        iteration=asked.iteration,
        key=uuid.uuid4().hex if asked.key is None else asked.key,
        who=who,
        now=clock(),
        expires_seconds=asked.expires_seconds,
    )
    return Json(order, status_code=201 if new else 200)


@router.get("", responses=returns(dict[str, list[Order]], _404="No such job"))
async def orders(job: str, db: Db, limit: Annotated[int, Query(ge=1, le=200)] = 20) -> Response:
    """Newest first."""
    return Json({"restores": await timeline.orders(db, job, limit=limit)})


@router.get("/preview", responses=returns(RestorePreview, _404="No such job or checkpoint"))
async def preview(job: str, checkpoint: str, db: Db, clock: Clock) -> Response:
    """What a restore to this checkpoint would give up, and take."""
    return Json(await previews.preview_restore(db, job, checkpoint, now=clock()))


@router.get("/{order}", responses=returns(Order, _404="No such order"))
async def order(job: str, order: str, db: Db) -> Response:
    return Json(await timeline.order(db, job, order))


@router.post(
    "/{order}/undo",
    status_code=201,
    responses=returns(
        Order,
        201,
        _200="The order that an undo before has made already",
        _404="No such order",
        _409="Another restore is under way, or there is nothing to undo",
    ),
)
async def undo(job: str, order: str, db: Db, who: Who, clock: Clock) -> Response:
    """Go back to the state that this restore left, by another restore, which can be undone as well."""
    placed, new = await control.undo_restore(db, job, order, who=who, now=clock())
    return Json(placed, status_code=201 if new else 200)


@router.post("/{order}/cancel", responses=returns(Order, _404="No such order", _409="It has gone too far"))
async def cancel(job: str, order: str, db: Db, who: Who, clock: Clock) -> Response:
    return Json(await control.cancel_restore(db, job, order, who=who, now=clock()))
