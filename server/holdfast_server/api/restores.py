"""Restore requests."""

from __future__ import annotations

import uuid
from typing import Annotated

import msgspec
from fastapi import Query
from starlette.responses import Response

from holdfast.protocol.analyses import RestorePreview
from holdfast.protocol.jobs import Order
from holdfast.protocol.wire import DataSkip
from holdfast_server.api.desired_state import MAX_EDIT_BYTES
from holdfast_server.api.endpoints import Router
from holdfast_server.api.responses import Json, parse
from holdfast_server.control import approvals, control, previews
from holdfast_server.control.approvals import RestoreWish
from holdfast_server.core.access import OPERATE, RESTORE, VIEW
from holdfast_server.http.dependencies import Asker, Body, Db, Now, Who
from holdfast_server.queries import timeline
from holdfast_server.queries.job_view import view_job

router = Router("/api/v1/jobs/{job}/restores", tag="restores")


class RestoreRequest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The target of a restore: an iteration, or the id of a checkpoint."""

    iteration: int | None = None
    checkpoint: str | None = None
    key: str | None = None
    """Idempotency key: a repeated request with the same key returns the same restore."""
    expires_seconds: float | None = None
    """Time after which it expires unless an attempt has begun it; by default, a week."""
    degraded: bool = False
    """Replace lost bytes where only the important bytes are left; the lineage is then inexact."""
    skip: DataSkip | None = None
    """Data to leave out; by default none, so that training repeats the same data and reaches the same losses."""


@router.endpoint(
    "POST",
    "",
    access=RESTORE,
    body=RestoreRequest,
    returns=Order,
    status=201,
    errors={
        200: "The existing restore of an earlier request with this key, or of the same open request",
        404: "No such job, or no restorable checkpoint there: `nearest` is the next earlier one",
        409: "Another restore is in progress, this checkpoint cannot be restored, or the job is protected",
        422: "Invalid request",
    },
    max_body_bytes=MAX_EDIT_BYTES,
)
def place(job: str, body: Body, db: Db, asker: Asker, now: Now) -> Response:
    """Request a restore to a checkpoint or an iteration. The same `key` returns the same restore."""
    asked = parse(body, RestoreRequest)
    wish = RestoreWish(
        checkpoint=asked.checkpoint,
        iteration=asked.iteration,
        key=uuid.uuid4().hex if asked.key is None else asked.key,
        expires_seconds=asked.expires_seconds,
        degraded=asked.degraded,
        skip=asked.skip,
    )
    order, new = approvals.restore(db, job, wish, asker=asker, now=now)
    return Json(order, status_code=201 if new else 200)


@router.endpoint("GET", "", access=VIEW, returns=dict[str, list[Order]], errors={404: "No such job"})
def orders(job: str, db: Db, now: Now, limit: Annotated[int, Query(ge=1, le=200)] = 20) -> Response:
    """List restores, newest first."""
    with view_job(db, job, now=now) as view:
        return Json({"restores": timeline.orders(view, limit=limit)})


@router.endpoint("GET", "/preview", access=VIEW, returns=RestorePreview, errors={404: "No such job or checkpoint"})
def preview(job: str, checkpoint: str, db: Db, now: Now) -> Response:
    """Predict what a restore to this checkpoint would discard and how long it would take."""
    with view_job(db, job, now=now) as view:
        return Json(previews.preview_restore(view, checkpoint))


@router.endpoint("GET", "/{order}", access=VIEW, returns=Order, errors={404: "No such restore"})
def order(job: str, order: str, db: Db, now: Now) -> Response:
    """Return a restore with its steps so far."""
    with view_job(db, job, now=now) as view:
        return Json(timeline.order(view, order))


@router.endpoint(
    "POST",
    "/{order}/undo",
    access=RESTORE,
    returns=Order,
    status=201,
    errors={
        200: "The restore that an earlier undo has created",
        404: "No such restore",
        409: "Another restore is in progress, or there is nothing to undo",
    },
)
def undo(job: str, order: str, db: Db, asker: Asker, now: Now) -> Response:
    """Return to the state before this restore by another restore, which can be undone too."""
    checkpoint, key = control.undo_target(db, job, order)
    placed, new = approvals.restore(db, job, RestoreWish(checkpoint=checkpoint, key=key), asker=asker, now=now)
    return Json(placed, status_code=201 if new else 200)


@router.endpoint(
    "POST",
    "/{order}/cancel",
    access=OPERATE,
    returns=Order,
    errors={404: "No such restore", 409: "It has started or ended"},
)
def cancel(job: str, order: str, db: Db, who: Who, now: Now) -> Response:
    """Cancel a restore that the job has not begun."""
    return Json(control.cancel_restore(db, job, order, who=who, now=now))
