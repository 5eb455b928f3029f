"""Approval of what is asked of a protected job, and the protection itself."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import RedirectResponse, Response

from holdfast_server.api.endpoints import Router
from holdfast_server.control import approvals
from holdfast_server.core.access import ADMINISTER, OPERATE, RESTORE
from holdfast_server.core.errors import WaitsForApproval
from holdfast_server.http.dependencies import Asker, Db, Now
from holdfast_server.http.services import services_of
from holdfast_server.queries.job_view import view_job
from holdfast_web.job import views
from holdfast_web.shared.routing import Htmx, Text

router = Router()


@router.endpoint("POST", "/jobs/{job}/approvals/{approval}/approve", access=RESTORE)
def approve(job: str, approval: str, db: Db, asker: Asker, now: Now, htmx: Htmx = False) -> Response:
    approvals.approve(db, job, approval, asker=asker, now=now)
    return shown(db, job, now, htmx)


@router.endpoint("POST", "/jobs/{job}/approvals/{approval}/decline", access=OPERATE)
def decline(job: str, approval: str, db: Db, asker: Asker, now: Now, htmx: Htmx = False) -> Response:
    approvals.decline(db, job, approval, asker=asker, now=now)
    return shown(db, job, now, htmx)


@router.endpoint("POST", "/jobs/{job}/protection", access=ADMINISTER)
def protect(request: Request, job: str, db: Db, asker: Asker, now: Now, protected: Text) -> Response:
    has_accounts = services_of(request.app).auth.has_accounts
    try:
        approvals.protect(db, job, protected=protected == "true", has_accounts=has_accounts, asker=asker, now=now)
    except WaitsForApproval:
        return RedirectResponse(f"/jobs/{job}#alerts", 303)
    return RedirectResponse(f"/jobs/{job}#controls", 303)


def shown(db: Db, job: str, now: float, htmx: bool) -> Response:
    """Answer with the job, whose page shows what waits for approval."""
    if not htmx:
        return RedirectResponse(f"/jobs/{job}#alerts", 303)
    with view_job(db, job, now=now) as view:
        live = views.job_live(view)
    return live.response(headers={"HX-Trigger": "holdfast:restore-requested"})
