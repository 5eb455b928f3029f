"""Limits on the data that a project keeps."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from holdfast.protocol.questions import ReportRetention, ReportRetentionChanges
from holdfast_server.api.desired_state import MAX_EDIT_BYTES
from holdfast_server.api.openapi import body, returns
from holdfast_server.api.responses import Json, parse
from holdfast_server.control import report_retention
from holdfast_server.http.dependencies import Db, Now, Who

router = APIRouter(prefix="/projects/{project}/retention", tags=["projects"])


@router.get("", responses=returns(ReportRetention, _404="No such project"))
async def get_report_retention(project: str, db: Db) -> Response:
    """Return how long the project keeps reports, and their current size."""
    return Json(await report_retention.get_settings(db, project))


@router.patch(
    "",
    max_body_size=MAX_EDIT_BYTES,
    openapi_extra=body(ReportRetentionChanges),
    responses=returns(ReportRetention, _404="No such project", _422="Invalid limit"),
)
async def change(project: str, request: Request, db: Db, now: Now, who: Who) -> Response:
    """Change limits; `null` removes one. Data beyond a limit is deleted within minutes, irreversibly."""
    changes = parse(await request.body(), ReportRetentionChanges)
    return Json(await report_retention.change(db, project, changes, who=who, now=now))
