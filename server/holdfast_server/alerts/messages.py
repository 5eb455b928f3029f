"""Messages about alerts, and their text. Pure functions."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal
from urllib.parse import quote

import msgspec

from holdfast.protocol.administration import Alert
from holdfast.protocol.analyses import SAME_LOSSES
from holdfast.protocol.ids import parse_checkpoint_id

Event = Literal["firing", "resolved", "test"]
MAX_TEXT = 1500
"""Discord accepts at most 2,000 characters per message."""
NAMED_JOBS, LISTED_ALERTS = 5, 10
"""Jobs in the first line of a message about several, and alerts below it."""


class AlertMessage(msgspec.Struct, kw_only=True, frozen=True):
    """A message, as it is stored until it is delivered."""

    event: Event
    project: str
    alert: Alert | None = None
    """`None` for a test."""
    others: tuple[Alert, ...] = ()
    """Alerts of the same rule about other jobs, which the message is about as well."""
    verdict: str = ""
    """The verdict on the job with its next step, when the message about one alert is sent."""

    @property
    def alerts(self) -> tuple[Alert, ...]:
        return () if self.alert is None else (self.alert, *self.others)


def headline(message: AlertMessage) -> str:
    if message.alert is None:
        return f"Test message from Holdfast, project {message.project}"
    state = "resolved" if message.event == "resolved" else message.alert.severity
    if not message.others:
        return f"[{state}] {message.alert.job}: {message.alert.title}"
    jobs = sorted({alert.job for alert in message.alerts})
    since = datetime.fromtimestamp(min(alert.since for alert in message.alerts), UTC)
    named = ", ".join(jobs[:NAMED_JOBS]) + (" …" if len(jobs) > NAMED_JOBS else "")
    return (
        f"[{state}] {len(jobs)} jobs of {message.project}: {message.alert.title} since {since:%H:%M} UTC: {named}"
    )


def details(message: AlertMessage) -> str:
    if message.alert is None:
        return "This channel receives the alerts of the project."
    if not message.others:
        return "\n".join(filter(None, [_details(message, message.alert), message.verdict]))
    by_job = sorted(message.alerts, key=lambda alert: alert.job)
    lines = [f"{alert.job}: {_details(message, alert)}" for alert in by_job[:LISTED_ALERTS]]
    more = len(message.alerts) - LISTED_ALERTS
    return "\n".join([*lines, f"and {more} more"] if more > 0 else lines)


def _details(message: AlertMessage, alert: Alert) -> str:
    if message.event == "resolved":
        return f"{alert.resolved_why or 'Resolved'}; was: {alert.message}"
    if alert.last_good is None:
        return alert.message
    iteration, _ = parse_checkpoint_id(alert.last_good)
    good = f"Last good checkpoint before: iteration {iteration:,}"
    return f"{alert.message}. {good}; after a restore to it, {SAME_LOSSES}"


def link(message: AlertMessage, address: str) -> str:
    if not address:
        return ""
    if message.alert is None or message.others:
        return f"{address}/alerts"
    return f"{address}/jobs/{quote(message.alert.job)}"


def as_text(message: AlertMessage, address: str) -> str:
    lines = (headline(message), details(message)[:MAX_TEXT], link(message, address))
    return "\n".join(line for line in lines if line)
