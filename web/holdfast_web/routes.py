"""The pages under / and /jobs: parse, call, render. Every form works without scripts, by POST and redirect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Depends, Form, Request
from fastapi.responses import RedirectResponse, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent

from holdfast.protocol.messages import DEFAULT_PORT
from holdfast_server.api.responses import Packed, encoding_for
from holdfast_server.control import control, deletion
from holdfast_server.core.errors import NotCancellable, NotPossible, OpenOrder, Refused, UnknownJob, UnknownOrder
from holdfast_server.http.dependencies import Asker, Changes, Clock, Db, SharedAnswers, StreamPlace, Who
from holdfast_server.queries import summaries
from holdfast_server.queries.fleet import Question
from holdfast_web import fleet, forms, pages
from holdfast_web.render import HEADERS
from holdfast_web.routing import Htmx, PageRoute, Text, local

TICK_SECONDS = 5.0
PAUSE_SECONDS = 0.5
"""Shortest time from tick to tick of the whole fleet."""


router = APIRouter(route_class=PageRoute, include_in_schema=False)


def _back(job: str, anchor: str) -> Response:
    return RedirectResponse(f"/jobs/{job}#{anchor}", 303)


def _points_limit(asked: int) -> int:
    return min(max(asked, pages.POINTS_SHOWN), pages.POINTS_MOST)


def _edits_limit(asked: int) -> int:
    return min(max(asked, pages.EDITS_SHOWN), pages.EDITS_MOST)


def _question(
    asker: Asker,
    search: str = "",
    status: str = "",
    project: str = "",
    group: str = "",
    sort: str = "",
    page: str = "",
    size: str = "",
) -> Question:
    asked = fleet.question_of(
        search=search, status=status, project=project, group=group, sort=sort, page=page, size=size
    )
    return replace(asked, visible_projects=asker.visible_projects)


Asked = Annotated[Question, Depends(_question)]


# ---- fleet ----------------------------------------------------------------------------------


def _server(request: Request) -> str:
    return f"{request.url.scheme}://{request.url.netloc or f'127.0.0.1:{DEFAULT_PORT}'}"


@router.get("/")
async def fleet_page(db: Db, clock: Clock, request: Request, question: Asked) -> Response:
    return (await fleet.fleet_rows(db, question, server=_server(request), now=clock())).page()


@router.get("/fleet/live")
async def fleet_live(db: Db, clock: Clock, request: Request, question: Asked) -> Response:
    return (await fleet.fleet_rows(db, question, server=_server(request), now=clock())).response()


@router.post("/fleet/budget")
async def set_budgets(
    db: Db, clock: Clock, asker: Asker, budget: Text, job: Annotated[list[str] | None, Form()] = None,
    back: Text = "/",
) -> Response:  # fmt: skip
    """One budget for the selected jobs. The page that answers names what became of each."""
    wanted = forms.budget_from_percent(budget)
    outcomes = await control.set_budgets(db, job or [], wanted, asker=asker, now=clock())
    return fleet.BulkPage(outcomes=outcomes, typed=f"{wanted * 100:.6g}", back=local(back)).response()


@router.get("/fleet/stream", response_class=EventSourceResponse, dependencies=[StreamPlace])
async def fleet_stream(changes: Changes, clock: Clock) -> AsyncIterator[ServerSentEvent]:
    with changes.subscribe(None) as subscription:
        while not changes.closed:
            yield ServerSentEvent(data={"at": clock()}, event="tick")
            await asyncio.sleep(PAUSE_SECONDS)
            await subscription.wait(TICK_SECONDS)


# ---- job ------------------------------------------------------------------------------------


@router.get("/jobs/{job}")
async def job_page(
    job: str, db: Db, clock: Clock, points: int = pages.POINTS_SHOWN, edits: int = pages.EDITS_SHOWN
) -> Response:
    now = clock()
    async with db.one_view():
        facts = await pages.job_facts(
            db, job, now=now, points_limit=_points_limit(points), edits_limit=_edits_limit(edits)
        )
        shown = await pages.controls(db, facts.job, facts.acks, now=now)
    return pages.job_page(facts, shown).response()


@router.get("/jobs/{job}/live")
async def job_live(
    job: str,
    db: Db,
    clock: Clock,
    shared: SharedAnswers,
    request: Request,
    asker: Asker,
    points: int = pages.POINTS_SHOWN,
    edits: int = pages.EDITS_SHOWN,
) -> Response:
    limits = {"points_limit": _points_limit(points), "edits_limit": _edits_limit(edits)}
    encoding = encoding_for(request.headers.get("Accept-Encoding", ""))

    async def ask() -> Packed:
        facts = await shared.answer(
            job, ("facts", *limits.values()), lambda: pages.job_facts(db, job, now=clock(), **limits)
        )
        return await Packed.of_page(facts.html(), encoding)

    # what it shows and offers goes by what whoever asks may see and do
    packed = await shared.answer(job, ("live", *limits.values(), asker.rights, encoding), ask)
    return packed.response(HEADERS)


@router.get("/jobs/{job}/history")
async def job_history(job: str, db: Db, clock: Clock, edits: int = pages.EDITS_SHOWN) -> Response:
    facts = await pages.job_facts(db, job, now=clock(), edits_limit=_edits_limit(edits))
    return facts.response(template="_history.html")


@router.get("/jobs/{job}/points")
async def job_points(job: str, db: Db, clock: Clock, points: int = pages.POINTS_SHOWN) -> Response:
    facts = await pages.job_facts(db, job, now=clock(), points_limit=_points_limit(points))
    return facts.response(template="_points.html")


# ---- plan -----------------------------------------------------------------------------------


@router.get("/jobs/{job}/plan")
async def job_plan(
    job: str,
    db: Db,
    budget: str = "",
    every: str = "",
    mtbf: str = "",
    ranks: str = "",
    restart: str = "",
    htmx: Htmx = False,
) -> Response:
    typed = {"budget": budget, "every": every, "mtbf": mtbf, "ranks": ranks, "restart": restart}
    part = await pages.plan_part(db, job, typed)
    status = 422 if part.answer.error else 200
    return part.response(status) if htmx else part.page(status)


@router.get("/jobs/{job}/plan/answer")
async def job_plan_answer(
    job: str, db: Db, budget: str = "", every: str = "", mtbf: str = "", ranks: str = "", restart: str = ""
) -> Response:
    typed = {"budget": budget, "every": every, "mtbf": mtbf, "ranks": ranks, "restart": restart}
    answer = (await pages.plan_part(db, job, typed)).answer
    return answer.response(422 if answer.error else 200)


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


@router.get("/jobs/{job}/delete")
async def delete_dialog(job: str, db: Db, clock: Clock, htmx: Htmx = False) -> Response:
    return await _delete_dialog(db, job, clock(), htmx)


async def _delete_dialog(db: Db, job: str, now: float, htmx: bool, *, refusal: str = "") -> Response:
    dialog = pages.DeleteDialog(job=await summaries.job_summary(db, job, now=now), refusal=refusal, now=now)
    status = 409 if refusal else 200
    return dialog.response(status) if htmx else dialog.page(status)


@router.post("/jobs/{job}/delete")
async def delete_job(job: str, db: Db, who: Who, clock: Clock, htmx: Htmx = False) -> Response:
    now = clock()
    try:
        await deletion.delete_job(db, job, who=who, now=now)
    except NotPossible as refusal:
        return await _delete_dialog(db, job, now, htmx, refusal=str(refusal))
    if htmx:
        return Response(headers={"HX-Redirect": "/"})
    return RedirectResponse("/", 303)


async def _moved(db: Db, job: str, now: float, event: str) -> Response:
    facts = await pages.job_facts(db, job, now=now)
    return facts.response(headers={"HX-Trigger": event})


def _dialog_response(dialog: pages.RestoreDialog, status: int, htmx: bool) -> Response:
    return dialog.response(status) if htmx else dialog.page(status)
