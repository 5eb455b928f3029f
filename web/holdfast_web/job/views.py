"""Views of the job page: its live parts, forms, dialogs and plan.

One module, since the page, its live answer and the answers to its forms share their parts.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, ClassVar

from msgspec import structs

from holdfast.pacing import planner
from holdfast.pacing.interval_cost import Limit
from holdfast.pacing.policy import IntervalPlan
from holdfast.pacing.what_if import Advice, advise
from holdfast.protocol.administration import Alert, Approval
from holdfast.protocol.analyses import SAME_LOSSES, JobPlan, RestorePreview, SettingsPreview
from holdfast.protocol.attempts import AttemptOutput
from holdfast.protocol.jobs import (
    Annotation,
    CheckpointInfo,
    Edit,
    ForkFamily,
    JobSummary,
    NoticeInfo,
    Order,
    SettingChange,
)
from holdfast.retention import RULES
from holdfast.units import format_exact_rate, format_interval
from holdfast_server.alerts import incidents
from holdfast_server.control import approvals, control, iteration_annotations, plans, previews
from holdfast_server.core.errors import (
    CheckpointNotFound,
    InvalidSetting,
    NotRestorable,
    RequestRefused,
    VersionConflict,
)
from holdfast_server.queries import attempts, exports, goodput, summaries, timeline
from holdfast_server.queries.goodput import GoodputShare
from holdfast_server.queries.job_view import JobView
from holdfast_server.queries.summaries import STALL_WINDOW_ITERATIONS
from holdfast_server.records.desired_state import SETTINGS
from holdfast_server.records.interval_status import limit_of
from holdfast_server.records.last_good import LastGood
from holdfast_web.alerts.views import SILENCES
from holdfast_web.fleet.views import GOODPUT_WINDOW
from holdfast_web.job import value_forms
from holdfast_web.job.plan_plot import PlanPlot, draw
from holdfast_web.job.recent import RecentChange, recent_changes
from holdfast_web.job.value_forms import ValueForm, ValueHistory, ValueReset
from holdfast_web.shared import forms
from holdfast_web.shared.render import View, values

POINTS_SHOWN, POINTS_MOST = 12, 500
EDITS_SHOWN, EDITS_MOST = 8, 200
NOTICES_SHOWN, MARKS_SHOWN, ANNOTATIONS_MOST = 8, 8, 200
ORDER_SHOWN_SECONDS, FAILURE_SHOWN_SECONDS = 120.0, 900.0
"""How long the banner of a completed and of a failed restore stays on the page."""
AFTER_TROUBLE = 5
"""Iterations after a wrong loss whose data is left out as well, unless a person says otherwise."""
OUTPUT_PENDING_SECONDS = 15.0
"""How long after a failure its output may still arrive."""
FAILURES = ("failed", "expired")
POLICY_WORDS = {
    "checkfreq": "as often as the budgets allow",
    "goodput": "least lost time",
    "young-daly": "from the failure rate",
    "coci": "dense where the loss falls fast",
}
POLICIES = {name: POLICY_WORDS.get(name, "") for name in (*planner.policies, "coci") if name != "fixed"}
"""The policies of the menu, described; a form of its own fixes the interval."""
FORMS = {"write budget": "limits", "unsaved work": "limits", "on trouble": "trouble"}
"""Forms of settings, where they have other names."""
HOLDS = (
    ("", "until changed"),
    ("30 min", "for 30 min"),
    ("2 h", "for 2 h"),
    ("8 h", "for 8 h"),
    ("24 h", "for 24 h"),
)


@dataclass(frozen=True, kw_only=True)
class ChangeStatus:
    """The progress of the newest change of one setting: saved, delivered, applied."""

    edit: Edit
    alive: bool
    delivered: bool
    undoable: bool

    @property
    def applied(self) -> bool:
        return self.edit.applied_iteration is not None


@dataclass(frozen=True, kw_only=True)
class FieldInput:
    """The text of a form field and why it was refused."""

    value: str
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class PreviewPart(View):
    """Predictions for the typed settings next to measurements and predictions for the current ones."""

    template: ClassVar[str] = "job/_preview.html"
    job: JobSummary
    plan: IntervalPlan | None
    in_force: IntervalPlan | None
    why_none: str
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class ControlsPart(View):
    template: ClassVar[str] = "job/_controls.html"
    job: JobSummary
    budget: FieldInput
    limit: Limit | None
    """What decides the interval; `None` where the policy is free, or it is fixed."""
    write_budget: FieldInput
    unsaved_work: FieldInput
    every: FieldInput
    retention: FieldInput
    retention_rules: str = ", ".join(RULES)
    on_trouble: FieldInput
    conflict: VersionConflict | None
    conflict_form: str
    """The form that met the conflict."""
    policy: str | None
    """The chosen policy; None for the script's default."""
    hold: str = ""
    """How long a fixed interval applies: a key of `holds`."""
    preview: PreviewPart
    advice: Advice | None
    """A change of policy or budget that gains training time, by the measurements of the job."""
    changes: dict[str, ChangeStatus]
    live_values: list[ValueForm]
    policies: dict[str, str] = field(default_factory=lambda: POLICIES)
    holds: tuple[tuple[str, str], ...] = HOLDS
    now: float


