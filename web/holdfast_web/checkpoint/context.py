"""Views of the page of one checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from holdfast.answers import CheckpointStory, Edit, Family, JobSummary, Tensors, Verification
from holdfast.protocol import validate_job
from holdfast_server import control, summaries, timeline
from holdfast_server.control import MOST_LABEL
from holdfast_server.db import Database
from holdfast_server.summaries import job_summary
from holdfast_server.timeline import story
from holdfast_server.verifications import IN_REACH
from holdfast_web.job.context import EDITS_MOST, Ack, Typed
from holdfast_web.shared.filters import age
from holdfast_web.shared.render import View

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

    template: ClassVar[str] = "checkpoint/_verification.html"
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

    template: ClassVar[str] = "checkpoint/_tensors.html"
    job: JobSummary
    table: Tensors
    measurable: bool
    """Both are in the store, and nobody has asked yet."""
    shown: int
    measured: str


@dataclass(frozen=True, kw_only=True)
class CheckpointPage(View):
    template: ClassVar[str] = "checkpoint/checkpoint.html"
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


async def checkpoint_page(
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
        verify=verification_part(summary, told, now, refusal=verify_refusal),
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


def verification_part(
    job: JobSummary, told: CheckpointStory, now: float, *, refusal: str = ""
) -> VerificationPart:
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
