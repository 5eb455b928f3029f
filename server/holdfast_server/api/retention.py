"""How long a project keeps what its jobs reported."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from holdfast.protocol.questions import Kept, RetentionChanges
from holdfast_server.api.desired_state import MAX_EDIT_BYTES
from holdfast_server.api.openapi import body, returns
from holdfast_server.api.responses import Json, parse
from holdfast_server.control import retention
from holdfast_server.core.request_id import request_id
from holdfast_server.http.dependencies import Clock, Db, Who

router = APIRouter(prefix="/projects/{project}/retention", tags=["projects"])


@router.get("", responses=returns(Kept, _404="No such project"))
async def kept(project: str, db: Db) -> Response:
    return Json(await retention.kept(db, project))


@router.patch(
    "",
    max_body_size=MAX_EDIT_BYTES,
    openapi_extra=body(RetentionChanges),
    responses=returns(Kept, _404="No such project", _422="A limit that cannot be"),
)
async def change(project: str, request: Request, db: Db, clock: Clock, who: Who) -> Response:
    """Change some limits; `null` is none. What is beyond one goes within minutes, and does not come back."""
    changes = parse(await request.body(), RetentionChanges)
    return Json(await retention.change(db, project, changes, who=who, request_id=request_id(), now=clock()))
