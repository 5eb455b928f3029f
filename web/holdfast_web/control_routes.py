"""What operators change on a job's page. Every form works without scripts, by POST and redirect."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from fastapi import APIRouter
from fastapi.responses import RedirectResponse, Response

from holdfast.answers import DesiredChanges, JobSummary
from holdfast_server import control, timeline
from holdfast_server.dependencies import Clock, Db, Who
from holdfast_server.errors import Conflict, Refused, UnknownJob, UnknownOrder
from holdfast_web import controls, forms, pages
from holdfast_web.routing import Htmx, PageRoute, Text, status_of

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/jobs/{job}/controls")
async def job_controls(job: str, db: Db, clock: Clock) -> Response:
    return (await controls.controls_of(db, job, now=clock())).response()


@router.get("/jobs/{job}/preview")
async def job_preview(job: str, db: Db, clock: Clock, budget: str = "", every: str = "") -> Response:
    now = clock()
    summary = await timeline.job_summary(db, job, now=now)
    preview = await _preview(db, summary, now, budget=budget, every=every)
    return preview.response(422 if preview.error else 200)


async def _preview(db: Db, job: JobSummary, now: float, *, budget: str = "", every: str = "") -> controls.Preview:
    try:
        answer = await control.preview_settings(
            db,
            job.job,
            budget=forms.budget_from_percent(budget) if budget else None,
            every=forms.interval(every) if every else None,
            now=now,
        )
    except Refused as refusal:
        return controls.Preview(job=job, plan=None, in_force=None, why_none="", error=str(refusal))
    return controls.preview_of(job, answer)


async def _changed(
    job: str, db: Db, who: str, now: float, htmx: bool, form: str, typed: str, version: str,
    changes: Callable[[], DesiredChanges], *, hold: str = "",
) -> Response:  # fmt: skip
    async def apply(now: float) -> None:
        await control.edit(db, job, changes(), version=forms.version(version), who=who, now=now)

    return await _done(job, db, now, htmx, form, typed, apply, hold=hold)


async def _done(
    job: str, db: Db, now: float, htmx: bool, form: str, typed: str, change: Callable[[float], Awaitable[None]],
    *, hold: str = "",
) -> Response:  # fmt: skip
    """Make a change; answer with the controls as they are now, or with the reason beside the field."""
    try:
        await change(now)
    except (UnknownJob, UnknownOrder):
        raise
    except Refused as refusal:
        shown = await controls.controls_of(db, job, now=now)
        if isinstance(refusal, Conflict) and form == "budget":
            shown = replace(shown, preview=await _preview(db, shown.job, now, budget=typed))
        shown = controls.refused_controls(shown, form, typed, refusal, hold=hold)
        if htmx:
            return shown.response(status_of(refusal))
        facts = await pages.job_facts(db, job, now=now)
        return pages.job_page(facts, shown).response(status_of(refusal))
    if htmx:
        return (await controls.controls_of(db, job, now=now)).response()
    return RedirectResponse(f"/jobs/{job}#controls", 303)


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
    hold: Text = "",
    htmx: Htmx = False,
) -> Response:
    def changes() -> DesiredChanges:
        if mode == "automatic":
            return DesiredChanges(every=None)
        return DesiredChanges(every=forms.interval(every), every_seconds=forms.hold(hold))

    return await _changed(job, db, who, clock(), htmx, "interval", every, version, changes, hold=hold)


@router.post("/jobs/{job}/policy")
async def set_policy(
    job: str, db: Db, who: Who, clock: Clock, version: Text, policy: Text = "", htmx: Htmx = False
) -> Response:
    def changes() -> DesiredChanges:
        return DesiredChanges(policy=policy or None)

    return await _changed(job, db, who, clock(), htmx, "policy", policy, version, changes)


@router.post("/jobs/{job}/retention")
async def set_retention(
    job: str, db: Db, who: Who, clock: Clock, version: Text, retention: Text = "", htmx: Htmx = False
) -> Response:
    def changes() -> DesiredChanges:
        return DesiredChanges(retention=retention.strip() or None)

    return await _changed(job, db, who, clock(), htmx, "retention", retention, version, changes)


@router.post("/jobs/{job}/undo")
async def undo(
    job: str, db: Db, who: Who, clock: Clock, version: Text, edit: Text, htmx: Htmx = False
) -> Response:
    async def take_back(now: float) -> None:
        await control.undo(db, job, forms.version(edit), version=forms.version(version), who=who, now=now)

    return await _done(job, db, clock(), htmx, "undo", "", take_back)


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


@router.post("/jobs/{job}/probe")
async def request_probe(job: str, db: Db, who: Who, clock: Clock, version: Text, htmx: Htmx = False) -> Response:
    def changes() -> DesiredChanges:
        return DesiredChanges(probe_request=True)

    return await _changed(job, db, who, clock(), htmx, "probe", "", version, changes)
