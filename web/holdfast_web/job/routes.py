"""The page of a job and its dialogs: plan, restore, delete. Every form works without scripts."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import Depends, Query, Request
from fastapi.responses import RedirectResponse, Response
from pydantic import AfterValidator

from holdfast.protocol.field_types import MAX_ITERATION
from holdfast_server.api.endpoints import Router
from holdfast_server.api.responses import EncodedBody, encoding_for
from holdfast_server.control import approvals, control, deletion
from holdfast_server.control.approvals import RestoreWish
from holdfast_server.core.access import ADMINISTER, OPERATE, RESTORE, VIEW
from holdfast_server.core.errors import (
    NotCancellable,
    NotPossible,
    OpenOrder,
    RequestRefused,
    UnknownJob,
    UnknownOrder,
    WaitsForApproval,
)
from holdfast_server.http.dependencies import Asker, Clock, Db, Now, SharedAnswers, Who
from holdfast_server.queries import summaries
from holdfast_server.queries.job_view import view_job
from holdfast_web.job import views
from holdfast_web.job.approvals import shown
from holdfast_web.shared import forms
from holdfast_web.shared.render import HEADERS
from holdfast_web.shared.routing import Htmx, Text

Points = Annotated[int, AfterValidator(lambda asked: min(max(asked, views.POINTS_SHOWN), views.POINTS_MOST))]
Edits = Annotated[int, AfterValidator(lambda asked: min(max(asked, views.EDITS_SHOWN), views.EDITS_MOST))]

router = Router()


def _back(job: str, anchor: str) -> Response:
    return RedirectResponse(f"/jobs/{job}#{anchor}", 303)


# ---- job ------------------------------------------------------------------------------------


@router.endpoint("GET", "/jobs/{job}", access=VIEW)
def job_page(
    job: str,
    db: Db,
    now: Now,
    points: Points = views.POINTS_SHOWN,
    edits: Edits = views.EDITS_SHOWN,
) -> Response:
    with view_job(db, job, now=now) as view:
        live = views.job_live(view, points_limit=points, edits_limit=edits)
        shown = views.controls(view, live.job, live.changes, live.live_values)
    return views.job_page(live, shown).response()


@router.endpoint("GET", "/jobs/{job}/live", access=VIEW)
async def live_parts(
    job: str,
    db: Db,
    clock: Clock,
    shared: SharedAnswers,
    request: Request,
    asker: Asker,
    points: Points = views.POINTS_SHOWN,
    edits: Edits = views.EDITS_SHOWN,
) -> Response:
    limits = {"points_limit": points, "edits_limit": edits}
    encoding = encoding_for(request.headers.get("Accept-Encoding", ""))

    def read() -> views.JobLive:
        with view_job(db, job, now=clock()) as view:
            return views.job_live(view, **limits)

    async def ask() -> EncodedBody:
        live = await shared.answer(job, ("data", *limits.values()), partial(db.ask, "pages", read))
        return await db.ask("pages", lambda: EncodedBody.of_page(live.html(), encoding))

    # the page depends on what the asker may see and do
    packed = await shared.answer(job, ("live", *limits.values(), asker.permissions, encoding), ask)
    return packed.response(HEADERS)


@router.endpoint("GET", "/jobs/{job}/history", access=VIEW)
def job_history(job: str, db: Db, now: Now, edits: Edits = views.EDITS_SHOWN) -> Response:
    with view_job(db, job, now=now) as view:
        part = views.history_part(view, summaries.job_summary(view), limit=edits)
    return part.response()


@router.endpoint("GET", "/jobs/{job}/points", access=VIEW)
def job_points(job: str, db: Db, now: Now, points: Points = views.POINTS_SHOWN) -> Response:
    with view_job(db, job, now=now) as view:
        part = views.points_part(view, summaries.job_summary(view), limit=points)
    return part.response()


# ---- plan -----------------------------------------------------------------------------------


async def _plan_inputs(
    budget: str = "", every: str = "", mtbf: str = "", ranks: str = "", restart: str = ""
) -> dict[str, str]:
    return {"budget": budget, "every": every, "mtbf": mtbf, "ranks": ranks, "restart": restart}


PlanInputs = Annotated[dict[str, str], Depends(_plan_inputs)]


@router.endpoint("GET", "/jobs/{job}/plan", access=VIEW)
def job_plan(job: str, db: Db, now: Now, typed: PlanInputs, htmx: Htmx = False) -> Response:
    with view_job(db, job, now=now) as view:
        part = views.plan_part(view, typed)
    return part.part_or_page(htmx, 422 if part.answer.error else 200)


@router.endpoint("GET", "/jobs/{job}/plan/answer", access=VIEW)
def job_plan_answer(job: str, db: Db, now: Now, typed: PlanInputs) -> Response:
    with view_job(db, job, now=now) as view:
        answer = views.plan_part(view, typed).answer
    return answer.response(422 if answer.error else 200)


# ---- restore --------------------------------------------------------------------------------


@router.endpoint(
    "GET",
    "/jobs/{job}/restore",
    access=RESTORE,  # so that the dialog, not its last step, asks for the password
)
def restore_dialog(
    job: str,
    db: Db,
    now: Now,
    checkpoint: str = "",
    iteration: str = "",
    before: Annotated[int | None, Query(ge=0, le=MAX_ITERATION)] = None,
    degraded: bool = False,
    htmx: Htmx = False,
) -> Response:
    with view_job(db, job, now=now) as view:
        dialog = views.restore_dialog(
            view, checkpoint=checkpoint, asked=iteration, before=before, degraded=degraded
        )
    return dialog.part_or_page(htmx, 422 if dialog.refusal else 200)


@router.endpoint("POST", "/jobs/{job}/restores", access=RESTORE)
def order_restore(
    job: str,
    db: Db,
    asker: Asker,
    now: Now,
    checkpoint: Text,
    key: Text,
    degraded: Text = "",
    data: Text = "repeat",
    skip_to: Text = "",
    batches: Text = "",
    loader: Text = "",
    htmx: Htmx = False,
) -> Response:
    wants_degraded = degraded == "true"
    try:
        skip = forms.data_skip(data, skip_to, batches, loader)
        wish = RestoreWish(checkpoint=checkpoint, key=key, degraded=wants_degraded, skip=skip)
        approvals.restore(db, job, wish, asker=asker, now=now)
    except (UnknownJob, UnknownOrder):
        raise
    except WaitsForApproval:
        return shown(db, job, now, htmx)
    except RequestRefused as refusal:
        with view_job(db, job, now=now) as view:
            dialog = views.restore_dialog(
                view, checkpoint=checkpoint, refusal=str(refusal), degraded=wants_degraded,
                data=data, skip_to=skip_to, batches=batches, loader=loader,
            )  # fmt: skip
        return dialog.part_or_page(htmx, 409 if isinstance(refusal, OpenOrder) else 422)
    if not htmx:
        return _back(job, "restore-status")
    return _moved(db, job, now, "holdfast:restore-requested")


@router.endpoint("POST", "/jobs/{job}/restores/{order}/cancel", access=OPERATE)
def cancel_restore(job: str, order: str, db: Db, who: Who, now: Now, htmx: Htmx = False) -> Response:
    try:
        control.cancel_restore(db, job, order, who=who, now=now)
    except NotCancellable:
        # the page was outdated; answer with the current state
        if not htmx:
            raise
    return _moved(db, job, now, "holdfast:refresh-now") if htmx else _back(job, "restore-status")


@router.endpoint("GET", "/jobs/{job}/delete", access=ADMINISTER)
def delete_dialog(job: str, db: Db, now: Now, htmx: Htmx = False) -> Response:
    return _delete_dialog(db, job, now, htmx)


def _delete_dialog(db: Db, job: str, now: float, htmx: bool, *, refusal: str = "") -> Response:
    with view_job(db, job, now=now) as view:
        dialog = views.DeleteDialog(job=summaries.job_summary(view), refusal=refusal, now=now)
    return dialog.part_or_page(htmx, 409 if refusal else 200)


@router.endpoint("POST", "/jobs/{job}/delete", access=ADMINISTER)
def delete_job(job: str, db: Db, who: Who, now: Now, htmx: Htmx = False) -> Response:
    try:
        deletion.delete_job(db, job, who=who, now=now)
    except NotPossible as refusal:
        return _delete_dialog(db, job, now, htmx, refusal=str(refusal))
    if htmx:
        return Response(headers={"HX-Redirect": "/"})
    return RedirectResponse("/", 303)


def _moved(db: Db, job: str, now: float, event: str) -> Response:
    with view_job(db, job, now=now) as view:
        live = views.job_live(view)
    return live.response(headers={"HX-Trigger": event})
