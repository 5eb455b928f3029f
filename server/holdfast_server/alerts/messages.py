"""Messages about alerts, in the format of each kind of channel. Pure functions."""

from __future__ import annotations

import hashlib
import hmac
from datetime import UTC, datetime
from email.message import EmailMessage
from typing import Literal
from urllib.parse import quote

import msgspec

from holdfast.protocol.administration import Alert
from holdfast.protocol.analyses import SAME_LOSSES
from holdfast.protocol.ids import parse_checkpoint_id
from holdfast_server.core.encoding import to_json

Event = Literal["firing", "resolved", "test"]
MAX_TEXT = 1500
"""Discord accepts at most 2,000 characters per message."""
NAMED_JOBS, LISTED_ALERTS = 5, 10
"""Jobs in the first line of a message about several, and alerts below it."""
MAX_SUMMARY, MAX_DETAILED = 1024, 50
"""Limits of PagerDuty: characters of a summary, and alerts of which 512 kB hold all fields."""
_TEAMS_COLORS = {"critical": "Attention", "warning": "Warning", "resolved": "Good"}


class AlertMessage(msgspec.Struct, kw_only=True, frozen=True):
    """A message, as it is stored until it is delivered."""

    event: Event
    project: str
    alert: Alert | None = None
    """`None` for a test."""
    others: tuple[Alert, ...] = ()
    """Alerts of the same rule about other jobs, which the message is about as well."""

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
        return _details(message, message.alert)
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


def as_webhook(message: AlertMessage, delivery: int, address: str) -> bytes:
    return to_json(
        {
            "event": message.event,
            "delivery": delivery,
            "project": message.project,
            "text": as_text(message, address),
            "url": link(message, address) or None,
            "alert": message.alert,
            "alerts": message.alerts,
        }
    )


def as_slack(message: AlertMessage, address: str) -> bytes:
    text = as_text(message, address)
    for character, written in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(character, written)
    return msgspec.json.encode({"text": text})


def as_discord(message: AlertMessage, address: str) -> bytes:
    # Disable mentions: the names of jobs and the text of errors come from users.
    return msgspec.json.encode({"content": as_text(message, address), "allowed_mentions": {"parse": []}})


def as_teams(message: AlertMessage, address: str) -> bytes:
    """Return an adaptive card for a Teams workflow that a webhook starts.

    Its text is in text runs, which Teams does not read as Markdown: the text of errors comes from users.
    """
    state = "resolved" if message.event == "resolved" else message.alert.severity if message.alert else "info"
    color = _TEAMS_COLORS.get(state, "Default")
    title = {"type": "TextRun", "text": headline(message), "weight": "Bolder", "color": color}
    text = {"type": "TextRun", "text": details(message)[:MAX_TEXT]}
    card: dict[str, object] = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": [{"type": "RichTextBlock", "inlines": [run]} for run in (title, text)],
    }
    if url := link(message, address):
        card["actions"] = [{"type": "Action.OpenUrl", "title": "Open in Holdfast", "url": url}]
    attachment = {"contentType": "application/vnd.microsoft.card.adaptive", "contentUrl": None, "content": card}
    return msgspec.json.encode({"type": "message", "attachments": [attachment]})


def as_pagerduty(message: AlertMessage, address: str, *, routing_key: str, now: float) -> bytes:
    """Return an event of PagerDuty's Events API v2.

    A message has one incident, named by its first alert; the end of its last alert resolves it.
    """
    alert, url = message.alert, link(message, address)
    about = ("test", message.project) if alert is None else (message.project, alert.job, alert.rule, str(alert.id))
    key = hashlib.sha256("/".join((address, *about)).encode()).hexdigest()
    event: dict[str, object] = {
        "routing_key": routing_key,
        "event_action": "resolve" if message.event == "resolved" else "trigger",
        "dedup_key": f"holdfast-{key}",
    }
    if message.event != "resolved":
        event["payload"] = {
            "summary": f"{headline(message)}: {details(message)}"[:MAX_SUMMARY],
            "source": alert.job if alert and not message.others else message.project,
            "severity": alert.severity if alert else "info",
            "timestamp": datetime.fromtimestamp(alert.fired_at if alert else now, UTC).isoformat(),
            "group": message.project,
            "class": alert.rule if alert else "test",
            "custom_details": message.alerts[:MAX_DETAILED] if message.others else alert,
        }
        event |= {"client": "Holdfast"} | ({"client_url": url} if url else {})
    return to_json(event)


def as_mail(
    message: AlertMessage, *, sender: str, recipients: list[str], address: str, delivery: int
) -> EmailMessage:
    mail = EmailMessage()
    mail["Subject"] = " ".join(headline(message).split())
    mail["From"], mail["To"] = sender, ", ".join(recipients)
    mail["Auto-Submitted"], mail["X-Holdfast-Delivery"] = "auto-generated", str(delivery)
    mail.set_content(as_text(message, address) + "\n")
    return mail


def signed(body: bytes, secret: str, *, delivery: int, now: float) -> dict[str, str]:
    """Return the headers of a webhook. A receiver checks the signature and the timestamp."""
    timestamp = str(int(now))
    return {
        "Content-Type": "application/json",
        "User-Agent": "holdfast",
        "X-Holdfast-Delivery": str(delivery),
        "X-Holdfast-Timestamp": timestamp,
        "X-Holdfast-Signature": f"v1={signature(body, secret, timestamp)}",
    }


def signature(body: bytes, secret: str, timestamp: str) -> str:
    """Return the HMAC-SHA256 of `timestamp.body` in hexadecimal."""
    return hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()
