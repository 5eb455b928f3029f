"""The pages under / and /jobs: parse, call, render. Every form works without scripts, by POST and redirect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Form, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse, Response
from fastapi.routing import APIRoute
from fastapi.sse import EventSourceResponse, ServerSentEvent

from holdfast.protocol import DEFAULT_PORT
from holdfast_server import control, timeline
from holdfast_server.dependencies import Changes, Clock, Config, Db, Who
from holdfast_server.errors import Conflict, NotCancellable, OpenOrder, Refused, UnknownJob, UnknownOrder
from holdfast_server.security import check_token, session_cookie
from holdfast_server.views import DesiredChanges, JobSummary
from holdfast_web import forms, pages

TICK_SECONDS = 5.0
PAUSE_SECONDS = 0.5
"""Shortest time from tick to tick of the whole fleet."""

Htmx = Annotated[bool, Header(alias="HX-Request")]
Text = Annotated[str, Form()]


def _status(refusal: Refused) -> int:
    if isinstance(refusal, UnknownJob | UnknownOrder):
        return 404
    return 409 if isinstance(refusal, Conflict) else 422


class PageRoute(APIRoute):
    """Answers people, not programs: what the server refuses becomes a page that says why."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except Refused as refusal:
                status = _status(refusal)
                title = "Nothing here" if status == 404 else "Not possible"
                return pages.ErrorPage(status=status, title=title, detail=str(refusal)).response(status)
            except RequestValidationError as error:
                detail = "; ".join(f"{problem['loc'][-1]}: {problem['msg']}" for problem in error.errors())
                return pages.ErrorPage(status=422, title="Not understood", detail=detail).response(422)

        return answer


router = APIRouter(route_class=PageRoute, include_in_schema=False)


def _back(job: str, anchor: str) -> Response:
    return RedirectResponse(f"/jobs/{job}#{anchor}", 303)


def _points_limit(asked: int) -> int:
    return min(max(asked, pages.POINTS_SHOWN), pages.POINTS_MOST)


def _edits_limit(asked: int) -> int:
    return min(max(asked, pages.EDITS_SHOWN), pages.EDITS_MOST)


# ---- fleet ----------------------------------------------------------------------------------


@router.get("/")
async def fleet_page(db: Db, clock: Clock, request: Request, search: str = "") -> Response:
    now = clock()
    jobs = await timeline.fleet(db, now=now, search=search)
    server = f"{request.url.scheme}://{request.url.netloc or f'127.0.0.1:{DEFAULT_PORT}'}"
    return pages.FleetPage(jobs=pages.in_order(jobs), search=search, now=now, server=server).response()


@router.get("/fleet/live")
async def fleet_live(db: Db, clock: Clock, search: str = "") -> Response:
    now = clock()
    jobs = await timeline.fleet(db, now=now, search=search)
    return pages.FleetLive(jobs=pages.in_order(jobs), search=search, now=now).response()


@router.get("/fleet/stream", response_class=EventSourceResponse)
async def fleet_stream(changes: Changes, clock: Clock) -> AsyncIterator[ServerSentEvent]:
    with changes.subscribe(None) as subscription:
        while not changes.closed:
            yield ServerSentEvent(data={"at": clock()}, event="tick")
            await asyncio.sleep(PAUSE_SECONDS)
            await subscription.wait(TICK_SECONDS)


# ---- sign-in --------------------------------------------------------------------------------


@router.get("/login")
async def login_page(then: Annotated[str, Query(alias="next")] = "/") -> Response:
    return pages.LoginPage(refused="", then=_local(then)).response()


@router.post("/login")
async def login(
    request: Request, config: Config, token: Text = "", then: Annotated[str, Form(alias="next")] = "/"
) -> Response:
    if not check_token(config, token):
        refused = "This is not the server's token." if token.strip() else "Type the server's token."
        return pages.LoginPage(refused=refused, then=_local(then)).response(401)
    response = RedirectResponse(_local(then), 303)
    response.set_cookie(**session_cookie(config, secure=request.url.scheme == "https"))
    return response


