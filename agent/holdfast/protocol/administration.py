"""Alerts, people, keys and the audit log."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Severity = Literal["info", "warning", "critical"]
AlertState = Literal["firing", "acknowledged", "silenced", "resolved"]
DeliveryState = Literal["waiting", "delivered", "failed"]
LimitUnit = Literal["seconds", "iterations", "gpu_hours", "times_budget", "checkpoints", ""]


class Alert(Struct, kw_only=True, frozen=True):
    """One rule that was broken by one job."""

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
    """When it fired, in the unit of its kind."""
    since: float
    """When it began to be so."""
    fired_at: float
    acknowledged_at: float | None = None
    acknowledged_by: str | None = None
    silenced_until: float | None = None
    silenced_by: str | None = None
    resolved_at: float | None = None
    resolved_why: str | None = None


class AlertRule(Struct, kw_only=True, frozen=True):
    """What somebody wants to be told of."""

    project: str
    name: str
    kind: str
    title: str
    meaning: str
    """Of the limit, in a sentence."""
    unit: LimitUnit
    """Of the limit; empty: it has none."""
    built_in: bool
    enabled: bool
    severity: Severity
    limit: float
    for_seconds: float
    """How long it has to be so before anybody is told."""
    jobs: str
    """Names of the jobs that it looks at, with * and ? for parts of them."""
    changed_at: float | None = None
    changed_by: str | None = None
    """None for a built-in rule as it came."""


class AlertChannel(Struct, kw_only=True, frozen=True):
    """Where alerts are sent."""

    id: str
    project: str
    name: str
    kind: str
    """email, webhook, slack or discord."""
    target: str
    """Of a URL the host alone."""
    least_severity: Severity
    enabled: bool
    created_at: float
    created_by: str
    secret: str | None = None
    """With which the messages of a webhook are signed. Told once, when the channel is made."""


class AlertDelivery(Struct, kw_only=True, frozen=True):
    """One message to one channel."""

    id: int
    event: str
    alert: int | None
    state: DeliveryState
    tries: int
    created_at: float
    next_at: float
    """When it is tried, or was last to be."""
    ended_at: float | None = None
    error: str | None = None
    """What went wrong last. What the other side answered is not in it."""


class TokenRow(Struct, kw_only=True, frozen=True):
    """A key as it is listed: all but the key."""

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


class PersonRow(Struct, kw_only=True, frozen=True):
    """Somebody who may sign in."""

    name: str
    admin: bool
    roles: dict[str, str]
    """By project."""
    signs_in_by: str
    """`password`, `identity provider`, or `link` where neither is set yet."""
    created_at: float
    signed_in_at: float | None


class NewToken(Struct, kw_only=True, frozen=True):
    """A key, told once, and how it is listed."""

    token: str
    listed: TokenRow


class AuditEntry(Struct, kw_only=True, frozen=True):
    """A row of the audit log: who changed what."""

    id: int
    at: float
    who: str
    action: str
    job: str | None
    project: str | None
    before: str | None
    """What it was, by name, in JSON."""
    after: str | None
    request_id: str
    digest: str
    """Seals this row and the one before it, in hexadecimal."""
