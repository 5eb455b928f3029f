"""The report of a job and of the fleet."""

from __future__ import annotations

from fastapi.responses import Response

from holdfast_server.api.endpoints import Router
from holdfast_server.api.report import DEFAULT_SINCE, Since, since_seconds
from holdfast_server.core.access import LISTS, VIEW
from holdfast_server.http.dependencies import Asker, Db, Now
from holdfast_server.queries import fleet
from holdfast_server.queries.job_view import find_job
from holdfast_server.queries.report import ReportQuery, report
from holdfast_web.report import views

router = Router()


@router.endpoint(
    "GET",
    "/report",
    access=LISTS,  # the query checks the projects
)
def fleet_report(db: Db, asker: Asker, now: Now, since: Since = DEFAULT_SINCE, project: str = "") -> Response:
    asked = ReportQuery(
        since_seconds=since_seconds(since), project=project or None, visible_projects=asker.visible_projects
    )
    with db.read() as session:
        found = report(session, asked, now=now)
    return views.report_page(found, since, fleet.projects_of(db, asker.visible_projects)).response()


@router.endpoint("GET", "/jobs/{job}/report", access=VIEW)
def job_report(job: str, db: Db, now: Now, since: Since = DEFAULT_SINCE) -> Response:
    asked = ReportQuery(since_seconds=since_seconds(since), job=job)
    with db.read() as session:
        find_job(session, job)
        found = report(session, asked, now=now)
    return views.report_page(found, since, []).response()
