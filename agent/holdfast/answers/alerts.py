"""What fires, what is told, and to whom."""

from __future__ import annotations

import msgspec


class Alert(msgspec.Struct, kw_only=True, frozen=True):
    """One rule that was broken by one job."""

    id: int
    project: str = ""
    job: str
    rule: str = ""
    kind: str
    title: str = ""
    severity: str = ""
    state: str
    message: str = ""
    value: float | None = None
    """When it fired, in the unit of its kind."""
    since: float = 0.0
    """When it began to be so."""
    fired_at: float = 0.0
    acknowledged_at: float | None = None
    acknowledged_by: str | None = None
    silenced_until: float | None = None
    silenced_by: str | None = None
    resolved_at: float | None = None
    resolved_why: str | None = None


class AlertRule(msgspec.Struct, kw_only=True, frozen=True):
    """What somebody wants to be told of."""

    project: str = ""
    name: str = ""
    kind: str
    title: str = ""
    meaning: str = ""
    """Of the limit, in a sentence."""
    unit: str = ""
    """Of the limit; empty: it has none."""
    built_in: bool = False
    enabled: bool = False
    severity: str = ""
    limit: float = 0.0
    for_seconds: float = 0.0
    """How long it has to be so before anybody is told."""
    jobs: str = ""
    """Names of the jobs that it looks at, with * and ? for parts of them."""
    changed_at: float | None = None
    changed_by: str | None = None
    """None for a built-in rule as it came."""


class AlertChannel(msgspec.Struct, kw_only=True, frozen=True):
    """Where alerts are sent."""

    id: str
    project: str = ""
    name: str = ""
    kind: str
    """email, webhook, slack or discord."""
    target: str = ""
    """Of a URL the host alone."""
    least_severity: str = ""
    enabled: bool = False
    created_at: float = 0.0
    created_by: str = ""
    secret: str | None = None
    """With which the messages of a webhook are signed. Told once, when the channel is made."""


class AlertDelivery(msgspec.Struct, kw_only=True, frozen=True):
    """One message to one channel."""

    id: int
    event: str = ""
    alert: int | None = None
    state: str
    tries: int = 0
    created_at: float = 0.0
    next_at: float = 0.0
    """When it is tried, or was last to be."""
    ended_at: float | None = None
    error: str | None = None
    """What went wrong last. What the other side answered is not in it."""
