"""Views of the page of one checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from holdfast.protocol.analyses import CheckpointDetail
from holdfast.protocol.ids import validate_job
from holdfast.protocol.jobs import CheckpointInfo, Edit, ForkFamily, JobSummary, Tensors, Verification
from holdfast.protocol.wire import MAX_CHANGED_TENSORS
from holdfast.units import exact_percent
from holdfast_server.control import verification as verifications
from holdfast_server.control.control import MOST_LABEL
from holdfast_server.queries import summaries, timeline
from holdfast_server.queries.job_view import JobView
from holdfast_server.queries.summaries import job_summary
from holdfast_server.queries.timeline import story
from holdfast_server.records.desired_state import SETTINGS
from holdfast_server.records.verifications import IN_REACH
from holdfast_web.job.views import EDITS_MOST, ChangeStatus, FieldInput
from holdfast_web.shared.filters import age
from holdfast_web.shared.render import View

STATES = {
    "snapshot": "still being copied", "persisting": "still being written", "failed": "failed",
    "torn": "torn", "damaged": "damaged",
}  # fmt: skip
TENSORS_SHOWN, OTHERS = 40, 200
MAX_NAME = 100
"""Maximum length of a job name in characters."""


@dataclass(frozen=True, kw_only=True)
class VerificationPart(View):
    """The state and verdict of the verification."""

    template: ClassVar[str] = "checkpoint/_verification.html"
    job: JobSummary
    verification: Verification
    delivered: bool
    """Whether the job received the request."""
    readable: bool
    verify_refusal: str = ""
    now: float


@dataclass(frozen=True, kw_only=True)
class TensorsPart(View):
    """The tensor summary, compared with another checkpoint if one is chosen."""

    template: ClassVar[str] = "checkpoint/_tensors.html"
    job: JobSummary
    table: Tensors
    measurable: bool
    """Whether the difference can be requested: both are in the store and no request is open."""
    shown: int
    measured: str


@dataclass(frozen=True, kw_only=True)
class CheckpointPage(View):
    template: ClassVar[str] = "checkpoint/checkpoint.html"
    job: JobSummary
    story: CheckpointDetail
    other: CheckpointDetail | None
    """The checkpoint to compare with."""
    others: list[CheckpointInfo]
    """The checkpoints that can be chosen for it, newest first."""
    pin: ChangeStatus | None
    """The progress of the newest pin change."""
    label: FieldInput
    settings_then: str
    """The settings in force when it was taken, in words; may be empty."""
    refusal: str
    """The reason why the pin change was refused."""
    family: ForkFamily
    fork: FieldInput
    """The name of the new job in the fork command."""
    verify: VerificationPart
    tensors: TensorsPart
    states: dict[str, str] = field(default_factory=lambda: STATES)
    most_label: int = MOST_LABEL
    most_changed: int = MAX_CHANGED_TENSORS
    now: float


def checkpoint_page(
    view: JobView, checkpoint: str, *, other: str = "", typed: FieldInput | None = None,
    refusal: str = "", verify_refusal: str = "", all_tensors: bool = False, fork: str = "",
) -> CheckpointPage:  # fmt: skip
    now = view.now
    summary, this = job_summary(view), story(view, checkpoint)
    that = story(view, other) if other else None
    edits = timeline.edits(view, limit=EDITS_MOST)
    table = verifications.tensors(view, this.checkpoint.id, that.checkpoint.id if that else None)
    points = [this.checkpoint, *([that.checkpoint] if that else [])]
    asked = this.verification.open and that is not None and this.verification.against == that.checkpoint.id
    return CheckpointPage(
        job=summary,
        story=this,
        other=that,
        others=_others(view, points),
        verify=verification_part(summary, this, now, refusal=verify_refusal),
        tensors=TensorsPart(
            job=summary,
            table=table,
            measurable=len({each.id for each in points if each.state in IN_REACH}) == 2 and not asked,
            shown=len(table.rows) if all_tensors else TENSORS_SHOWN,
            measured=age(None if table.measured_at is None else now - table.measured_at),
        ),
        pin=_pin_of(checkpoint, edits, summary),
        settings_then=_settings_at(this.edit, edits, summary),
        family=summaries.family(view),
        fork=_named(fork.strip()),
        label=typed or FieldInput(value=this.checkpoint.label or ""),
        refusal=refusal,
        now=now,
    )


def _others(view: JobView, points: list[CheckpointInfo]) -> list[CheckpointInfo]:
    """Return what this checkpoint, the first of `points`, can be compared with; the compared one is among them."""
    this, *that = points
    found = timeline.restore_points(view, limit=OTHERS, in_store=True)
    newest = [row for row in found if row.id != this.id and row.state in IN_REACH]
    return newest + [row for row in that if row.id not in {one.id for one in newest}]


def verification_part(
    job: JobSummary, this: CheckpointDetail, now: float, *, refusal: str = ""
) -> VerificationPart:
    found = this.verification
    return VerificationPart(
        job=job,
        verification=found,
        delivered=found.request <= job.delivered_version,
        readable=this.checkpoint.state in IN_REACH,
        verify_refusal=refusal,
        now=now,
    )


def _named(fork: str) -> FieldInput:
    try:
        return FieldInput(value=validate_job(fork) if fork else "")
    except ValueError as error:
        return FieldInput(
            value=fork[:MAX_NAME], error=str(error) if len(fork) <= MAX_NAME else "the name is too long"
        )


def _settings_at(newest: Edit | None, edits: list[Edit], job: JobSummary) -> str:
    """Return the settings after an edit in words, as in `budget 3.5 %, interval automatic`.

    A setting that no operator has changed is the present one of the script.
    """
    then: dict[str, str] = {}
    for edit in sorted(edits, key=lambda edit: edit.version):
        for change in edit.changes:
            before_it = newest is None or edit.version > newest.version
            if change.field not in SETTINGS or (before_it and change.field in then):
                continue
            then[change.field] = change.before if before_it else change.after
    if job.budget is not None:
        then.setdefault("budget", exact_percent(job.budget))
        then.setdefault("interval", f"every {job.interval}" if job.policy == "fixed" else "automatic")
    return ", ".join(f"{field} {then[field]}" for field in SETTINGS if then.get(field))


def _pin_of(checkpoint: str, edits: list[Edit], job: JobSummary) -> ChangeStatus | None:
    def is_about_it(edit: Edit) -> bool:
        return any(change.field in ("pin", "unpin") and change.after == checkpoint for change in edit.changes)

    newest = max(filter(is_about_it, edits), key=lambda edit: edit.version, default=None)
    if newest is None:
        return None
    return ChangeStatus(
        edit=newest, alive=job.alive, delivered=newest.version <= job.delivered_version, undoable=False
    )
