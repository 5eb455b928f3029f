"""The page of one checkpoint: how it was made, what came of it, and what operators say of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar
from urllib.parse import quote

from fastapi import APIRouter, Query
from fastapi.responses import RedirectResponse, Response

from holdfast.protocol.jobs import CheckpointChanges, Edit, Family, JobSummary, Tensors, Verification
from holdfast.protocol.messages import validate_job
from holdfast.protocol.questions import CheckpointStory
from holdfast_server.control import control
from holdfast_server.control.control import MOST_LABEL
from holdfast_server.core.errors import InvalidSetting, NotPossible
from holdfast_server.db import Database
from holdfast_server.http.dependencies import Clock, Db, Who
from holdfast_server.queries import summaries, timeline
from holdfast_server.queries.summaries import job_summary
from holdfast_server.queries.timeline import story
from holdfast_server.records.verifications import IN_REACH
from holdfast_web.filters import age
from holdfast_web.pages import EDITS_MOST, Ack, Typed
from holdfast_web.render import View
from holdfast_web.routing import PageRoute, Text, status_of

router = APIRouter(route_class=PageRoute, include_in_schema=False)


STATES = {
    "snapshot": "still being copied", "persisting": "still being written", "failed": "one that failed",
    "torn": "torn", "damaged": "damaged", "missing": "no longer in the store",
}  # fmt: skip
TENSORS_SHOWN = 40
MOST_NAME = 100
"""Characters of a job's name."""


@dataclass(frozen=True, kw_only=True)
class VerificationPart(View):
    """Whether it was read back, and what was found."""

    template: ClassVar[str] = "_verification.html"
    job: JobSummary
    verification: Verification
    told: bool
    """The job has shown to hold the request."""
    readable: bool
    verify_refusal: str = ""
    now: float


@dataclass(frozen=True, kw_only=True)
class TensorsPart(View):
    """What its tensors come to, beside those of another."""

    template: ClassVar[str] = "_tensors.html"
    job: JobSummary
    table: Tensors
    measurable: bool
    """Both are in the store, and nobody has asked yet."""
    shown: int
    measured: str


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
    family: Family
    fork: Typed
    """What the fork is to be called whose command is shown."""
    verify: VerificationPart
    tensors: TensorsPart
    states: dict[str, str] = field(default_factory=lambda: STATES)
    most_label: int = MOST_LABEL
    now: float


async def _page(
    db: Database, job: str, checkpoint: str, now: float, *, other: str = "", typed: Typed | None = None,
    refusal: str = "", verify_refusal: str = "", all_tensors: bool = False, fork: str = "",
) -> CheckpointPage:  # fmt: skip
    summary, told = await job_summary(db, job, now=now), await story(db, job, checkpoint)
    that = await story(db, job, other) if other else None
    table = await control.tensors(db, job, told.checkpoint.id, that.checkpoint.id if that else None)
    points = [told.checkpoint, *([that.checkpoint] if that else [])]
    asked = told.verification.open and that is not None and told.verification.against == that.checkpoint.id
    return CheckpointPage(
        job=summary,
        story=told,
        other=that,
        verify=_verification_of(summary, told, now, refusal=verify_refusal),
        tensors=TensorsPart(
            job=summary,
            table=table,
            measurable=len({each.id for each in points if each.state in IN_REACH}) == 2 and not asked,
            shown=len(table.rows) if all_tensors else TENSORS_SHOWN,
            measured=age(None if table.measured_at is None else now - table.measured_at),
        ),
        pin=_pin_of(checkpoint, await timeline.edits(db, job, limit=EDITS_MOST), summary),
        family=await summaries.family(db, job),
        fork=_named(fork.strip()),
        label=typed or Typed(value=told.checkpoint.label or ""),
        refusal=refusal,
        now=now,
    )


def _verification_of(job: JobSummary, told: CheckpointStory, now: float, *, refusal: str = "") -> VerificationPart:
    found = told.verification
    return VerificationPart(
        job=job,
        verification=found,
        told=found.request <= job.delivered_version,
        readable=told.checkpoint.state in IN_REACH,
        verify_refusal=refusal,
        now=now,
    )


