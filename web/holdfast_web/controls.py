"""The forms of a job's page: what is in them, how far each change has come, and why one was refused."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from holdfast.answers import Edit, JobSummary, SettingsPreview
from holdfast.pacing.profile import Plan
from holdfast_server import control, timeline
from holdfast_server.db import Database
from holdfast_server.errors import Conflict, Refused
from holdfast_web.render import View

SETTINGS = ("budget", "policy", "interval", "checkpoints", "retention")
"""Fields of changes that can be taken back; others asked for something that was then done."""
POLICIES = {
    "checkfreq": "as often as the budget allows",
    "goodput": "what loses least time overall",
    "young-daly": "by the rate of failures",
}
HOLDS = (
    ("", "until I say so"),
    ("30 min", "for 30 min"),
    ("2 h", "for 2 h"),
    ("8 h", "for 8 h"),
    ("24 h", "for a day"),
)


@dataclass(frozen=True, kw_only=True)
class Ack:
    """What became of the newest change of one setting."""

    edit: Edit
    alive: bool
    delivered: bool
    undoable: bool
    """By taking back what it changed, as long as nothing newer did."""

    @property
    def applied(self) -> bool:
        return self.edit.applied_iteration is not None


@dataclass(frozen=True, kw_only=True)
class Typed:
    """What is in a field, and why it was refused."""

    value: str
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Preview(View):
    """What the plan expects, beside what is measured now and expected of the interval in force."""

    template: ClassVar[str] = "_preview.html"
    job: JobSummary
    plan: Plan | None
    in_force: Plan | None
    why_none: str
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Controls(View):
    template: ClassVar[str] = "_controls.html"
    job: JobSummary
    budget: Typed
    every: Typed
    retention: Typed
    conflict: Conflict | None
    retried: str
    """Which form met the conflict."""
    policy: str | None
    """What is chosen; None: the script's own."""
    hold: str = ""
    """For how long an interval is to be held, one of `holds`."""
    preview: Preview
    acks: dict[str, Ack]
    policies: dict[str, str] = field(default_factory=lambda: POLICIES)
    holds: tuple[tuple[str, str], ...] = HOLDS
    now: float


def acks_of(edits: list[Edit], job: JobSummary) -> dict[str, Ack]:
    """By setting, its newest change."""
    newest: dict[str, Ack] = {}
    for edit in sorted(edits, key=lambda row: row.version, reverse=True):
        undoable = all(change.field in SETTINGS and change.before != change.after for change in edit.changes)
        ack = Ack(edit=edit, alive=job.alive, delivered=edit.version <= job.delivered_version, undoable=undoable)
        for change in edit.changes:
            newest.setdefault(change.field, ack)
    return newest


def preview_of(job: JobSummary, answer: SettingsPreview) -> Preview:
    return Preview(job=job, plan=answer.plan, in_force=answer.in_force, why_none=answer.why_none)


async def controls(db: Database, job: JobSummary, acks: dict[str, Ack], *, now: float) -> Controls:
    budget = job.desired.budget if job.desired.budget is not None else job.budget
    every = job.desired.every if job.desired.every is not None else job.interval
    return Controls(
        job=job,
        budget=Typed(value="" if budget is None else f"{budget * 100:.6g}"),
        every=Typed(value="" if every is None else str(every)),
        retention=Typed(value=job.desired.retention or ""),
        conflict=None,
        retried="",
        policy=job.desired.policy,
        preview=preview_of(job, await control.preview_settings(db, job.job, budget=None, every=None, now=now)),
        acks=acks,
        now=now,
    )


async def controls_of(db: Database, name: str, *, now: float) -> Controls:
    job = await timeline.job_summary(db, name, now=now)
    return await controls(db, job, acks_of(await timeline.edits(db, name), job), now=now)


def refused_controls(shown: Controls, form: str, typed: str, refusal: Refused, *, hold: str = "") -> Controls:
    """The controls again, with what was typed or chosen and why it was refused; a conflict can be tried again."""
    conflict = refusal if isinstance(refusal, Conflict) else None
    answer = replace(shown, conflict=conflict, retried=form)
    error = "" if conflict else str(refusal)
    if form == "budget":
        return replace(answer, budget=Typed(value=typed, error=error))
    if form == "interval":
        return replace(answer, every=Typed(value=typed, error=error), hold=hold)
    if form == "retention":
        return replace(answer, retention=Typed(value=typed, error=error))
    if form == "policy":
        return replace(answer, policy=typed or None)
    return answer
