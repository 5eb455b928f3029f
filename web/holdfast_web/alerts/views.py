"""Views of the alert pages: alerts, rules, channels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from typing import ClassVar
from urllib.parse import urlencode

from holdfast.protocol.administration import Alert, AlertChannel, AlertDelivery, AlertFilter, AlertRule, AlertStep
from holdfast.units import duration
from holdfast_server.alerts import channels, deliveries, incidents, routing, rules
from holdfast_server.alerts.channel_kinds.kind import ChannelKind, channel_kinds
from holdfast_server.alerts.conditions import KINDS, SEVERITIES, RuleKind
from holdfast_server.core.principal import Principal, Role
from holdfast_server.core.settings import ServerSettings
from holdfast_server.db import Database
from holdfast_web.shared import forms
from holdfast_web.shared.render import View

ALERTS_SHOWN, DELIVERIES_SHOWN = 100, 8
CHANNEL_FIELDS = ("name", "target", "kind", "owner", "labels")
"""Fields of the form of a new channel whose text a refusal keeps."""
SILENCES = ((3600, "1 hour"), (8 * 3600, "8 hours"), (86400, "1 day"), (7 * 86400, "1 week"))
UNITS = {
    "seconds": "time",
    "iterations": "iterations",
    "gpu_hours": "GPU-hours",
    "times_budget": "times the budget",
    "checkpoints": "checkpoints",
    "spreads": "× usual noise",
    "percent": "%",
    "": "",
}


STATES: dict[AlertFilter, str] = {
    "open": "Open",
    "firing": "Firing",
    "acknowledged": "Acknowledged",
    "silenced": "Silenced",
    "resolved": "Resolved",
    "all": "Open and resolved",
}
GROUPINGS = {"rule": "By rule", "job": "By job"}


@dataclass(frozen=True, kw_only=True)
class AlertQuery:
    """The filters of the page of alerts."""

    state: AlertFilter = "open"
    group: str = "rule"
    """What alerts are grouped by: a key of `GROUPINGS`."""
    project: str = ""
    severity: str = ""
    rule: str = ""
    label: str = ""
    """Labels of the job that all match, separated by commas."""
    search: str = ""
    """A part of the name of the job."""

    @property
    def narrowed(self) -> bool:
        filters = (self.severity, self.rule, self.label, self.search, self.project)
        return any(filters) or self.state not in ("open", "all")

    @property
    def address(self) -> str:
        defaults = {field.name: field.default for field in fields(self)}
        asked = {name: value for name, value in asdict(self).items() if value != defaults[name]}
        return f"/alerts?{urlencode(asked)}" if asked else "/alerts"


@dataclass(frozen=True, kw_only=True)
class AlertRows(View):
    """The list of alerts, refreshed while the page is open."""

    template: ClassVar[str] = "alerts/alerts_live.html"
    page_template: ClassVar[str] = "alerts/alerts.html"
    alerts: list[Alert]
    question: AlertQuery
    groups: list[list[Alert]]
    """The same alerts by severity and title, most severe first, or by job."""
    severities: tuple[str, ...] = SEVERITIES
    states: dict[AlertFilter, str] = field(default_factory=lambda: STATES)
    groupings: dict[str, str] = field(default_factory=lambda: GROUPINGS)
    older: int | None
    """The alert before which the next page starts; None on the last page."""
    now: float
    silences: tuple[tuple[int, str], ...] = SILENCES
    back: str = "/alerts"
    projects: list[str] = field(default_factory=list)
    """Choices of the project filter; only on the full page."""
    rules: dict[str, str] = field(default_factory=dict)
    """Titles of the choices of the rule filter; only on the full page."""


@dataclass(frozen=True, kw_only=True)
class AlertPage(View):
    """The page of one alert."""

    template: ClassVar[str] = "alerts/alert_live.html"
    page_template: ClassVar[str] = "alerts/alert.html"
    alert: Alert
    runbook: str
    steps: list[AlertStep]
    group: list[Alert]
    """The other alerts of its group."""
    open_group: list[Alert]
    """Those that fire."""
    back: str
    now: float
    silences: tuple[tuple[int, str], ...] = SILENCES
    refused: str = ""
    typed: str = ""


@dataclass(frozen=True, kw_only=True)
class RulesPage(View):
    template: ClassVar[str] = "alerts/rules.html"
    project: str
    rules: list[AlertRule]
    limits: dict[str, str]
    """The text of the limit field, by rule."""
    delays: dict[str, str]
    """The text of the delay field, by rule."""
    kinds: list[RuleKind]
    severities: tuple[str, ...] = SEVERITIES
    units: dict[str, str] = field(default_factory=lambda: UNITS)
    may_change: bool
    sees_channels: bool
    refused: str = ""
    refused_rule: str = ""


@dataclass(frozen=True, kw_only=True)
class ChannelLog:
    channel: AlertChannel
    labels: str
    """The text of the field of its labels."""
    deliveries: list[AlertDelivery]
    poll_seconds: int | None
    """When the page asks again about messages that wait: after their age, so that the times double; or `None`."""


@dataclass(frozen=True, kw_only=True)
class ChannelsPage(View):
    template: ClassVar[str] = "alerts/channels.html"
    project: str
    channels: list[ChannelLog]
    severities: tuple[str, ...] = SEVERITIES
    services: Mapping[str, ChannelKind] = field(default_factory=channel_kinds)
    mail: bool
    webhooks: bool
    links: bool
    """Whether messages have links: the server knows its own address."""
    now: float
    made: AlertChannel | None = None
    """A new channel with its secret, which is shown once."""
    refused: str = ""
    typed: dict[str, str] = field(default_factory=lambda: dict.fromkeys(CHANNEL_FIELDS, ""))


def alert_rows(
    db: Database, asker: Principal, question: AlertQuery, *, now: float, before: int | None
) -> AlertRows:
    found = incidents.list_alerts(
        db,
        now=now,
        visible_projects=asker.visible_projects,
        project=question.project or None,
        state=question.state,
        severity=question.severity or None,
        rule=question.rule or None,
        labels=forms.labels(question.label),
        search=question.search,
        before=before,
        limit=ALERTS_SHOWN + 1,
    )
    shown = found[:ALERTS_SHOWN]
    older = shown[-1].id if len(found) > len(shown) else None
    return AlertRows(alerts=shown, question=question, groups=_groups(shown, question.group), older=older, now=now)


def _groups(alerts: list[Alert], by: str) -> list[list[Alert]]:
    def key(alert: Alert) -> tuple[int, str]:
        return (0, alert.job) if by == "job" else (-SEVERITIES.index(alert.severity), alert.title)

    return [list(group) for _, group in groupby(sorted(alerts, key=key), key)]


def alert_page(db: Database, asker: Principal, alert: int, *, now: float) -> AlertPage:
    """Raises UnknownAlert."""
    found = incidents.details(db, alert, visible_projects=asker.visible_projects, now=now)
    return AlertPage(
        alert=found.alert,
        runbook=found.runbook,
        steps=found.steps,
        group=found.group,
        open_group=[other for other in found.group if other.state == "firing"],
        back=f"/alerts/{alert}",
        now=now,
    )


def rules_page(db: Database, asker: Principal, project: str, *, now: float) -> RulesPage:
    role = asker.role_in(project) or 0
    found = rules.list_rules(db, project, now=now)
    return RulesPage(
        project=project,
        rules=found,
        limits={rule.name: _field_text(rule.limit, rule.unit) for rule in found},
        delays={rule.name: _field_text(rule.for_seconds, "seconds") for rule in found},
        kinds=list(KINDS.values()),
        may_change=role >= Role.operator,
        sees_channels=role >= Role.admin,
    )


def _field_text(value: float, unit: str) -> str:
    return duration(value) if unit == "seconds" else f"{value:.6g}"


def channels_page(db: Database, settings: ServerSettings, project: str, now: float) -> ChannelsPage:
    logs = []
    for channel in channels.list_channels(db, project):
        sent = deliveries.list_deliveries(db, project, channel.id, limit=DELIVERIES_SHOWN)
        ages = [now - each.created_at for each in sent if each.state == "waiting"]
        logs.append(
            ChannelLog(
                channel=channel,
                labels=routing.shown_labels(channel.labels),
                deliveries=sent,
                poll_seconds=int(max(2, min(*ages, 30))) if ages else None,
            )
        )
    return ChannelsPage(
        project=project, channels=logs, mail=bool(settings.alerts.smtp_host), webhooks=settings.alerts.webhooks,
        links=bool(settings.address), now=now,
    )  # fmt: skip
