"""What the pages of alerts, of rules and of channels show."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from holdfast.answers import Alert, AlertChannel, AlertDelivery, AlertRule
from holdfast.pacing.policy import duration
from holdfast_server.alerts.kinds import KINDS, SEVERITIES, Kind
from holdfast_web.render import View

SHOWN = 100
SILENCES = ((3600, "1 hour"), (8 * 3600, "8 hours"), (86400, "1 day"), (7 * 86400, "1 week"))
UNITS = {
    "seconds": "of time",
    "iterations": "iterations",
    "gpu_hours": "GPU-hours",
    "times_budget": "times the budget",
    "checkpoints": "checkpoints",
    "": "",
}


@dataclass(frozen=True, kw_only=True)
class AlertRows(View):
    """What changes by itself while the page is open."""

    template: ClassVar[str] = "alerts_live.html"
    alerts: list[Alert]
    history: bool
    """Those that have resolved are shown too."""
    project: str
    older: int | None
    """The number to go on from, where there are more."""
    now: float
    silences: tuple[tuple[int, str], ...] = SILENCES
    back: str = "/alerts"


@dataclass(frozen=True, kw_only=True)
class AlertsPage(AlertRows):
    template: ClassVar[str] = "alerts.html"
    projects: list[str]


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


def rules_page(project: str, rules: list[AlertRule], *, may_change: bool, sees_channels: bool) -> RulesPage:
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