@dataclass(frozen=True, kw_only=True)
class PointsPart(View):
    """The table of restore points."""

    template: ClassVar[str] = "job/_points.html"
    job: JobSummary
    points: list[CheckpointInfo]
    points_limit: int
    family: ForkFamily
    now: float


@dataclass(frozen=True, kw_only=True)
class HistoryPart(View):
    """Edited settings, restores, notices and annotations."""

    template: ClassVar[str] = "job/_history.html"
    job: JobSummary
    orders: list[Order]
    edits: list[Edit]
    edits_limit: int
    more_edits: bool
    notices: list[NoticeInfo]
    annotations: list[Annotation]
    """All of people and the newest of the script, those of the latest iterations first."""
    live_values: list[ValueForm]
    value_history: list[ValueHistory]
    now: float


@dataclass(frozen=True, kw_only=True)
class JobLive(PointsPart, HistoryPart):
    """The parts of the page that refresh while it is open."""

    template: ClassVar[str] = "job/job_live.html"
    stall_window: int
    order: Order | None
    """The restore that the banner shows."""
    alerts: list[Alert]
    last_good: LastGood | None
    """Of a job that has ended with a wrong loss: the checkpoint to go back to."""
    silences: tuple[tuple[int, str], ...] = SILENCES
    changes: dict[str, ChangeStatus]
    output: AttemptOutput | None
    """Last output of a job that failed or was stopped."""
    is_output_pending: bool
    """Whether the job has just failed, and its output is still to arrive."""
    waiting_host: str
    """Host whose supervisor waits for a restore request; empty without one."""
    recent: list[RecentChange]
    """What changed in the last hour, newest first."""
    goodput: GoodputShare | None
    """Goodput of the last hour, or of the job if it is younger."""
    approvals: list[Approval]
    """What waits for the approval of a second person."""


@dataclass(frozen=True, kw_only=True)
class JobPage(JobLive):
    template: ClassVar[str] = "job/job.html"
    controls: ControlsPart
    parquet: bool
    """Whether the server can export Parquet."""


@dataclass(frozen=True, kw_only=True)
class PlanAnswer(View):
    """The predicted cost of each interval, or why the inputs were refused."""

    template: ClassVar[str] = "job/_plan_answer.html"
    job: str
    plan: JobPlan
    plot: PlanPlot | None
    policies: dict[str, str] = field(default_factory=lambda: POLICIES)
    query: str = ""
    """The query string of the same request to the API."""
    error: str = ""
    field: str = ""
    """The field that was refused."""
    project: str
    version: int
    """Version of the settings that an interval or a policy of the plan replaces."""
    policy: str | None
    budget: float | None
    """Policy and budget in force; the budget of the plan is applied with an interval if it is another one."""


