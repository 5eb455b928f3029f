"""What each page and fragment shows: gathered from the server's questions, typed for its template."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace
from typing import ClassVar

from holdfast.pacing.profile import Plan
from holdfast_server import control, timeline
from holdfast_server.db import Database
from holdfast_server.errors import Conflict, InvalidSetting, NoSuchCheckpoint, NotRestorable, Refused
from holdfast_server.summaries import STALL_WINDOW_ITERATIONS
from holdfast_server.views import (
    CheckpointRow,
    Edit,
    JobSummary,
    NoticeRow,
    Order,
    RestorePreview,
    SettingsPreview,
)
from holdfast_web import forms
from holdfast_web.render import View, values

POINTS_SHOWN, POINTS_MOST = 12, 500
EDITS_SHOWN, EDITS_MOST = 8, 200
ORDER_SHOWN_SECONDS, FAILURE_SHOWN_SECONDS = 120.0, 900.0
"""How long a finished restore, and one that went wrong, stays beside the timeline before it is history only."""
FAILURES = ("failed", "expired")


@dataclass(frozen=True, kw_only=True)
class FleetRows(View):
    template: ClassVar[str] = "_fleet_rows.html"
    jobs: list[JobSummary]
    search: str
    now: float


@dataclass(frozen=True, kw_only=True)
class FleetPage(FleetRows):
    template: ClassVar[str] = "fleet.html"
    server: str
    """The address that agents are to be given."""


@dataclass(frozen=True, kw_only=True)
class FleetLive(FleetRows):
    template: ClassVar[str] = "fleet_live.html"


@dataclass(frozen=True, kw_only=True)
class Ack:
    """What became of the newest change of one setting."""

    edit: Edit
    alive: bool

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
    conflict: Conflict | None
    retried: str
    """Which form met the conflict."""
    preview: Preview
    acks: dict[str, Ack]
    now: float


@dataclass(frozen=True, kw_only=True)
class JobFacts(View):
    """What changes by itself while a page is open."""

    template: ClassVar[str] = "job_live.html"
    job: JobSummary
    stall_window: int
    points: list[CheckpointRow]
    points_limit: int
    orders: list[Order]
    order: Order | None
    """The one whose progress is shown."""
    edits: list[Edit]
    edits_limit: int
    more_edits: bool
    notices: list[NoticeRow]
    acks: dict[str, Ack]
    now: float


@dataclass(frozen=True, kw_only=True)
class JobPage(JobFacts):
    template: ClassVar[str] = "job.html"
    controls: Controls


@dataclass(frozen=True, kw_only=True)
class PointsPart(View):
    template: ClassVar[str] = "_points.html"
    job: JobSummary
    points: list[CheckpointRow]
    points_limit: int
    now: float


@dataclass(frozen=True, kw_only=True)
class HistoryPart(View):
    template: ClassVar[str] = "_history.html"
    job: JobSummary
    orders: list[Order]
    edits: list[Edit]
    edits_limit: int
    more_edits: bool
    notices: list[NoticeRow]
    now: float


@dataclass(frozen=True, kw_only=True)
class RestoreDialog(View):
    template: ClassVar[str] = "_restore.html"
    job: JobSummary
    preview: RestorePreview | None
    asked: str
    """The iteration that was typed, as it was typed."""
    refusal: str
    nearest: CheckpointRow | None
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Names this click: sent twice, it is the same order."""
    now: float


@dataclass(frozen=True, kw_only=True)
class RestorePage(RestoreDialog):
    template: ClassVar[str] = "restore.html"


@dataclass(frozen=True, kw_only=True)
class LoginPage(View):
    template: ClassVar[str] = "login.html"
    refused: str
    then: str
    """The path to go on to."""


@dataclass(frozen=True, kw_only=True)
class ErrorPage(View):
    template: ClassVar[str] = "error.html"
    status: int
    title: str
    detail: str


def in_order(jobs: list[JobSummary]) -> list[JobSummary]:
    """Living jobs by name, so that no row jumps away from under the pointer; then the others, newest first."""
    living = sorted((job for job in jobs if job.alive), key=lambda job: job.job)
    return living + [job for job in jobs if not job.alive]


def acks_of(edits: list[Edit], alive: bool) -> dict[str, Ack]:
    """By setting, its newest change."""
    newest: dict[str, Ack] = {}
    for edit in sorted(edits, key=lambda row: row.version, reverse=True):
        for change in edit.changes:
            newest.setdefault(change.field, Ack(edit=edit, alive=alive))
    return newest


def shown_order(orders: list[Order], now: float) -> Order | None:
    """The open order, or the newest one while its outcome is still news."""
    if not orders:
        return None
    newest = next((order for order in orders if order.open), orders[0])
    moved_at = newest.transitions[-1].at if newest.transitions else newest.created_at
    shown_seconds = FAILURE_SHOWN_SECONDS if newest.state in FAILURES else ORDER_SHOWN_SECONDS
    return newest if newest.open or now - moved_at < shown_seconds else None


