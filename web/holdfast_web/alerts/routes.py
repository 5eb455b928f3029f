"""The alert pages: open alerts, the rules of a project, its channels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

from fastapi import Depends, Form, Path, Query
from fastapi.responses import PlainTextResponse, RedirectResponse, Response
from msgspec import UNSET, UnsetType

from holdfast.protocol.administration import AlertRule
from holdfast.protocol.field_types import MAX_INTEGER
from holdfast_server.alerts import channels, deliveries, incidents, routing, rules
from holdfast_server.alerts.conditions import KINDS, SEVERITIES
from holdfast_server.alerts.rules import RuleChanges
from holdfast_server.api.endpoints import Router
from holdfast_server.core.access import LISTS, OPERATE, PROJECT_ADMIN, PROJECT_OPERATE, PROJECT_VIEW
from holdfast_server.core.errors import AlertResolved, InvalidSetting, RequestRefused, UnknownProject
from holdfast_server.core.principal import Principal
from holdfast_server.db import Database
from holdfast_server.http.dependencies import Asker, Config, Db, Now, Who
from holdfast_server.queries.fleet import projects_of
from holdfast_web.alerts import views
from holdfast_web.shared import forms
from holdfast_web.shared.render import HEADERS
from holdfast_web.shared.routing import Htmx, Text, local_path

Number = Annotated[int, Path(ge=0, le=MAX_INTEGER)]

router = Router()


# ---- alerts ---------------------------------------------------------------------------------------


async def _question(
    state: str = "open",
    group: str = "rule",
    project: str = "",
    severity: str = "",
    rule: str = "",
    label: str = "",
    search: str = "",
) -> views.AlertQuery:
    return views.AlertQuery(
        state=next((known for known in views.STATES if known == state), "open"),
        group=group if group in views.GROUPINGS else "rule",
        project=project,
        severity=severity if severity in SEVERITIES else "",
        rule=rule,
        label=", ".join(forms.labels(label)),
        search=search.strip(),
    )


async def _rows(
    db: Db,
    now: Now,
    asker: Asker,
    question: Annotated[views.AlertQuery, Depends(_question)],
    before: Annotated[int | None, Query(ge=0, le=MAX_INTEGER)] = None,
) -> Callable[[], views.AlertRows]:
    """Return a function that reads the rows, for the thread of the route."""
    return partial(views.alert_rows, db, asker, question, now=now, before=before)


Rows = Annotated[Callable[[], views.AlertRows], Depends(_rows)]


@router.endpoint("GET", "/alerts", access=LISTS)
def alerts_page(db: Db, asker: Asker, rows: Rows) -> Response:
    projects = projects_of(db, asker.visible_projects)
    return replace(rows(), projects=projects, rules=rules.titles(db, projects)).page()


@router.endpoint("GET", "/alerts/live", access=LISTS)
def alerts_live(rows: Rows) -> Response:
    return rows().response()


@router.endpoint("GET", "/alerts/count", access=LISTS)
def alert_count(db: Db, now: Now, asker: Asker) -> Response:
    """Return the number of firing alerts, which the navigation of each page shows."""
    count = incidents.firing(db, now=now, visible_projects=asker.visible_projects)
    return PlainTextResponse(str(count), headers=HEADERS)


@router.endpoint("GET", "/alerts/{alert}", access=LISTS)
def alert_page(alert: Number, db: Db, now: Now, asker: Asker) -> Response:
    return views.alert_page(db, asker, alert, now=now).page()


@router.endpoint("GET", "/alerts/{alert}/live", access=LISTS)
def alert_live(alert: Number, db: Db, now: Now, asker: Asker) -> Response:
    return views.alert_page(db, asker, alert, now=now).response()


@router.endpoint("POST", "/jobs/{job}/alerts/{alert}/comment", access=OPERATE)
def comment(job: str, alert: Number, db: Db, now: Now, asker: Asker, who: Who, text: Text = "") -> Response:
    try:
        incidents.comment(db, job, alert, text, who=who, now=now)
    except InvalidSetting as refusal:
        page = replace(views.alert_page(db, asker, alert, now=now), refused=str(refusal), typed=text)
        return page.page(refusal.status)
    return RedirectResponse(f"/alerts/{alert}", 303)


@router.endpoint(
    "POST",
    "/alerts/acknowledge",
    access=LISTS,  # the route checks each alert
)
def acknowledge_all(
    db: Db, now: Now, asker: Asker, alert: Annotated[list[int] | None, Form()] = None, back: Text = "/alerts",
    htmx: Htmx = False,
) -> Response:  # fmt: skip
    """Acknowledge the selected alerts."""
    incidents.change_all(db, _known(alert), incidents.acknowledge, asker=asker, now=now)
    return _done(back, htmx)


@router.endpoint("POST", "/alerts/silence", access=LISTS)  # the route checks each alert
def silence_all(
    db: Db, now: Now, asker: Asker, alert: Annotated[list[int] | None, Form()] = None, seconds: Text = "3600",
    back: Text = "/alerts", htmx: Htmx = False,
) -> Response:  # fmt: skip
    """Silence the selected alerts."""
    change = partial(incidents.silence, until=now + forms.seconds("silence", seconds))
    incidents.change_all(db, _known(alert), change, asker=asker, now=now)
    return _done(back, htmx)


@router.endpoint("POST", "/alerts/unsilence", access=LISTS)  # the route checks each alert
def unsilence_all(
    db: Db, now: Now, asker: Asker, alert: Annotated[list[int] | None, Form()] = None, back: Text = "/alerts",
    htmx: Htmx = False,
) -> Response:  # fmt: skip
    """End the silence of the selected alerts."""
    incidents.change_all(db, _known(alert), incidents.unsilence, asker=asker, now=now)
    return _done(back, htmx)


def _known(alerts: list[int] | None) -> list[int]:
    return [number for number in alerts or [] if 0 <= number <= MAX_INTEGER]


@router.endpoint("POST", "/jobs/{job}/alerts/{alert}/acknowledge", access=OPERATE)
def acknowledge(
    job: str, alert: Number, db: Db, now: Now, who: Who, back: Text = "/alerts", htmx: Htmx = False
) -> Response:
    with suppress(AlertResolved):  # the alert resolved meanwhile; the answer shows that
        incidents.acknowledge(db, job, alert, who=who, now=now)
    return _done(back, htmx)


@router.endpoint("POST", "/jobs/{job}/alerts/{alert}/silence", access=OPERATE)
def silence(
    job: str,
    alert: Number,
    db: Db,
    now: Now,
    who: Who,
    seconds: Text = "3600",
    back: Text = "/alerts",
    htmx: Htmx = False,
) -> Response:
    until = now + forms.seconds("silence", seconds)
    with suppress(AlertResolved):  # the alert resolved meanwhile; the answer shows that
        incidents.silence(db, job, alert, until=until, who=who, now=now)
    return _done(back, htmx)


@router.endpoint("POST", "/jobs/{job}/alerts/{alert}/unsilence", access=OPERATE)
def unsilence(
    job: str, alert: Number, db: Db, now: Now, who: Who, back: Text = "/alerts", htmx: Htmx = False
) -> Response:
    with suppress(AlertResolved):  # the alert resolved meanwhile; the answer shows that
        incidents.unsilence(db, job, alert, who=who, now=now)
    return _done(back, htmx)


def _done(back: str, htmx: bool) -> Response:
    """Make the page refresh itself; without scripts, redirect to it."""
    if htmx:
        return Response(status_code=204, headers={"HX-Trigger": "holdfast:refresh-now"})
    return RedirectResponse(local_path(back), 303)


# ---- rules ----------------------------------------------------------------------------------------


@router.endpoint("GET", "/projects/{project}/alert-rules", access=PROJECT_VIEW)
def rules_page(project: str, db: Db, now: Now, asker: Asker) -> Response:
    return views.rules_page(db, asker, project, now=now).response()


@dataclass(frozen=True)
class RuleForm:
    severity: Text = "warning"
    limit: Text = ""
    for_seconds: Text = "0"
    jobs: Text = "*"
    window: Text = ""
    runbook: Text = ""


Fields = Annotated[RuleForm, Depends()]


@router.endpoint("POST", "/projects/{project}/alert-rules", access=PROJECT_OPERATE)
def new_rule(
    project: str, db: Db, now: Now, asker: Asker, who: Who, form: Fields, name: Text = "", kind: Text = ""
) -> Response:
    return _save_rule(db, asker, project, name.strip(), form, now=now, who=who, kind=kind)


@router.endpoint("POST", "/projects/{project}/alert-rules/{rule}", access=PROJECT_OPERATE)
def change_rule(
    project: str, rule: str, db: Db, now: Now, asker: Asker, who: Who, form: Fields, enabled: Text = ""
) -> Response:
    return _save_rule(db, asker, project, rule, form, now=now, who=who, enabled=bool(enabled))


def _save_rule(
    db: Database, asker: Principal, project: str, name: str, form: RuleForm, *, now: float, who: str,
    kind: str = "", enabled: bool = True,
) -> Response:  # fmt: skip
    """Change a rule; on a refusal, answer with the page and the reason."""
    try:
        changes = _rule_changes(rules.list_rules(db, project), name, kind, form, enabled)
        rules.change(db, project, name, changes, who=who, now=now)
    except UnknownProject:
        raise
    except RequestRefused as refusal:
        page = replace(views.rules_page(db, asker, project, now=now), refused=str(refusal), refused_rule=name)
        return page.response(refusal.status)
    return RedirectResponse(f"/projects/{project}/alert-rules#rule-{name}", 303)


def _rule_changes(known: list[AlertRule], name: str, kind: str, form: RuleForm, enabled: bool) -> RuleChanges:
    """Parse the form of a rule; its kind decides whether the limit is a duration or a number."""
    held = next((rule for rule in known if rule.name == name), None)
    unit = held.unit if held else KINDS[kind].unit if kind in KINDS else ""
    limit: float | UnsetType = UNSET
    if unit and (form.limit.strip() or held):
        limit = forms.seconds("limit", form.limit) if unit == "seconds" else forms.number("limit", form.limit)
    return RuleChanges(
        kind=UNSET if held else kind,
        enabled=enabled,
        severity=form.severity,
        limit=limit,
        window=round(forms.number("window", form.window)) if form.window.strip() else UNSET,
        for_seconds=forms.seconds("for_seconds", form.for_seconds),
        jobs=form.jobs.strip(),
        runbook=form.runbook,
    )


@router.endpoint("POST", "/projects/{project}/alert-rules/{rule}/remove", access=PROJECT_OPERATE)
def remove_rule(project: str, rule: str, db: Db, now: Now, who: Who) -> Response:
    rules.remove(db, project, rule, who=who, now=now)
    return RedirectResponse(f"/projects/{project}/alert-rules", 303)


# ---- channels -------------------------------------------------------------------------------------


@router.endpoint("GET", "/projects/{project}/alert-channels", access=PROJECT_ADMIN)
def channels_page(project: str, db: Db, now: Now, config: Config) -> Response:
    return views.channels_page(db, config, project, now).response()


@router.endpoint("POST", "/projects/{project}/alert-channels", access=PROJECT_ADMIN)
def new_channel(
    project: str,
    db: Db,
    now: Now,
    config: Config,
    who: Who,
    name: Text = "",
    target: Text = "",
    kind: Text = "",
    least_severity: Text = "warning",
    owner: Text = "",
    labels: Text = "",
) -> Response:
    typed = {"name": name, "target": target, "kind": kind, "owner": owner, "labels": labels}
    try:
        asked = channels.NewChannel(
            name=name, target=target, kind=kind, least_severity=least_severity, owner=owner,
            labels=routing.parse_labels(labels),
        )  # fmt: skip
        made = channels.create(db, config.alerts, project, asked, who=who, now=now)
    except UnknownProject:
        raise
    except RequestRefused as refusal:
        page = views.channels_page(db, config, project, now)
        return replace(page, refused=str(refusal), typed=typed).response(refusal.status)
    # no redirect: only this answer contains the secret
    return replace(views.channels_page(db, config, project, now), made=made).response()


@router.endpoint("POST", "/projects/{project}/alert-channels/{channel}", access=PROJECT_ADMIN)
def route_channel(
    project: str,
    channel: str,
    db: Db,
    now: Now,
    config: Config,
    who: Who,
    least_severity: Text = "warning",
    owner: Text = "",
    labels: Text = "",
) -> Response:
    try:
        changes = channels.ChannelChanges(
            least_severity=least_severity, owner=owner, labels=routing.parse_labels(labels)
        )
        channels.change(db, project, channel, changes, who=who, now=now)
    except InvalidSetting as refusal:
        page = views.channels_page(db, config, project, now)
        return replace(page, refused=str(refusal)).response(refusal.status)
    return RedirectResponse(f"/projects/{project}/alert-channels#channel-{channel}", 303)


@router.endpoint("POST", "/projects/{project}/alert-channels/{channel}/remove", access=PROJECT_ADMIN)
def remove_channel(project: str, channel: str, db: Db, now: Now, who: Who) -> Response:
    channels.remove(db, project, channel, who=who, now=now)
    return RedirectResponse(f"/projects/{project}/alert-channels", 303)


@router.endpoint("POST", "/projects/{project}/alert-channels/{channel}/test", access=PROJECT_ADMIN)
def test_channel(project: str, channel: str, db: Db, now: Now) -> Response:
    deliveries.send_test(db, project, channel, now=now)
    return RedirectResponse(f"/projects/{project}/alert-channels#channel-{channel}", 303)
