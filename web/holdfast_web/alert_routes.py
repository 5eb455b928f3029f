"""The pages of alerts: what fires, what is to be told, and to whom."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from fastapi import APIRouter, Path, Query
from fastapi.responses import RedirectResponse, Response

from holdfast.pacing.policy import duration
from holdfast.protocol.administration import Alert, AlertChannel, AlertDelivery, AlertRule
from holdfast.protocol.messages import MAX_INTEGER
from holdfast_server.alerts import channels, deliveries, incidents, rules
from holdfast_server.alerts.conditions import KINDS, SEVERITIES, Kind
from holdfast_server.alerts.errors import AlertOver
from holdfast_server.core.alert_settings import AlertSettings
from holdfast_server.core.errors import Refused, UnknownProject
from holdfast_server.core.principal import Principal, Role
from holdfast_server.core.request_id import request_id
from holdfast_server.db import Database
from holdfast_server.http.dependencies import Asker, Clock, Config, Db, Who
from holdfast_server.queries.fleet import projects_of
from holdfast_web import forms
from holdfast_web.pages import SILENCES
from holdfast_web.render import View
from holdfast_web.routing import Htmx, PageRoute, Text, local, status_of

LOG_SHOWN = 8
SHOWN = 100
UNITS = {
    "seconds": "of time",
    "iterations": "iterations",
    "gpu_hours": "GPU-hours",
    "times_budget": "times the budget",
    "checkpoints": "checkpoints",
    "": "",
}

Number = Annotated[int, Path(ge=0, le=MAX_INTEGER)]
Older = Annotated[int | None, Query(ge=0, le=MAX_INTEGER)]

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@dataclass(frozen=True, kw_only=True)
class AlertRows(View):
    """What changes by itself while the page is open."""

    template: ClassVar[str] = "alerts_live.html"
    page_template: ClassVar[str] = "alerts.html"
    alerts: list[Alert]
    history: bool
    """Those that have resolved are shown too."""
    project: str
    older: int | None
    """The number to go on from, where there are more."""
    now: float
    silences: tuple[tuple[int, str], ...] = SILENCES
    back: str = "/alerts"
    projects: list[str] = field(default_factory=list)
    """On the page: those to choose from."""


@dataclass(frozen=True, kw_only=True)
class RulesPage(View):
    template: ClassVar[str] = "alert_rules.html"
    project: str
    rules: list[AlertRule]
    limits: dict[str, str]
    """By rule, as it is typed into the field."""
    waits: dict[str, str]
    kinds: list[Kind]
    severities: tuple[str, ...] = SEVERITIES
    units: dict[str, str] = field(default_factory=lambda: UNITS)
    may_change: bool
    sees_channels: bool
    refused: str = ""
    about: str = ""
    """The name of the rule that was refused."""


@dataclass(frozen=True, kw_only=True)
class ChannelLog:
    channel: AlertChannel
    deliveries: list[AlertDelivery]


@dataclass(frozen=True, kw_only=True)
class ChannelsPage(View):
    template: ClassVar[str] = "alert_channels.html"
    project: str
    channels: list[ChannelLog]
    severities: tuple[str, ...] = SEVERITIES
    mail: bool
    webhooks: bool
    now: float
    made: AlertChannel | None = None
    """With the secret, which is shown once."""
    refused: str = ""
    typed: dict[str, str] = field(default_factory=lambda: {"name": "", "target": ""})


def _rules_page(project: str, rules: list[AlertRule], *, may_change: bool, sees_channels: bool) -> RulesPage:
    return RulesPage(
        project=project,
        rules=rules,
        limits={rule.name: _typed(rule.limit, rule.unit) for rule in rules},
        waits={rule.name: _typed(rule.for_seconds, "seconds") for rule in rules},
        kinds=list(KINDS.values()),
        may_change=may_change,
        sees_channels=sees_channels,
    )


def _typed(value: float, unit: str) -> str:
    return duration(value) if unit == "seconds" else f"{value:.6g}"


# ---- what fires -----------------------------------------------------------------------------------


async def _rows(
    db: Database, asker: Principal, now: float, *, state: str, project: str, before: int | None
) -> AlertRows:
    found = await incidents.listed(
        db,
        now=now,
        visible_projects=asker.visible_projects,
        project=project or None,
        open_only=state != "all",
        before=before,
        limit=SHOWN + 1,
    )
    shown = found[:SHOWN]
    older = shown[-1].id if len(found) > len(shown) else None
    return AlertRows(alerts=shown, history=state == "all", project=project, older=older, now=now)


@router.get("/alerts")
async def alerts_page(
    db: Db, clock: Clock, asker: Asker, state: str = "open", project: str = "", before: Older = None
) -> Response:
    rows = await _rows(db, asker, clock(), state=state, project=project, before=before)
    return replace(rows, projects=await projects_of(db, asker.visible_projects)).page()


@router.get("/alerts/live")
async def alerts_live(
    db: Db, clock: Clock, asker: Asker, state: str = "open", project: str = "", before: Older = None
) -> Response:
    return (await _rows(db, asker, clock(), state=state, project=project, before=before)).response()


@router.post("/jobs/{job}/alerts/{alert}/acknowledge")
async def acknowledge(
    job: str, alert: Number, db: Db, clock: Clock, who: Who, back: Text = "/alerts", htmx: Htmx = False
) -> Response:
    with suppress(AlertOver):  # it resolved while somebody looked: the page shows that
        await incidents.acknowledge(db, job, alert, who=who, request_id=request_id(), now=clock())
    return _done(back, htmx)


@router.post("/jobs/{job}/alerts/{alert}/silence")
async def silence(
    job: str,
    alert: Number,
    db: Db,
    clock: Clock,
    who: Who,
    seconds: Text = "3600",
    back: Text = "/alerts",
    htmx: Htmx = False,
) -> Response:
    now = clock()
    until = now + forms.seconds("silence", seconds)
    with suppress(AlertOver):  # it resolved while somebody looked: the page shows that
        await incidents.silence(db, job, alert, until=until, who=who, request_id=request_id(), now=now)
    return _done(back, htmx)


@router.post("/jobs/{job}/alerts/{alert}/unsilence")
async def unsilence(
    job: str, alert: Number, db: Db, clock: Clock, who: Who, back: Text = "/alerts", htmx: Htmx = False
) -> Response:
    with suppress(AlertOver):  # it resolved while somebody looked: the page shows that
        await incidents.unsilence(db, job, alert, who=who, request_id=request_id(), now=clock())
    return _done(back, htmx)


def _done(back: str, htmx: bool) -> Response:
    """The page asks for what is so now; without scripts it is loaded again."""
    if htmx:
        return Response(status_code=204, headers={"HX-Trigger": "holdfast:now"})
    return RedirectResponse(local(back), 303)


# ---- what is to be told ---------------------------------------------------------------------------


async def _rules(db: Database, asker: Principal, project: str) -> RulesPage:
    role = asker.role_in(project)
    return _rules_page(
        project,
        await rules.listed(db, project),
        may_change=role is not None and role >= Role.operator,
        sees_channels=role is not None and role >= Role.admin,
    )


@router.get("/projects/{project}/alert-rules")
async def rules_page(project: str, db: Db, asker: Asker) -> Response:
    return (await _rules(db, asker, project)).response()


@router.post("/projects/{project}/alert-rules")
async def new_rule(
    project: str,
    db: Db,
    clock: Clock,
    asker: Asker,
    who: Who,
    name: Text = "",
    kind: Text = "",
    severity: Text = "warning",
    limit: Text = "",
    for_seconds: Text = "0",
    jobs: Text = "*",
) -> Response:
    return await _changed(
        db, asker, project, name.strip(), kind, clock(), who, severity, limit, for_seconds, jobs, enabled=True
    )


@router.post("/projects/{project}/alert-rules/{rule}")
async def change_rule(
    project: str,
    rule: str,
    db: Db,
    clock: Clock,
    asker: Asker,
    who: Who,
    enabled: Text = "",
    severity: Text = "warning",
    limit: Text = "",
    for_seconds: Text = "0",
    jobs: Text = "*",
) -> Response:
    return await _changed(
        db, asker, project, rule, "", clock(), who, severity, limit, for_seconds, jobs, enabled=bool(enabled)
    )


async def _changed(
    db: Database, asker: Principal, project: str, name: str, kind: str, now: float, who: str,
    severity: str, limit: str, for_seconds: str, jobs: str, *, enabled: bool,
) -> Response:  # fmt: skip
    """The rules as they are now, or with why what was asked for was not done."""
    try:
        changes = forms.rule_changes(
            await rules.listed(db, project), name, kind,
            severity=severity, limit=limit, for_seconds=for_seconds, jobs=jobs, enabled=enabled,
        )  # fmt: skip
        await rules.change(db, project, name, changes, who=who, request_id=request_id(), now=now)
    except UnknownProject:
        raise
    except Refused as refusal:
        page = replace(await _rules(db, asker, project), refused=str(refusal), about=name)
        return page.response(status_of(refusal))
    return RedirectResponse(f"/projects/{project}/alert-rules#rule-{name}", 303)


@router.post("/projects/{project}/alert-rules/{rule}/remove")
async def remove_rule(project: str, rule: str, db: Db, clock: Clock, who: Who) -> Response:
    await rules.remove(db, project, rule, who=who, request_id=request_id(), now=clock())
    return RedirectResponse(f"/projects/{project}/alert-rules", 303)


# ---- to whom --------------------------------------------------------------------------------------


async def _channels(db: Database, settings: AlertSettings, project: str, now: float) -> ChannelsPage:
    logs = [
        ChannelLog(channel=channel, deliveries=await deliveries.log(db, project, channel.id, limit=LOG_SHOWN))
        for channel in await channels.listed(db, project)
    ]
    return ChannelsPage(
        project=project, channels=logs, mail=bool(settings.smtp_host), webhooks=settings.webhooks, now=now
    )


@router.get("/projects/{project}/alert-channels")
async def channels_page(project: str, db: Db, clock: Clock, config: Config) -> Response:
    return (await _channels(db, config.alerts, project, clock())).response()


@router.post("/projects/{project}/alert-channels")
async def new_channel(
    project: str,
    db: Db,
    clock: Clock,
    config: Config,
    who: Who,
    name: Text = "",
    target: Text = "",
    least_severity: Text = "warning",
) -> Response:
    now, typed = clock(), {"name": name, "target": target}
    asked = channels.NewChannel(name=name, target=target, least_severity=least_severity)
    try:
        made = await channels.create(db, config.alerts, project, asked, who=who, request_id=request_id(), now=now)
    except UnknownProject:
        raise
    except Refused as refusal:
        page = await _channels(db, config.alerts, project, now)
        return replace(page, refused=str(refusal), typed=typed).response(status_of(refusal))
    # No redirect: the secret is on this page and on no other.
    return replace(await _channels(db, config.alerts, project, now), made=made).response()


@router.post("/projects/{project}/alert-channels/{channel}/remove")
async def remove_channel(project: str, channel: str, db: Db, clock: Clock, who: Who) -> Response:
    await channels.remove(db, project, channel, who=who, request_id=request_id(), now=clock())
    return RedirectResponse(f"/projects/{project}/alert-channels", 303)


@router.post("/projects/{project}/alert-channels/{channel}/test")
async def test_channel(project: str, channel: str, db: Db, clock: Clock) -> Response:
    await deliveries.test(db, project, channel, now=clock())
    return RedirectResponse(f"/projects/{project}/alert-channels#channel-{channel}", 303)
