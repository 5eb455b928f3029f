"""Responses on alerts, users, keys and the audit log."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Severity = Literal["info", "warning", "critical"]
AlertState = Literal["firing", "acknowledged", "silenced", "resolved"]
AlertFilter = Literal["open", "firing", "acknowledged", "silenced", "resolved", "all"]
"""Open: not resolved."""
DeliveryState = Literal["waiting", "delivered", "failed"]
LimitUnit = Literal[
    "seconds", "iterations", "gpu_hours", "times_budget", "checkpoints", "spreads", "percent", ""
]  # fmt: skip


ApprovalState = Literal["waiting", "approved", "declined", "expired"]


class AlertStep(Struct, kw_only=True, frozen=True):
    """One step in the history of an alert."""

    at: float
    state: Literal["began", "fired", "acknowledged", "silenced", "unsilenced", "comment", "sent", "resolved"]
    who: str | None = None
    """Person or key that acted; for a message, the name of its channel."""
    text: str = ""


class Alert(Struct, kw_only=True, frozen=True):
    """A violation of one rule by one job."""

    id: int
    project: str
    job: str
    rule: str
    kind: str
    title: str
    severity: Severity
    state: AlertState
    message: str
    value: float | None
    """Measured value when the alert fired, in the rule's unit."""
    iteration: int | None = None
    """Iteration at which the trouble began; `None` if the rule is not about one."""
    lineage: int | None = None
    """Lineage of that iteration."""
    last_good: str | None = None
    """Id of the checkpoint that it offers to restore; retention keeps it while the alert is open."""
    since: float
    """Start of the violation."""
    fired_at: float
    acknowledged_at: float | None = None
    acknowledged_by: str | None = None
    silenced_until: float | None = None
    silenced_by: str | None = None
    resolved_at: float | None = None
    resolved_why: str | None = None
    group_id: int | None = None
    """Number of the alert that opened its group: the alerts of a group are sent as one message."""
    comments: int = 0
    """Number of comments, in a list of alerts."""
    last_comment: AlertStep | None = None
    """The newest of them."""


class AlertDetails(Struct, kw_only=True, frozen=True):
    """An alert with its history."""

    alert: Alert
    runbook: str
    """URL of the runbook of its rule; empty if there is none."""
    steps: list[AlertStep]
    """Its history, oldest first."""
    group: list[Alert]
    """The other alerts of its group, which are sent in the same messages."""


class AlertRule(Struct, kw_only=True, frozen=True):
    """A condition that raises alerts."""

    project: str
    name: str
    kind: str
    title: str
    meaning: str
    """Meaning of the limit, as a sentence."""
    unit: LimitUnit
    """Unit of the limit; empty if the rule has none."""
    built_in: bool
    enabled: bool
    severity: Severity
    limit: float
    window: int = 0
    """Number of earlier iterations that a value is compared with; 0: the kind has no window."""
    for_seconds: float
    """Delay between the start of a violation and the alert."""
    jobs: str
    """Pattern of job names, with the wildcards * and ?."""
    runbook: str = ""
    """URL of its runbook; empty if there is none."""
    fired_7d: int = 0
    """Number of its alerts in the last 7 days, in a list of rules."""
    changed_at: float | None = None
    changed_by: str | None = None
    """User name; `None` for an unchanged built-in rule."""


class AlertChannel(Struct, kw_only=True, frozen=True):
    """Where alerts of a project are sent."""

    id: str
    project: str
    name: str
    kind: str
    """Service, such as `email`, `slack` or `webhook`."""
    target: str
    """Email addresses, or the host of the URL."""
    least_severity: Severity
    owner: str = ""
    """Pattern of the owners of jobs whose alerts it receives; empty for any."""
    labels: dict[str, str] = {}
    """Patterns of the labels of these jobs by name."""
    enabled: bool
    created_at: float
    created_by: str
    secret: str | None = None
    """Secret that signs a webhook's messages. Returned once, when the channel is created."""


class AlertDelivery(Struct, kw_only=True, frozen=True):
    """One message to one channel."""

    id: int
    event: str
    alert: int | None
    state: DeliveryState
    tries: int
    created_at: float
    next_at: float
    """Time of the next or last try."""
    ended_at: float | None = None
    error: str | None = None
    """Last error, without the recipient's response."""


class Token(Struct, kw_only=True, frozen=True):
    """An access key, without its secret part."""

    prefix: str
    name: str
    scopes: list[str]
    project: str | None
    job: str | None
    created_by: str
    created_at: float
    expires_at: float | None
    last_used_at: float | None
    revoked_at: float | None
    state: str
    """`works`, `expired` or `revoked`."""


class Person(Struct, kw_only=True, frozen=True):
    """A user."""

    name: str
    admin: bool
    roles: dict[str, str]
    """Roles by project."""
    signs_in_by: str
    """`password`, `identity provider`, or `link` if neither is set yet."""
    created_at: float
    signed_in_at: float | None


class NewToken(Struct, kw_only=True, frozen=True):
    """A new access key, which is returned once, and its listing."""

    token: str
    listed: Token


class Approval(Struct, kw_only=True, frozen=True):
    """A request about a protected job, which a second person must approve."""

    id: str
    job: str
    what: str
    """Action that an approval carries out, as in `restore 000000001200-1`."""
    who: str
    created_at: float
    expires_at: float
    state: ApprovalState
    decided_by: str | None = None
    decided_at: float | None = None


class AuditEntry(Struct, kw_only=True, frozen=True):
    """An entry of the audit log."""

    id: int
    at: float
    who: str
    action: str
    job: str | None
    project: str | None
    before: str | None
    """Previous values by name, as JSON."""
    after: str | None
    request_id: str
    digest: str
    """Hexadecimal digest of this entry and the previous digest."""