def told_edits(edits: list[Edit]) -> list[Edit]:
    """Those in which a setting became another one; restores have a list of their own."""
    return [
        edit
        for edit in edits
        if any(change.field != "restore" and change.before != change.after for change in edit.changes)
    ]


async def job_facts(
    db: Database, name: str, *, now: float, points_limit: int = POINTS_SHOWN, edits_limit: int = EDITS_SHOWN
) -> JobFacts:
    job = await timeline.job_summary(db, name, now=now)
    orders = await timeline.orders(db, name)
    edits = await timeline.edits(db, name, limit=EDITS_MOST)
    told = told_edits(edits)
    return JobFacts(
        job=job,
        stall_window=min(job.iteration, STALL_WINDOW_ITERATIONS),
        points=await timeline.restore_points(db, name, limit=points_limit, in_store=True),
        points_limit=points_limit,
        orders=orders,
        order=shown_order(orders, now),
        edits=told[:edits_limit],
        edits_limit=edits_limit,
        more_edits=len(told) > edits_limit,
        notices=await timeline.notices(db, name, limit=8),
        acks=acks_of(edits, job.alive),
        now=now,
    )


def preview_of(job: JobSummary, answer: SettingsPreview) -> Preview:
    return Preview(job=job, plan=answer.plan, in_force=answer.in_force, why_none=answer.why_none)


async def controls(db: Database, job: JobSummary, acks: dict[str, Ack], *, now: float) -> Controls:
    budget = job.desired.budget if job.desired.budget is not None else job.budget
    every = job.desired.every if job.desired.every is not None else job.interval
    return Controls(
        job=job,
        budget=Typed(value="" if budget is None else f"{budget * 100:.6g}"),
        every=Typed(value="" if every is None else str(every)),
        conflict=None,
        retried="",
        preview=preview_of(job, await control.preview_settings(db, job.job, budget=None, every=None, now=now)),
        acks=acks,
        now=now,
    )


async def controls_of(db: Database, name: str, *, now: float) -> Controls:
    job = await timeline.job_summary(db, name, now=now)
    return await controls(db, job, acks_of(await timeline.edits(db, name), job.alive), now=now)


def refused_controls(shown: Controls, form: str, typed: str, refusal: Refused) -> Controls:
    """The controls again, with what was typed and why it was refused; after a conflict, ready to try again."""
    conflict = refusal if isinstance(refusal, Conflict) else None
    answer = replace(shown, conflict=conflict, retried=form)
    error = "" if conflict else str(refusal)
    if form == "budget":
        return replace(answer, budget=Typed(value=typed, error=error))
    if form == "interval":
        return replace(answer, every=Typed(value=typed, error=error))
    return answer


async def restore_dialog(
    db: Database, name: str, *, now: float, checkpoint: str = "", asked: str = "", refusal: str = ""
) -> RestoreDialog:
    """What going back would mean; for a typed iteration, the point at it or the offer of an earlier one."""
    job = await timeline.job_summary(db, name, now=now)
    nearest = None
    try:
        if asked:
            checkpoint = (await control.checkpoint_at(db, name, forms.iteration(asked))).id
        preview = await control.preview_restore(db, name, checkpoint, now=now) if checkpoint else None
        if preview and not preview.checkpoint.restorable:
            raise NotRestorable(_unrestorable(preview.checkpoint))
    except (NoSuchCheckpoint, NotRestorable, InvalidSetting) as error:
        preview, refusal = None, _sentence(error)
        nearest = error.nearest if isinstance(error, NoSuchCheckpoint) else None
    return RestoreDialog(job=job, preview=preview, asked=asked, refusal=refusal, nearest=nearest, now=now)


def _unrestorable(row: CheckpointRow) -> str:
    return f"checkpoint {row.id} is {row.state}" + (f": {row.reason}" if row.reason else "")


def _sentence(error: Refused) -> str:
    if isinstance(error, NoSuchCheckpoint):
        none = "" if error.nearest else " There is none before it either."
        return f"Iteration {error.iteration:,} has no restore point.{none}"
    return str(error)


def history_part(facts: JobFacts) -> HistoryPart:
    return HistoryPart(
        job=facts.job,
        orders=facts.orders,
        edits=facts.edits,
        edits_limit=facts.edits_limit,
        more_edits=facts.more_edits,
        notices=facts.notices,
        now=facts.now,
    )


def restore_page(dialog: RestoreDialog) -> RestorePage:
    return RestorePage(**values(dialog))


def job_page(facts: JobFacts, shown: Controls) -> JobPage:
    return JobPage(**values(facts), controls=shown)
