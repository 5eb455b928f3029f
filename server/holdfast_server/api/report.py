"""The report on a job or on the fleet over some hours."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.responses import Response

from holdfast.protocol.report import Report
from holdfast.units import parse_positive_seconds
from holdfast_server.api.endpoints import Router
from holdfast_server.api.responses import Json
from holdfast_server.core.access import LISTS, VIEW
from holdfast_server.core.errors import InvalidSetting
from holdfast_server.http.dependencies import Asker, Db, Now
from holdfast_server.queries import report
from holdfast_server.queries.job_view import find_job

router = Router("/api/v1", tag="jobs")

DEFAULT_SINCE = "12h"
Since = Annotated[str, Query(description="how far back, as in `12h` or `7d`; at most 31 days")]


def since_seconds(text: str) -> float:
    """Raises InvalidSetting."""
    try:
        return parse_positive_seconds(text, "since")
    except ValueError as error:
        raise InvalidSetting("since", str(error)) from error


@router.endpoint(
    "GET",
    "/report",
    access=LISTS,  # the query checks the projects
    returns=Report,
    errors={422: "Invalid `since`"},
)
def fleet_report(
    db: Db, asker: Asker, now: Now, since: Since = DEFAULT_SINCE, project: str | None = None
) -> Response:
    """Report the failures of the fleet, their cost, the actions taken, and the decisions that are due."""
    asked = report.ReportQuery(
        since_seconds=since_seconds(since), project=project, visible_projects=asker.visible_projects
    )
    with db.read() as session:
        return Json(report.report(session, asked, now=now))


@router.endpoint(
    "GET",
    "/jobs/{job}/report",
    access=VIEW,
    returns=Report,
    errors={404: "No such job", 422: "Invalid `since`"},
)
def job_report(job: str, db: Db, now: Now, since: Since = DEFAULT_SINCE) -> Response:
    """Report the failures of a job, their cost, the actions taken, and the decision that is due."""
    asked = report.ReportQuery(since_seconds=since_seconds(since), job=job)
    with db.read() as session:
        find_job(session, job)
        return Json(report.report(session, asked, now=now))
