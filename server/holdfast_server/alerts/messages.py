"""What is told of an alert, in the form that each kind of channel understands. Pure functions."""

from __future__ import annotations

import hashlib
import hmac
from email.message import EmailMessage
from typing import Literal
from urllib.parse import quote

import msgspec

from holdfast.protocol.administration import Alert
from holdfast_server.core.encoding import to_json

Event = Literal["firing", "resolved", "test"]
MAX_TEXT = 1500
"""Discord takes no message of more than 2,000 characters."""


class Told(msgspec.Struct, kw_only=True, frozen=True):
    """One message, as it is written down until it has arrived."""

    event: Event
    project: str
    alert: Alert | None = None
    """None: a test."""


def headline(told: Told) -> str:
    if told.alert is None:
        return f"A test from Holdfast, project {told.project}"
    state = "resolved" if told.event == "resolved" else told.alert.severity
    return f"[{state}] {told.alert.job}: {told.alert.title}"


def details(told: Told) -> str:
    alert = told.alert
    if alert is None:
        return "Alerts of this project arrive here."
    return (
        f"{alert.resolved_why or 'It is over'} (it was: {alert.message})"
        if told.event == "resolved"
        else alert.message
    )


def link(told: Told, address: str) -> str:
    if not address:
        return ""
    return f"{address}/jobs/{quote(told.alert.job)}" if told.alert else f"{address}/alerts"


def as_text(told: Told, address: str) -> str:
    lines = (headline(told), details(told)[:MAX_TEXT], link(told, address))
    return "\n".join(line for line in lines if line)


def as_webhook(told: Told, delivery: int, address: str) -> bytes:
    return to_json(
        {
            "event": told.event,
            "delivery": delivery,
            "project": told.project,
            "text": as_text(told, address),
            "url": link(told, address) or None,
            "alert": told.alert,
        }
    )


def as_slack(told: Told, address: str) -> bytes:
    text = as_text(told, address)
    for character, written in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(character, written)
    return msgspec.json.encode({"text": text})


def as_discord(told: Told, address: str) -> bytes:
    # Nobody is called by a name that somebody gave to a job or wrote into an error.
    return msgspec.json.encode({"content": as_text(told, address), "allowed_mentions": {"parse": []}})


def as_mail(told: Told, *, sender: str, recipients: list[str], address: str, delivery: int) -> EmailMessage:
    mail = EmailMessage()
    mail["Subject"] = " ".join(headline(told).split())
    mail["From"], mail["To"] = sender, ", ".join(recipients)
    mail["Auto-Submitted"], mail["X-Holdfast-Delivery"] = "auto-generated", str(delivery)
    mail.set_content(as_text(told, address) + "\n")
    return mail


def signed(body: bytes, secret: str, *, delivery: int, now: float) -> dict[str, str]:
    """The headers of a webhook. Whoever checks them compares `signature(body, secret, timestamp)` and the time."""
    timestamp = str(int(now))
    return {
        "Content-Type": "application/json",
        "User-Agent": "holdfast",
        "X-Holdfast-Delivery": str(delivery),
        "X-Holdfast-Timestamp": timestamp,
        "X-Holdfast-Signature": f"v1={signature(body, secret, timestamp)}",
    }


def signature(body: bytes, secret: str, timestamp: str) -> str:
    """HMAC-SHA256 of `timestamp.body`, in hexadecimal."""
    return hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()
