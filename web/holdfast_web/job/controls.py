"""The forms that change the settings of a job. Every form works without scripts, by POST and redirect."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import Depends
from fastapi.responses import RedirectResponse, Response
from msgspec import UNSET, UnsetType

from holdfast.protocol.jobs import DesiredChanges, JobSummary
from holdfast_server.api.endpoints import Router
from holdfast_server.control import approvals, control, plans
from holdfast_server.core.access import OPERATE, VIEW
from holdfast_server.core.errors import RequestRefused, UnknownJob, UnknownOrder, UnknownValue, VersionConflict
from holdfast_server.http.dependencies import Asker, Db, Now, Who
from holdfast_server.queries import summaries
from holdfast_server.queries.job_view import JobView, view_job
from holdfast_web.job import views
from holdfast_web.shared import forms
from holdfast_web.shared.routing import Htmx, Text

router = Router()


@router.endpoint("GET", "/jobs/{job}/controls", access=VIEW)
def job_controls(job: str, db: Db, now: Now) -> Response:
    with view_job(db, job, now=now) as view:
        shown = views.controls_of(view)
    return shown.response()


@router.endpoint("GET", "/jobs/{job}/preview", access=VIEW)
def job_preview(job: str, db: Db, now: Now, budget: str = "", every: str = "") -> Response:
    with view_job(db, job, now=now) as view:
        preview = _preview(view, summaries.job_summary(view), budget=budget, every=every)
    return preview.response(422 if preview.error else 200)


def _preview(view: JobView, job: JobSummary, *, budget: str = "", every: str = "") -> views.PreviewPart:
    try:
        answer = plans.preview_settings(
            view.job,
            budget=forms.budget_from_percent(budget) if budget else None,
            every=forms.interval(every) if every else None,
        )
    except RequestRefused as refusal:
        return views.PreviewPart(job=job, plan=None, in_force=None, why_none="", error=str(refusal))
    return views.preview_part(job, answer)


@dataclass(frozen=True, slots=True)
class _ControlForm:
    """The fields that all forms share."""

    job: str
    db: Db
    who: Who
    asker: Asker
    now: Now
    version: Text
    """The version that the page showed."""
    htmx: Htmx = False

    def change(
        self, form: str, changes: Callable[[], DesiredChanges], *, typed: str = "", hold: str = ""
    ) -> Response:
        def apply() -> None:
            version = forms.version(self.version)
            control.edit(self.db, self.job, changes(), version=version, who=self.who, now=self.now)

        return self.do(form, apply, typed=typed, hold=hold)

    def do(self, form: str, act: Callable[[], None], *, typed: str = "", hold: str = "") -> Response:
        """Apply a change; answer with the current controls, or with the reason of a refusal."""
        try:
            act()
        except (UnknownJob, UnknownOrder, UnknownValue):
            raise
        except RequestRefused as refusal:
            return self._refused(form, refusal, typed, hold)
        if self.htmx:
            with view_job(self.db, self.job, now=self.now) as view:
                shown = views.controls_of(view)
            return shown.response()
        return RedirectResponse(f"/jobs/{self.job}#controls", 303)

    def _refused(self, form: str, refusal: RequestRefused, typed: str, hold: str) -> Response:
        with view_job(self.db, self.job, now=self.now) as view:
            shown = views.controls_of(view)
            if isinstance(refusal, VersionConflict) and form == "budget":
                shown = replace(shown, preview=_preview(view, shown.job, budget=typed))
            live = None if self.htmx else views.job_live(view)
        shown = views.refused_controls(shown, form, typed, refusal, hold=hold)
        if live is None:
            return shown.response(refusal.status)
        return views.job_page(live, shown).response(refusal.status)


Form = Annotated[_ControlForm, Depends()]


@router.endpoint("POST", "/jobs/{job}/budget", access=OPERATE)
def set_budget(form: Form, budget: Text = "") -> Response:
    """Set the budget; that of the script, as the page shows it, stays the script's."""
    with view_job(form.db, form.job, now=form.now) as view:
        shown = summaries.job_summary(view)

    def changes() -> DesiredChanges:
        wanted = forms.budget_from_percent(budget)
        is_same = shown.desired.budget is None and math.isclose(wanted, shown.budget or 0.0, rel_tol=1e-5)
        return DesiredChanges(budget=None if is_same else wanted)

    return form.change("budget", changes, typed=budget)


