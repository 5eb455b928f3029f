"""The dialogs that pause and end training, and the button that continues it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastapi.responses import RedirectResponse, Response

from holdfast.protocol.jobs import JobSummary
from holdfast.protocol.orders import HaltAction
from holdfast_server.api.endpoints import Router
from holdfast_server.control import approvals, control
from holdfast_server.core.access import OPERATE, RESTORE
from holdfast_server.core.errors import NotPossible, WaitsForApproval
from holdfast_server.http.dependencies import Asker, Db, Now, Who
from holdfast_server.queries import summaries
from holdfast_server.queries.job_view import view_job
from holdfast_web.job import views
from holdfast_web.job.approvals import shown
from holdfast_web.shared.render import View
from holdfast_web.shared.routing import Htmx

router = Router()


@dataclass(frozen=True, kw_only=True)
class HaltDialog(View):
    template: ClassVar[str] = "job/_halt.html"
    page_template: ClassVar[str] = "job/halt.html"
    job: JobSummary
    action: HaltAction
    refusal: str = ""
    now: float


@router.endpoint("GET", "/jobs/{job}/training/pause", access=RESTORE)
def pause_dialog(job: str, db: Db, now: Now, htmx: Htmx = False) -> Response:
    return _dialog(db, job, "pause", now, htmx)


@router.endpoint("GET", "/jobs/{job}/training/end", access=RESTORE)
def end_dialog(job: str, db: Db, now: Now, htmx: Htmx = False) -> Response:
    return _dialog(db, job, "end", now, htmx)


@router.endpoint("POST", "/jobs/{job}/training/pause", access=RESTORE)
def pause(job: str, db: Db, asker: Asker, now: Now, htmx: Htmx = False) -> Response:
    return _order(db, job, "pause", asker, now, htmx)


@router.endpoint("POST", "/jobs/{job}/training/end", access=RESTORE)
def end(job: str, db: Db, asker: Asker, now: Now, htmx: Htmx = False) -> Response:
    return _order(db, job, "end", asker, now, htmx)


@router.endpoint("POST", "/jobs/{job}/training/continue", access=OPERATE)
def go_on(job: str, db: Db, who: Who, now: Now, htmx: Htmx = False) -> Response:
    try:
        control.order_training(db, job, "continue", who=who, now=now)
    except NotPossible:
        # the page was outdated; answer with the current state
        if not htmx:
            raise
    return _moved(db, job, now, htmx)


def _dialog(db: Db, job: str, action: HaltAction, now: float, htmx: bool, *, refusal: str = "") -> Response:
    with view_job(db, job, now=now) as view:
        dialog = HaltDialog(job=summaries.job_summary(view), action=action, refusal=refusal, now=now)
    return dialog.part_or_page(htmx, 409 if refusal else 200)


def _order(db: Db, job: str, action: HaltAction, asker: Asker, now: float, htmx: bool) -> Response:
    try:
        approvals.order_training(db, job, action, asker=asker, now=now)
    except WaitsForApproval:
        return shown(db, job, now, htmx)
    except NotPossible as refusal:
        return _dialog(db, job, action, now, htmx, refusal=str(refusal))
    return _moved(db, job, now, htmx)


def _moved(db: Db, job: str, now: float, htmx: bool) -> Response:
    if not htmx:
        return RedirectResponse(f"/jobs/{job}#controls", 303)
    with view_job(db, job, now=now) as view:
        live = views.job_live(view)
    return live.response(headers={"HX-Trigger": "holdfast:restore-requested"})