def _local(path: str) -> str:
    """A path of ours, so that nobody is sent elsewhere by a link that somebody else made."""
    ours = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if ours else "/"


# ---- job ------------------------------------------------------------------------------------


@router.get("/jobs/{job}")
async def job_page(
    job: str, db: Db, clock: Clock, points: int = pages.POINTS_SHOWN, edits: int = pages.EDITS_SHOWN
) -> Response:
    now = clock()
    facts = await pages.job_facts(
        db, job, now=now, points_limit=_points_limit(points), edits_limit=_edits_limit(edits)
    )
    shown = await pages.controls(db, facts.job, facts.acks, now=now)
    return pages.job_page(facts, shown).response()


@router.get("/jobs/{job}/live")
async def job_live(
    job: str, db: Db, clock: Clock, points: int = pages.POINTS_SHOWN, edits: int = pages.EDITS_SHOWN
) -> Response:
    facts = await pages.job_facts(
        db, job, now=clock(), points_limit=_points_limit(points), edits_limit=_edits_limit(edits)
    )
    return facts.response()


@router.get("/jobs/{job}/history")
async def job_history(job: str, db: Db, clock: Clock, edits: int = pages.EDITS_SHOWN) -> Response:
    facts = await pages.job_facts(db, job, now=clock(), edits_limit=_edits_limit(edits))
    return pages.history_part(facts).response()


@router.get("/jobs/{job}/points")
async def job_points(job: str, db: Db, clock: Clock, points: int = pages.POINTS_SHOWN) -> Response:
    now, limit = clock(), _points_limit(points)
    summary = await timeline.job_summary(db, job, now=now)
    rows = await timeline.restore_points(db, job, limit=limit, in_store=True)
    return pages.PointsPart(job=summary, points=rows, points_limit=limit, now=now).response()


# ---- settings -------------------------------------------------------------------------------


@router.get("/jobs/{job}/controls")
async def job_controls(job: str, db: Db, clock: Clock) -> Response:
    return (await pages.controls_of(db, job, now=clock())).response()


@router.get("/jobs/{job}/preview")
async def job_preview(job: str, db: Db, clock: Clock, budget: str = "", every: str = "") -> Response:
    now = clock()
    summary = await timeline.job_summary(db, job, now=now)
    preview = await _preview(db, summary, now, budget=budget, every=every)
    return preview.response(422 if preview.error else 200)


async def _preview(db: Db, job: JobSummary, now: float, *, budget: str = "", every: str = "") -> pages.Preview:
    try:
        answer = await control.preview_settings(
            db,
            job.job,
            budget=forms.budget_from_percent(budget) if budget else None,
            every=forms.interval(every) if every else None,
            now=now,
        )
    except Refused as refusal:
        return pages.Preview(job=job, plan=None, in_force=None, why_none="", error=str(refusal))
    return pages.preview_of(job, answer)


async def _changed(
    job: str, db: Db, who: str, now: float, htmx: bool, form: str, typed: str, version: str,
    changes: Callable[[], DesiredChanges],
) -> Response:  # fmt: skip
    """Apply an edit; answer with the controls as they are now, or with the reason beside the field."""
    try:
        await control.edit(db, job, changes(), version=forms.version(version), who=who, now=now)
    except (UnknownJob, UnknownOrder):
        raise
    except Refused as refusal:
        shown = await pages.controls_of(db, job, now=now)
        if isinstance(refusal, Conflict) and form == "budget":
            shown = replace(shown, preview=await _preview(db, shown.job, now, budget=typed))
        shown = pages.refused_controls(shown, form, typed, refusal)
        if htmx:
            return shown.response(_status(refusal))
        facts = await pages.job_facts(db, job, now=now)
        return pages.job_page(facts, shown).response(_status(refusal))
    if htmx:
        return (await pages.controls_of(db, job, now=now)).response()
    return _back(job, "controls")


