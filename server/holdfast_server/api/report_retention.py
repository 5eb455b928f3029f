"""Limits on the data that a project keeps."""

from __future__ import annotations

from starlette.responses import Response

from holdfast.protocol.analyses import ReportRetention, ReportRetentionChanges
from holdfast_server.api.desired_state import MAX_EDIT_BYTES
from holdfast_server.api.endpoints import Router
from holdfast_server.api.responses import Json, parse
from holdfast_server.control import report_retention
from holdfast_server.core.access import PROJECT_GRANT, PROJECT_VIEW
from holdfast_server.http.dependencies import Body, Db, Now, Who

router = Router("/api/v1/projects/{project}/retention", tag="projects")


@router.endpoint("GET", "", access=PROJECT_VIEW, returns=ReportRetention, errors={404: "No such project"})
def get_report_retention(project: str, db: Db) -> Response:
    """Return how long the project keeps reports, and their current size."""
    return Json(report_retention.get_settings(db, project))


@router.endpoint(
    "PATCH",
    "",
    access=PROJECT_GRANT,
    body=ReportRetentionChanges,
    returns=ReportRetention,
    errors={404: "No such project", 422: "Invalid limit"},
    max_body_bytes=MAX_EDIT_BYTES,
)
def change(project: str, body: Body, db: Db, now: Now, who: Who) -> Response:
    """Change limits; `null` removes one. Data beyond a limit is deleted within minutes, irreversibly."""
    changes = parse(body, ReportRetentionChanges)
    return Json(report_retention.change(db, project, changes, who=who, now=now))
