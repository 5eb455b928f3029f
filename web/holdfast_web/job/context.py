"""What each page and fragment shows: gathered from the server's questions, typed for its template."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace
from typing import ClassVar

from holdfast.answers import (
    Alert,
    CheckpointRow,
    Edit,
    Family,
    JobPlan,
    JobSummary,
    NoticeRow,
    Order,
    RestorePreview,
    SettingsPreview,
)
from holdfast.pacing.profile import Plan
from holdfast_server import control, exports, goodput, plans, previews, summaries, timeline
from holdfast_server.alerts import incidents
from holdfast_server.db import Database
from holdfast_server.desired import SETTINGS
from holdfast_server.errors import Conflict, InvalidSetting, NoSuchCheckpoint, NotRestorable, Refused
from holdfast_server.summaries import STALL_WINDOW_ITERATIONS
from holdfast_web.alerts.context import SILENCES
from holdfast_web.fleet.context import GOODPUT_WINDOW
from holdfast_web.job.plan_picture import Picture, draw
from holdfast_web.shared import forms
from holdfast_web.shared.render import View, values

POINTS_SHOWN, POINTS_MOST = 12, 500
EDITS_SHOWN, EDITS_MOST = 8, 200
ORDER_SHOWN_SECONDS, FAILURE_SHOWN_SECONDS = 120.0, 900.0
"""How long a finished restore, and one that went wrong, stays beside the timeline before it is history only."""
FAILURES = ("failed", "expired")
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

    template: ClassVar[str] = "job/_preview.html"
    job: JobSummary
    plan: Plan | None
    in_force: Plan | None
    why_none: str
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Controls(View):
    template: ClassVar[str] = "job/_controls.html"
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


@dataclass(frozen=True, kw_only=True)
class JobFacts(View):
    """What changes by itself while a page is open."""

    template: ClassVar[str] = "job/job_live.html"
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
    family: Family
    alerts: list[Alert]
    silences: tuple[tuple[int, str], ...] = SILENCES
    acks: dict[str, Ack]
    goodput: float | None
    """Over the last hour."""
    now: float


@dataclass(frozen=True, kw_only=True)
class JobPage(JobFacts):
    template: ClassVar[str] = "job/job.html"
    controls: Controls
    parquet: bool
    """Whether the server can write it."""


@dataclass(frozen=True, kw_only=True)
class PlanAnswer(View):
    """Every interval weighed, or why what was typed cannot be."""

    template: ClassVar[str] = "job/_plan_answer.html"
    job: str
    plan: JobPlan
    picture: Picture | None
    query: str = ""
    """The same question to the API."""
    error: str = ""
    field: str = ""
    """Which field it is that cannot be."""


@dataclass(frozen=True, kw_only=True)
class PlanPart(View):
    """The fields of the question, with the answer."""

    template: ClassVar[str] = "job/_plan.html"
    page_template: ClassVar[str] = "job/plan.html"
    job: str
    typed: dict[str, str]
    answer: PlanAnswer


@dataclass(frozen=True, kw_only=True)
class RestoreDialog(View):
    template: ClassVar[str] = "job/_restore.html"
    page_template: ClassVar[str] = "job/restore.html"
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
class DeleteDialog(View):
    template: ClassVar[str] = "job/_delete.html"
    page_template: ClassVar[str] = "job/delete.html"
    job: JobSummary
    refusal: str
    now: float


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
    async with db.one_view():
        return await _job_facts(db, name, now=now, points_limit=points_limit, edits_limit=edits_limit)


async def _job_facts(db: Database, name: str, *, now: float, points_limit: int, edits_limit: int) -> JobFacts:
    job = await summaries.job_summary(db, name, now=now)
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
        alerts=(await incidents.open_of_jobs(db, [name], now=now)).get(name, []),
        acks=acks_of(edits, job),
        family=await summaries.family(db, name),
        goodput=(await goodput.shares(db, [name], GOODPUT_WINDOW, now=now)).get(name),
        now=now,
    )


async def restore_dialog(
    db: Database, name: str, *, now: float, checkpoint: str = "", asked: str = "", refusal: str = ""
) -> RestoreDialog:
    """What going back would mean; for a typed iteration, the point at it or the offer of an earlier one."""
    job = await summaries.job_summary(db, name, now=now)
    nearest = None
    try:
        if asked:
            checkpoint = (await control.checkpoint_at(db, name, forms.iteration(asked))).id
        preview = await previews.preview_restore(db, name, checkpoint, now=now) if checkpoint else None
        if preview and not preview.checkpoint.restorable:
            point = preview.checkpoint
            raise NotRestorable(
                f"checkpoint {point.id} is {point.state}" + (f": {point.reason}" if point.reason else "")
            )
    except (NoSuchCheckpoint, NotRestorable, InvalidSetting) as error:
        preview, refusal = None, _sentence(error)
        nearest = error.nearest if isinstance(error, NoSuchCheckpoint) else None
    return RestoreDialog(job=job, preview=preview, asked=asked, refusal=refusal, nearest=nearest, now=now)


def _sentence(error: Refused) -> str:
    if isinstance(error, NoSuchCheckpoint):
        none = "" if error.nearest else " There is none before it either."
        return f"Iteration {error.iteration:,} has no restore point.{none}"
    return str(error)


async def plan_part(db: Database, name: str, typed: dict[str, str]) -> PlanPart:
    """What was typed, as it was typed, and what follows from it. Raises UnknownJob."""
    try:
        plan = await plans.plan_job(db, name, plans.what_if(**typed, bare="percent"))
        picture = draw(plan.outlook) if plan.outlook else None
        answer = PlanAnswer(job=name, plan=plan, picture=picture, query=forms.plan_query(typed))
    except InvalidSetting as error:
        # what is as it is stands for the fields that are empty, also beside one that cannot be
        plan = await plans.plan_job(db, name)
        answer = PlanAnswer(job=name, plan=plan, picture=None, error=str(error), field=error.field)
    return PlanPart(job=name, typed=typed, answer=answer)


def job_page(facts: JobFacts, shown: Controls) -> JobPage:
    return JobPage(**values(facts), controls=shown, parquet=exports.writes_parquet())


# ---- the forms of a job's page ------------------------------------------------------------------


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
        preview=preview_of(job, await plans.preview_settings(db, job.job, budget=None, every=None, now=now)),
        acks=acks,
        now=now,
    )


async def controls_of(db: Database, name: str, *, now: float) -> Controls:
    job = await summaries.job_summary(db, name, now=now)
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