@router.post("/jobs/{job}/budget")
async def set_budget(
    job: str, db: Db, who: Who, clock: Clock, version: Text, budget: Text = "", htmx: Htmx = False
) -> Response:
    def changes() -> DesiredChanges:
        return DesiredChanges(budget=forms.budget_from_percent(budget))

    return await _changed(job, db, who, clock(), htmx, "budget", budget, version, changes)


@router.post("/jobs/{job}/interval")
async def set_interval(
    job: str,
    db: Db,
    who: Who,
    clock: Clock,
    version: Text,
    mode: Text = "fixed",
    every: Text = "",
    htmx: Htmx = False,
) -> Response:
    def changes() -> DesiredChanges:
        return DesiredChanges(every=None if mode == "automatic" else forms.interval(every))

    return await _changed(job, db, who, clock(), htmx, "interval", every, version, changes)


@router.post("/jobs/{job}/pause")
async def set_paused(
    job: str, db: Db, who: Who, clock: Clock, version: Text, paused: Text, htmx: Htmx = False
) -> Response:
    def changes() -> DesiredChanges:
        return DesiredChanges(paused=paused == "true")

    return await _changed(job, db, who, clock(), htmx, "pause", paused, version, changes)


@router.post("/jobs/{job}/checkpoint")
async def request_checkpoint(
    job: str, db: Db, who: Who, clock: Clock, version: Text, htmx: Htmx = False
) -> Response:
    def changes() -> DesiredChanges:
        return DesiredChanges(checkpoint_request=True)

    return await _changed(job, db, who, clock(), htmx, "checkpoint", "", version, changes)


# ---- restore --------------------------------------------------------------------------------


@router.get("/jobs/{job}/restore")
async def restore_dialog(
    job: str, db: Db, clock: Clock, checkpoint: str = "", iteration: str = "", htmx: Htmx = False
) -> Response:
    dialog = await pages.restore_dialog(db, job, now=clock(), checkpoint=checkpoint, asked=iteration)
    return _dialog_response(dialog, 422 if dialog.refusal else 200, htmx)


@router.post("/jobs/{job}/restores")
async def order_restore(
    job: str, db: Db, who: Who, clock: Clock, checkpoint: Text, key: Text, htmx: Htmx = False
) -> Response:
    now = clock()
    try:
        await control.order_restore(db, job, checkpoint=checkpoint, iteration=None, key=key, who=who, now=now)
    except (UnknownJob, UnknownOrder):
        raise
    except Refused as refusal:
        dialog = await pages.restore_dialog(db, job, now=now, checkpoint=checkpoint, refusal=str(refusal))
        return _dialog_response(dialog, 409 if isinstance(refusal, OpenOrder) else 422, htmx)
    if not htmx:
        return _back(job, "order")
    return await _moved(db, job, now, "holdfast:ordered")


@router.post("/jobs/{job}/restores/{order}/cancel")
async def cancel_restore(job: str, order: str, db: Db, who: Who, clock: Clock, htmx: Htmx = False) -> Response:
    now = clock()
    try:
        await control.cancel_restore(db, job, order, who=who, now=now)
    except NotCancellable:
        # the page that was clicked on is behind the order: it gets what is true now
        if not htmx:
            raise
    return await _moved(db, job, now, "holdfast:now") if htmx else _back(job, "order")


async def _moved(db: Db, job: str, now: float, event: str) -> Response:
    facts = await pages.job_facts(db, job, now=now)
    return facts.response(headers={"HX-Trigger": event})


def _dialog_response(dialog: pages.RestoreDialog, status: int, htmx: bool) -> Response:
    if htmx:
        return dialog.response(status)
    return pages.restore_page(dialog).response(status)
