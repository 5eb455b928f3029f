"""Messages about alerts, and their text. Pure functions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal, get_args
from urllib.parse import quote

import msgspec

from holdfast.protocol.administration import Alert, Severity
from holdfast.protocol.analyses import SAME_LOSSES
from holdfast.protocol.ids import parse_checkpoint_id

_SEVERITIES: tuple[Severity, ...] = get_args(Severity)
Event = Literal["firing", "resolved", "test"]
MAX_TEXT = 1200
"""Discord accepts at most 2,000 characters per message."""
NAMED_JOBS, LISTED_ALERTS = 5, 10
"""Jobs in the first line of a message about several, and alerts below it."""


class AlertMessage(msgspec.Struct, kw_only=True, frozen=True):
    """A message about a group of alerts, as it is stored until it is delivered."""

    event: Event
    project: str
    group: int = 0
    """Number of the group: services that keep incidents have one for each."""
    opened: Alert | None = None
    """Alert by which a server without groups named the incident; `None` where the group names it."""
    alert: Alert | None = None
    """`None` for a test."""
    others: tuple[Alert, ...] = ()
    """Further alerts of the group."""
    effects: tuple[Alert, ...] = ()
    """Alerts that another one of the same job explains."""
    ended: tuple[str, ...] = ()
    """Jobs whose alerts of the group have resolved while others fire; of a test, jobs that the channel is for."""
    jobs: int = 0
    """Number of jobs that it is about; of a test, that the channel is for."""
    verdict: str = ""
    """The verdict on the job with its next step, when the message about one alert is sent."""
    runbook: str = ""
    """URL of what to do about alerts of the rule."""

    @property
    def alerts(self) -> tuple[Alert, ...]:
        return () if self.alert is None else (self.alert, *self.others)

    @property
    def severity(self) -> Severity:
        return max((alert.severity for alert in self.alerts), key=_SEVERITIES.index, default="info")

    def key(self, address: str) -> str:
        """Return the key by which a service with incidents recognizes the group, the same in all its messages."""
        about = f"group/{self.group}" if self.alert is not None else f"test/{self.project}"
        if self.opened is not None:
            about = f"{self.project}/{self.opened.job}/{self.opened.rule}/{self.opened.id}"
        return "holdfast-" + hashlib.sha256(f"{address}/{about}".encode()).hexdigest()


class Link(msgspec.Struct, frozen=True):
    title: str
    url: str


def headline(message: AlertMessage) -> str:
    if message.alert is None:
        return f"Test message from Holdfast, project {message.project}"
    state = "resolved" if message.event == "resolved" else message.severity
    if not message.others:
        return f"[{state}] {message.alert.job}: {message.alert.title}"
    jobs = sorted({alert.job for alert in message.alerts})
    since = datetime.fromtimestamp(min(alert.since for alert in message.alerts), UTC)
    count = max(message.jobs, len(jobs))
    return (
        f"[{state}] {count:,} job{'s' * (count != 1)} of {message.project}: {message.alert.title} "
        f"since {since:%H:%M} UTC: {_named(jobs)}"
    )


def details(message: AlertMessage) -> str:
    if message.alert is None:
        jobs = f"{message.jobs:,} job{'s' * (message.jobs != 1)} now" + ": " * bool(message.jobs)
        return f"This channel receives the alerts of {jobs}{_named(message.ended, message.jobs)}."
    ended = f"Resolved: {_named(message.ended)}" if message.ended else ""
    if not message.others:
        lines = [_details(message, message.alert), *_effects(message, message.alert.job), ended, message.verdict]
        return "\n".join(filter(None, lines))
    by_job = sorted(message.alerts, key=lambda alert: alert.job)
    lines = []
    for alert in by_job[:LISTED_ALERTS]:
        lines += [f"{alert.job}: {_details(message, alert)}", *_effects(message, alert.job)]
    more = max(message.jobs, len(message.alerts)) - LISTED_ALERTS
    return "\n".join(filter(None, [*lines, f"and {more} more" if more > 0 else "", ended]))


def _named(jobs: Sequence[str], count: int = 0) -> str:
    return ", ".join(jobs[:NAMED_JOBS]) + (" …" if max(len(jobs), count) > NAMED_JOBS else "")


def _effects(message: AlertMessage, job: str) -> list[str]:
    return [f"Effect: {alert.title}: {alert.message}" for alert in message.effects if alert.job == job]


def _details(message: AlertMessage, alert: Alert) -> str:
    if message.event == "resolved":
        return f"{alert.resolved_why or 'Resolved'}; was: {alert.message}"
    if alert.last_good is None:
        return alert.message
    iteration, _ = parse_checkpoint_id(alert.last_good)
    good = f"Last good checkpoint before: iteration {iteration:,}"
    return f"{alert.message}. {good}; after a restore to it, {SAME_LOSSES}"


def links(message: AlertMessage, address: str) -> list[Link]:
    """Return the links of a message: the page of the alert first, then its runbook."""
    if not address:
        return [Link("Runbook", message.runbook)] if message.runbook else []
    if message.alert is None:
        return [Link("Open alerts", f"{address}/alerts")]
    alert, page = message.alert, f"{address}/alerts/{message.alert.id}"
    found = [Link("Open alert", page)]
    if message.event == "firing":
        if alert.last_good is not None and not message.others:
            iteration, _ = parse_checkpoint_id(alert.last_good)
            restore = f"{address}/jobs/{quote(alert.job)}/restore?before={alert.iteration}"
            found.append(Link(f"Restore to {iteration:,}", restore))
        found.append(Link("Acknowledge", f"{page}#acknowledge"))
    if message.runbook:
        found.append(Link("Runbook", message.runbook))
    return found


def link(message: AlertMessage, address: str) -> str:
    """Return the page that a message is about; empty without the address of the server."""
    return links(message, address)[0].url if address else ""


def text_lines(message: AlertMessage) -> str:
    """Return a message without its links."""
    return "\n".join(filter(None, (headline(message), details(message)[:MAX_TEXT])))


def as_text(message: AlertMessage, address: str) -> str:
    return "\n".join([text_lines(message), *(f"{link.title}: {link.url}" for link in links(message, address))])