def _named(fork: str) -> Typed:
    try:
        return Typed(value=validate_job(fork) if fork else "")
    except ValueError as error:
        return Typed(value=fork[:MOST_NAME], error=str(error) if len(fork) <= MOST_NAME else "that is too long")


def _pin_of(checkpoint: str, edits: list[Edit], job: JobSummary) -> Ack | None:
    def is_about_it(edit: Edit) -> bool:
        return any(change.field in ("pin", "unpin") and change.after == checkpoint for change in edit.changes)

    newest = max(filter(is_about_it, edits), key=lambda edit: edit.version, default=None)
    if newest is None:
        return None
    return Ack(edit=newest, alive=job.alive, delivered=newest.version <= job.delivered_version, undoable=False)


@router.get("/jobs/{job}/checkpoints/{checkpoint}")
async def checkpoint_page(
    job: str, checkpoint: str, db: Db, clock: Clock, other: Annotated[str, Query(alias="with")] = "",
    tensors: str = "", fork: str = "",
) -> Response:  # fmt: skip
    page = await _page(db, job, checkpoint, clock(), other=other, all_tensors=tensors == "all", fork=fork)
    return page.response()


@router.get("/jobs/{job}/checkpoints/{checkpoint}/verification")
async def verification(job: str, checkpoint: str, db: Db, clock: Clock) -> Response:
    """While it is read. Its verdict changes more than this part of the page, which then is loaded anew."""
    now = clock()
    part = _verification_of(await job_summary(db, job, now=now), await story(db, job, checkpoint), now)
    return part.response(headers={} if part.verification.open else {"HX-Refresh": "true"})


@router.post("/jobs/{job}/checkpoints/{checkpoint}/verify")
async def verify(job: str, checkpoint: str, db: Db, who: Who, clock: Clock, against: Text = "") -> Response:
    now = clock()
    try:
        await control.verify(db, job, checkpoint, against=against or None, who=who, now=now)
    except NotPossible as refusal:
        page = await _page(db, job, checkpoint, now, other=against, verify_refusal=str(refusal))
        return page.response(status_of(refusal))
    return _back(job, checkpoint, "verify", against)


@router.post("/jobs/{job}/checkpoints/{checkpoint}/verify/cancel")
async def cancel_verification(job: str, checkpoint: str, db: Db, who: Who, clock: Clock) -> Response:
    await control.cancel_verification(db, job, checkpoint, who=who, now=clock())
    return _back(job, checkpoint, "verify")


@router.post("/jobs/{job}/checkpoints/{checkpoint}/pin")
async def pin(job: str, checkpoint: str, db: Db, who: Who, clock: Clock, pinned: Text) -> Response:
    now, changes = clock(), CheckpointChanges(pinned=pinned == "true")
    try:
        await control.change_checkpoint(db, job, checkpoint, changes, who=who, now=now)
    except NotPossible as refusal:
        page = await _page(db, job, checkpoint, now, refusal=str(refusal))
        return page.response(status_of(refusal))
    return _back(job, checkpoint, "keep")


@router.post("/jobs/{job}/checkpoints/{checkpoint}/label")
async def label(job: str, checkpoint: str, db: Db, who: Who, clock: Clock, label: Text = "") -> Response:
    now = clock()
    try:
        await control.change_checkpoint(db, job, checkpoint, CheckpointChanges(label=label), who=who, now=now)
    except InvalidSetting as refusal:
        page = await _page(db, job, checkpoint, now, typed=Typed(value=label, error=str(refusal)))
        return page.response(status_of(refusal))
    return _back(job, checkpoint, "keep")


def _back(job: str, checkpoint: str, part: str, other: str = "") -> Response:
    beside = f"?with={quote(other)}" if other else ""
    return RedirectResponse(f"/jobs/{job}/checkpoints/{checkpoint}{beside}#{part}", 303)
