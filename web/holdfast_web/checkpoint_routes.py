"""The page of one checkpoint: how it was made, what came of it, and what operators say of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fastapi import APIRouter, Query
from fastapi.responses import RedirectResponse, Response

from holdfast_server import control, timeline
from holdfast_server.db import Database
from holdfast_server.dependencies import Clock, Db, Who
from holdfast_server.desired import PIN, UNPIN
from holdfast_server.errors import InvalidSetting, NotPossible
from holdfast_server.pins import MOST_LABEL
from holdfast_server.stories import story
from holdfast_server.summaries import job_summary
from holdfast_server.views import CheckpointChanges, CheckpointStory, Edit, JobSummary
from holdfast_web.controls import Ack, Typed
from holdfast_web.pages import EDITS_MOST
from holdfast_web.render import View
from holdfast_web.routing import PageRoute, Text, status_of

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@dataclass(frozen=True, kw_only=True)
class CheckpointPage(View):
    template: ClassVar[str] = "checkpoint.html"
    job: JobSummary
    story: CheckpointStory
    other: CheckpointStory | None
    """What it is compared with."""
    pin: Ack | None
    """How far the last word on its pin has come."""
    label: Typed
    refusal: str
    """Why it was not pinned."""
    most_label: int = MOST_LABEL
    now: float


async def _page(
    db: Database, job: str, checkpoint: str, now: float, *, other: str = "", typed: Typed | None = None,
    refusal: str = "",
) -> CheckpointPage:  # fmt: skip
    summary, told = await job_summary(db, job, now=now), await story(db, job, checkpoint)
    return CheckpointPage(
        job=summary,
        story=told,
        other=await story(db, job, other) if other else None,
        pin=_pin_of(checkpoint, await timeline.edits(db, job, limit=EDITS_MOST), summary),
        label=typed or Typed(value=told.checkpoint.label or ""),
        refusal=refusal,
        now=now,
    )


def _pin_of(checkpoint: str, edits: list[Edit], job: JobSummary) -> Ack | None:
    def is_about_it(edit: Edit) -> bool:
        return any(change.field in (PIN, UNPIN) and change.after == checkpoint for change in edit.changes)

    newest = max(filter(is_about_it, edits), key=lambda edit: edit.version, default=None)
    if newest is None:
        return None
    return Ack(edit=newest, alive=job.alive, delivered=newest.version <= job.delivered_version, undoable=False)


@router.get("/jobs/{job}/checkpoints/{checkpoint}")
async def checkpoint_page(
    job: str, checkpoint: str, db: Db, clock: Clock, other: Annotated[str, Query(alias="with")] = ""
) -> Response:
    return (await _page(db, job, checkpoint, clock(), other=other)).response()


@router.post("/jobs/{job}/checkpoints/{checkpoint}/pin")
async def pin(job: str, checkpoint: str, db: Db, who: Who, clock: Clock, pinned: Text) -> Response:
    now, changes = clock(), CheckpointChanges(pinned=pinned == "true")
    try:
        await control.change_checkpoint(db, job, checkpoint, changes, who=who, now=now)
    except NotPossible as refusal:
        page = await _page(db, job, checkpoint, now, refusal=str(refusal))
        return page.response(status_of(refusal))
    return _back(job, checkpoint)


@router.post("/jobs/{job}/checkpoints/{checkpoint}/label")
async def label(job: str, checkpoint: str, db: Db, who: Who, clock: Clock, label: Text = "") -> Response:
    now = clock()
    try:
        await control.change_checkpoint(db, job, checkpoint, CheckpointChanges(label=label), who=who, now=now)
    except InvalidSetting as refusal:
        page = await _page(db, job, checkpoint, now, typed=Typed(value=label, error=str(refusal)))
        return page.response(status_of(refusal))
    return _back(job, checkpoint)


def _back(job: str, checkpoint: str) -> Response:
    return RedirectResponse(f"/jobs/{job}/checkpoints/{checkpoint}#keep", 303)