@dataclass(frozen=True, kw_only=True)
class PlanPart(View):
    """The inputs of the plan with the answer."""

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
    undoes: Order | None
    """The newest restore that this one would undo."""
    reason: str
    """Why it offers this checkpoint; empty if a person chose it."""
    asked: str
    """The iteration as typed."""
    refusal: str
    nearest: CheckpointInfo | None
    degraded: bool
    """Whether lost bytes of a damaged checkpoint are to be replaced."""
    data: str
    """What is chosen: `repeat` the data, `skip` up to `skip_to`, or leave out a number of `batches`."""
    skip_to: str
    """Last iteration whose data is left out; a few after a wrong loss."""
    batches: str
    """The same as a number of batches, where iterations take the same number of them."""
    loader: str
    """Number of their loader; empty for the only one."""
    resets: list[ValueReset]
    """Values that change by it."""
    same_losses: str = SAME_LOSSES
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Idempotency key: a form that is sent twice requests one restore."""
    now: float


@dataclass(frozen=True, kw_only=True)
class DeleteDialog(View):
    template: ClassVar[str] = "job/_delete.html"
    page_template: ClassVar[str] = "job/delete.html"
    job: JobSummary
    refusal: str
    now: float


def shown_order(orders: list[Order], now: float) -> Order | None:
    """Return the open restore, or the newest one for a while after it ended."""
    if not orders:
        return None
    newest = next((order for order in orders if order.open), orders[0])
    moved_at = newest.transitions[-1].at if newest.transitions else newest.created_at
    shown_seconds = FAILURE_SHOWN_SECONDS if newest.state in FAILURES else ORDER_SHOWN_SECONDS
    return newest if newest.open or now - moved_at < shown_seconds else None


def points_part(view: JobView, job: JobSummary, *, limit: int) -> PointsPart:
    return PointsPart(
        job=job,
        points=timeline.restore_points(view, limit=limit, in_store=True),
        points_limit=limit,
        family=summaries.family(view),
        now=view.now,
    )


def history_part(view: JobView, job: JobSummary, *, limit: int, edits: list[Edit] | None = None) -> HistoryPart:
    if edits is None:
        edits = timeline.edits(view, limit=EDITS_MOST)
    # restores have their own list
    changed = [
        edit
        for edit in edits
        if any(_is_setting(change) and change.before != change.after for change in edit.changes)
    ]
    by_people = iteration_annotations.list_annotations(view, limit=ANNOTATIONS_MOST, by_people=True)
    by_script = iteration_annotations.list_annotations(view, limit=MARKS_SHOWN, by_people=False)
    live_values = value_forms.forms_of(view)
    return HistoryPart(
        job=job,
        live_values=live_values,
        value_history=value_forms.history_of(live_values),
        orders=timeline.orders(view),
        edits=changed[:limit],
        edits_limit=limit,
        more_edits=len(changed) > limit,
        notices=timeline.notices(view, limit=NOTICES_SHOWN),
        annotations=sorted(by_people + by_script, key=lambda row: (row.iteration, row.id), reverse=True),
        now=view.now,
    )


def _is_setting(change: SettingChange) -> bool:
    """Whether the history of settings shows a change; restores and values have their own lists."""
    return change.field != "restore" and not change.field.startswith("value ")


def job_live(view: JobView, *, points_limit: int = POINTS_SHOWN, edits_limit: int = EDITS_SHOWN) -> JobLive:
    name, now = view.name, view.now
    job = summaries.job_summary(view)
    edits = timeline.edits(view, limit=EDITS_MOST)
    points = points_part(view, job, limit=points_limit)
    history = history_part(view, job, limit=edits_limit, edits=edits)
    alerts = incidents.open_of_jobs(view.session, [name], now=now)
    supervisor = job.supervisor
    restarts = job.status == "restarting" and supervisor is not None and supervisor.failed
    has_failed = restarts or (job.has_ended and job.status != "finished")
    output = attempts.output(view, job.attempt) if has_failed else None
    just_ended = supervisor is not None and job.last_contact_seconds < OUTPUT_PENDING_SECONDS
    return JobLive(
        **values(points) | values(history),
        stall_window=min(job.iteration, STALL_WINDOW_ITERATIONS),
        order=shown_order(history.orders, now),
        alerts=alerts.get(name, []),
        output=output,
        is_output_pending=just_ended and output is not None and not output.lines,
        waiting_host="" if job.alive else attempts.waiting_host(view),
        last_good=control.find_last_good(view) if job.has_ended else None,
        recent=recent_changes(
            job,
            edits=edits,
            orders=history.orders,
            annotations=history.annotations,
            notices=history.notices,
            alerts=alerts.get(name, []),
            now=now,
        ),
        changes=newest_changes(edits, job),
        goodput=goodput.share(view, GOODPUT_WINDOW),
        approvals=[each for each in approvals.approvals(view.session, name, now=now) if each.state == "waiting"],
    )


def restore_dialog(
    view: JobView,
    *,
    checkpoint: str = "",
    asked: str = "",
    before: int | None = None,
    refusal: str = "",
    degraded: bool = False,
    data: str = "repeat",
    skip_to: str = "",
    batches: str = "",
    loader: str = "",
) -> RestoreDialog:
    """Preview a restore; for a typed iteration without a restore point, offer the nearest earlier one.

    `before`: an iteration with a wrong loss, to restore the last good checkpoint before it and before an earlier
    trouble that the job has not recovered from.
    """
    job = summaries.job_summary(view)
    nearest, reason, good = None, "", None
    try:
        if before is not None and not checkpoint:
            good = control.find_last_good(view, before=before)
            if good is None or good.checkpoint is None:
                place = before if good is None else good.iteration
                raise NotRestorable(f"no good checkpoint from before iteration {place:,} is left")
            checkpoint, reason = good.checkpoint.id, good.reason
        if asked:
            checkpoint = control.checkpoint_at(view, forms.iteration(asked)).id
        preview = previews.preview_restore(view, checkpoint) if checkpoint else None
        if preview and good and not preview.repeats:  # a wrong loss that the job has recovered from
            preview = structs.replace(preview, repeats=good.trouble, repeats_at=good.iteration)
        is_degraded = degraded and preview is not None and preview.checkpoint.state == "damaged"
        if preview and not preview.checkpoint.restorable and not is_degraded:
            point = preview.checkpoint
            raise NotRestorable(
                f"checkpoint {point.id} is {point.state_name}" + (f": {point.reason}" if point.reason else "")
            )
    except (CheckpointNotFound, NotRestorable, InvalidSetting) as error:
        preview, refusal = None, _sentence(error)
        nearest = error.nearest if isinstance(error, CheckpointNotFound) else None
    undone = [
        order
        for order in (timeline.orders(view) if preview else [])
        if preview and order.undoable and order.safety_checkpoint == preview.checkpoint.id
    ]
    undoes = undone[0] if undone else None
    return RestoreDialog(
        job=job,
        preview=preview,
        undoes=undoes,
        reason=reason,
        asked=asked,
        refusal=refusal,
        nearest=nearest,
        degraded=degraded and preview is not None,
        data=data,
        skip_to=skip_to or str(_skip_to(preview) or ""),
        batches=batches or _batches(preview),
        loader=loader,
        resets=value_forms.resets_of(view, preview.checkpoint) if preview else [],
        now=view.now,
    )


def _skip_to(preview: RestorePreview | None) -> int:
    """Return the last iteration whose data to leave out: a few after the wrong loss, or all that were trained."""
    if preview is None:
        return 0
    after = preview.from_iteration if preview.repeats_at is None else preview.repeats_at + AFTER_TROUBLE
    return max(after, preview.to_iteration + 1)


def _batches(preview: RestorePreview | None) -> str:
    """Return the number of batches of these iterations; empty where it is not known."""
    if preview is None or not preview.batches_an_iteration:
        return ""
    return str((_skip_to(preview) - preview.to_iteration) * preview.batches_an_iteration)


def _sentence(error: RequestRefused) -> str:
    if isinstance(error, CheckpointNotFound):
        none = "" if error.nearest else " No earlier restore point exists."
        return f"Iteration {error.iteration:,} has no restore point.{none}"
    return str(error)


def plan_part(view: JobView, typed: dict[str, str]) -> PlanPart:
    """Return the plan for the typed inputs."""
    job = summaries.job_summary(view)
    known: dict[str, Any] = {"job": view.name, "project": job.project, "version": job.desired.version}
    known |= {"policy": job.policy, "budget": job.budget if job.desired.budget is None else job.desired.budget}
    try:
        plan = plans.plan_job(view, plans.what_if(**typed, bare="percent"))
        plot = draw(plan.comparison) if plan.comparison else None
        answer = PlanAnswer(plan=plan, plot=plot, query=forms.plan_query(typed), **known)
    except InvalidSetting as error:
        # the placeholders of blank fields need the current plan
        plan = plans.plan_job(view)
        answer = PlanAnswer(plan=plan, plot=None, error=str(error), field=error.field, **known)
    return PlanPart(job=view.name, typed=typed, answer=answer)


def job_page(live: JobLive, shown: ControlsPart) -> JobPage:
    return JobPage(**values(live), controls=shown, parquet=exports.writes_parquet())


def newest_changes(edits: list[Edit], job: JobSummary) -> dict[str, ChangeStatus]:
    """Return the newest change of each setting."""
    newest: dict[str, ChangeStatus] = {}
    for edit in sorted(edits, key=lambda row: row.version, reverse=True):
        undoable = all(change.field in SETTINGS and change.before != change.after for change in edit.changes)
        delivered = edit.version <= job.delivered_version
        status = ChangeStatus(edit=edit, alive=job.alive, delivered=delivered, undoable=undoable)
        for change in edit.changes:
            form = FORMS.get(change.field, change.field)
            newest.setdefault(form, status)
    return newest


def preview_part(job: JobSummary, answer: SettingsPreview) -> PreviewPart:
    return PreviewPart(job=job, plan=answer.plan, in_force=answer.in_force, why_none=answer.why_none)


def controls(
    view: JobView,
    job: JobSummary,
    changes: dict[str, ChangeStatus],
    live_values: list[ValueForm] | None = None,
) -> ControlsPart:
    desired = job.desired
    rate, seconds = desired.write_bytes_per_second, desired.max_unsaved_seconds
    budget = desired.budget if desired.budget is not None else job.budget
    every = job.fixed_interval or job.interval_in_force
    return ControlsPart(
        job=job,
        budget=FieldInput(value="" if budget is None else f"{budget * 100:.6g}"),
        limit=limit_of(job.paced),
        write_budget=FieldInput(value="" if rate is None else format_exact_rate(rate)),
        unsaved_work=FieldInput(value="" if seconds is None else format_interval(timedelta(seconds=seconds))),
        every=FieldInput(value=format_interval(every) if isinstance(every, timedelta) else str(every or "")),
        retention=FieldInput(value=job.desired.retention or ""),
        on_trouble=FieldInput(value=job.desired.on_trouble or ""),
        conflict=None,
        conflict_form="",
        policy=job.desired.policy,
        preview=preview_part(job, plans.preview_settings(view.job, budget=None, every=None)),
        advice=_advice(view, job),
        changes=changes,
        live_values=value_forms.forms_of(view) if live_values is None else live_values,
        now=view.now,
    )


def _advice(view: JobView, job: JobSummary) -> Advice | None:
    """Return advice once the cost of a checkpoint is measured, unless the script fixes the interval."""
    is_measured = job.paced is not None and "cost_seconds" in job.paced.profile
    if not (job.alive and is_measured) or (job.policy == "fixed" and job.fixed_interval is None):
        return None
    comparison = plans.plan_job(view).comparison
    return None if comparison is None else advise(comparison)


def controls_of(view: JobView) -> ControlsPart:
    job = summaries.job_summary(view)
    return controls(view, job, newest_changes(timeline.edits(view), job))


def refused_controls(
    shown: ControlsPart, form: str, typed: str, refusal: RequestRefused, *, hold: str = ""
) -> ControlsPart:
    """Return the controls with the refused input and the reason; after a conflict the form can be sent again."""
    conflict = refusal if isinstance(refusal, VersionConflict) else None
    answer = replace(shown, conflict=conflict, conflict_form=form)
    error = "" if conflict else str(refusal)
    if form == "budget":
        return replace(answer, budget=FieldInput(value=typed, error=error))
    if form == "limits":
        field = isinstance(refusal, InvalidSetting) and refusal.field
        rate, _, unsaved = typed.partition("\n")
        return replace(
            answer,
            write_budget=FieldInput(value=rate, error=error if field == "write_budget" else ""),
            unsaved_work=FieldInput(value=unsaved, error=error if field == "max_unsaved_work" else ""),
        )
    if form == "interval":
        return replace(answer, every=FieldInput(value=typed, error=error), hold=hold)
    if form == "retention":
        return replace(answer, retention=FieldInput(value=typed, error=error))
    if form == "trouble":
        return replace(answer, on_trouble=FieldInput(value=typed, error=error))
    if form == "policy":
        return replace(answer, policy=typed or None)
    if form.startswith("value "):
        refused = value_forms.refused(shown.live_values, form.removeprefix("value "), typed, error)
        return replace(answer, live_values=refused)
    return answer
