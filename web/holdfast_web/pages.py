"""What each page and fragment shows: gathered from the server's questions, typed for its template."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
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
)
from holdfast_server import control, exports, forks, goodput, plans, timeline
from holdfast_server.alerts import incidents
from holdfast_server.db import Database
from holdfast_server.errors import InvalidSetting, NoSuchCheckpoint, NotRestorable, Refused
from holdfast_server.summaries import STALL_WINDOW_ITERATIONS
from holdfast_web import forms
from holdfast_web.alert_pages import SILENCES
from holdfast_web.controls import Ack, Controls, acks_of
from holdfast_web.fleet import GOODPUT_WINDOW
from holdfast_web.picture import Picture, draw
from holdfast_web.render import View, values

POINTS_SHOWN, POINTS_MOST = 12, 500
EDITS_SHOWN, EDITS_MOST = 8, 200
ORDER_SHOWN_SECONDS, FAILURE_SHOWN_SECONDS = 120.0, 900.0
"""How long a finished restore, and one that went wrong, stays beside the timeline before it is history only."""
FAILURES = ("failed", "expired")


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
    family: Family
    alerts: list[Alert]
    silences: tuple[tuple[int, str], ...] = SILENCES
    acks: dict[str, Ack]
    goodput: float | None
    """Over the last hour."""
    now: float


@dataclass(frozen=True, kw_only=True)
class JobPage(JobFacts):
    template: ClassVar[str] = "job.html"
    controls: Controls
    parquet: bool
    """Whether the server can write it."""


@dataclass(frozen=True, kw_only=True)
class PointsPart(View):
    template: ClassVar[str] = "_points.html"
    job: JobSummary
    family: Family
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
class PlanAnswer(View):
    """Every interval weighed, or why what was typed cannot be."""

    template: ClassVar[str] = "_plan_answer.html"
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

    template: ClassVar[str] = "_plan.html"
    job: str
    typed: dict[str, str]
    answer: PlanAnswer


@dataclass(frozen=True, kw_only=True)
class PlanPage(PlanPart):
    template: ClassVar[str] = "plan.html"


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
class DeleteDialog(View):
    template: ClassVar[str] = "_delete.html"
    job: JobSummary
    refusal: str
    now: float


@dataclass(frozen=True, kw_only=True)
class DeletePage(DeleteDialog):
    template: ClassVar[str] = "delete.html"


@dataclass(frozen=True, kw_only=True)
class ErrorPage(View):
    template: ClassVar[str] = "error.html"
    status: int
    title: str
    detail: str


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
        alerts=(await incidents.open_of_jobs(db, [name], now=now)).get(name, []),
        acks=acks_of(edits, job),
        family=await forks.family(db, name),
        goodput=(await goodput.shares(db, [name], GOODPUT_WINDOW, now=now)).get(name),
        now=now,
    )


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


async def delete_dialog(db: Database, name: str, *, now: float, refusal: str = "") -> DeleteDialog:
    return DeleteDialog(job=await timeline.job_summary(db, name, now=now), refusal=refusal, now=now)


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


def plan_page(part: PlanPart) -> PlanPage:
    return PlanPage(**values(part))


def restore_page(dialog: RestoreDialog) -> RestorePage:
    return RestorePage(**values(dialog))


def delete_page(dialog: DeleteDialog) -> DeletePage:
    return DeletePage(**values(dialog))


def job_page(facts: JobFacts, shown: Controls) -> JobPage:
    return JobPage(**values(facts), controls=shown, parquet=exports.writes_parquet())
