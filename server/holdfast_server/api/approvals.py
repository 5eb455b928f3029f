"""Protected jobs, and the approvals of requests about them."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from holdfast.protocol.administration import Approval
from holdfast.protocol.jobs import JobSummary
from holdfast_server.api.desired_state import MAX_EDIT_BYTES
from holdfast_server.api.endpoints import Router
from holdfast_server.api.responses import Json, parse
from holdfast_server.control import approvals
from holdfast_server.core.access import ADMINISTER, OPERATE, RESTORE, VIEW
from holdfast_server.http.dependencies import Asker, Body, Db, Now
from holdfast_server.http.services import services_of
from holdfast_server.queries import summaries
from holdfast_server.queries.job_view import view_job

router = Router("/api/v1/jobs/{job}", tag="approvals")
ERRORS = {403: "You asked for it yourself", 404: "No such job or request", 409: "It is no longer open"}


class ProtectionRequest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    protected: bool


@router.endpoint(
    "PUT",
    "/protection",
    access=ADMINISTER,
    body=ProtectionRequest,
    returns=JobSummary,
    errors={404: "No such job", 409: "The server has no accounts, or it waits for approval"},
    max_body_bytes=MAX_EDIT_BYTES,
)
def protect(request: Request, job: str, body: Body, db: Db, asker: Asker, now: Now) -> Response:
    """Protect a job: a second person must approve restores, pauses, ends, values and the end of protection."""
    asked = parse(body, ProtectionRequest)
    has_accounts = services_of(request.app).auth.has_accounts
    approvals.protect(db, job, protected=asked.protected, has_accounts=has_accounts, asker=asker, now=now)
    with view_job(db, job, now=now) as view:
        return Json(summaries.job_summary(view))


@router.endpoint("GET", "/approvals", access=VIEW, returns=dict[str, list[Approval]], errors={404: "No such job"})
def listed(job: str, db: Db, now: Now) -> Response:
    """List the newest requests that need or needed approval."""
    with view_job(db, job, now=now) as view:
        return Json({"approvals": approvals.approvals(view.session, job, now=now)})


@router.endpoint("POST", "/approvals/{approval}/approve", access=RESTORE, returns=Approval, errors=ERRORS)
def approve(job: str, approval: str, db: Db, asker: Asker, now: Now) -> Response:
    """Approve another person's request, which takes effect immediately. A key counts as its owner."""
    return Json(approvals.approve(db, job, approval, asker=asker, now=now))


@router.endpoint("POST", "/approvals/{approval}/decline", access=OPERATE, returns=Approval, errors=ERRORS)
def decline(job: str, approval: str, db: Db, asker: Asker, now: Now) -> Response:
    """Decline a request, or withdraw your own."""
    return Json(approvals.decline(db, job, approval, asker=asker, now=now))