def _budget_of_plan(text: str) -> float | UnsetType:
    return forms.budget_from_percent(text) if text else UNSET


@router.endpoint("POST", "/jobs/{job}/limits", access=OPERATE)
def set_limits(form: Form, write_budget: Text = "", max_unsaved_work: Text = "") -> Response:
    """Set the write budget and the unsaved work; an empty field returns to the script's setting."""

    def changes() -> DesiredChanges:
        return DesiredChanges(
            write_budget=forms.write_budget(write_budget), max_unsaved_work=forms.unsaved_work(max_unsaved_work)
        )

    return form.change("limits", changes, typed=f"{write_budget}\n{max_unsaved_work}")


@router.endpoint("POST", "/jobs/{job}/interval", access=OPERATE)
def set_interval(
    form: Form, mode: Text = "fixed", every: Text = "", hold: Text = "", budget: Text = ""
) -> Response:
    """Fix the interval, with the budget that a plan was made for, or let the policy set it again."""

    def changes() -> DesiredChanges:
        if mode == "automatic":
            return DesiredChanges(every=None)
        return DesiredChanges(
            every=forms.interval(every), every_seconds=forms.hold(hold), budget=_budget_of_plan(budget)
        )

    return form.change("interval", changes, typed=every, hold=hold)


@router.endpoint("POST", "/jobs/{job}/policy", access=OPERATE)
def set_policy(form: Form, policy: Text = "", mode: Text = "", budget: Text = "") -> Response:
    """Set the policy; `automatic` also ends a fixed interval, under which it would have no effect."""

    def changes() -> DesiredChanges:
        every = None if mode == "automatic" else UNSET
        return DesiredChanges(policy=policy or None, every=every, budget=_budget_of_plan(budget))

    return form.change("policy", changes, typed=policy)


@router.endpoint("POST", "/jobs/{job}/retention", access=OPERATE)
def set_retention(form: Form, retention: Text = "") -> Response:
    return form.change("retention", lambda: DesiredChanges(retention=retention.strip() or None), typed=retention)


@router.endpoint("POST", "/jobs/{job}/trouble", access=OPERATE)
def set_on_trouble(form: Form, on_trouble: Text = "") -> Response:
    """Set what the job does when its loss is wrong; an empty field returns to the script's setting."""
    typed = on_trouble.strip()
    return form.change("trouble", lambda: DesiredChanges(on_trouble=typed or None), typed=on_trouble)


@router.endpoint("POST", "/jobs/{job}/values", access=OPERATE)
def set_value(form: Form, name: Text, value: Text = "", script: Text = "") -> Response:
    """Change a value of the script, or return to the script's own."""

    def apply() -> None:
        wanted = None if script == "true" else value.strip()
        approvals.set_value(form.db, form.job, name, wanted, asker=form.asker, now=form.now)

    return form.do(f"value {name}", apply, typed=value)


@router.endpoint("POST", "/jobs/{job}/undo", access=OPERATE)
def undo(form: Form, edit: Text) -> Response:
    def apply() -> None:
        number, version = forms.version(edit), forms.version(form.version)
        control.undo(form.db, form.job, number, version=version, who=form.who, now=form.now)

    return form.do("undo", apply)


@router.endpoint("POST", "/jobs/{job}/pause", access=OPERATE)
def set_paused(form: Form, paused: Text) -> Response:
    return form.change("pause", lambda: DesiredChanges(paused=paused == "true"), typed=paused)


@router.endpoint("POST", "/jobs/{job}/checkpoint", access=OPERATE)
def request_checkpoint(form: Form) -> Response:
    return form.change("checkpoint", lambda: DesiredChanges(checkpoint_request=True))


@router.endpoint("POST", "/jobs/{job}/probe", access=OPERATE)
def request_probe(form: Form) -> Response:
    return form.change("probe", lambda: DesiredChanges(probe_request=True))
