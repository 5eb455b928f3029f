"""Webhooks of any program, which receive signed JSON."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from holdfast_server.alerts.channel_kinds.kind import HttpChannel, OutgoingMessage, register
from holdfast_server.alerts.messages import as_text, link
from holdfast_server.core.encoding import to_json


@register
class Webhook(HttpChannel):
    """The kind of targets that no other kind recognizes."""

    name = "webhook"
    title = "Webhook, signed JSON"
    target = "another URL; it receives signed JSON"
    signs = True

    def body(self, outgoing: OutgoingMessage) -> bytes:
        message = outgoing.message
        return to_json(
            {
                "event": message.event,
                "delivery": outgoing.delivery,
                "project": message.project,
                "text": as_text(message, outgoing.address),
                "url": link(message, outgoing.address) or None,
                "alert": message.alert,
                "alerts": message.alerts,
                "effects": message.effects,
                "group": message.key(outgoing.address),
                "runbook": message.runbook or None,
            }
        )

    def headers(self, outgoing: OutgoingMessage, body: bytes) -> Mapping[str, str]:
        """A receiver checks the signature and the timestamp."""
        timestamp = str(int(outgoing.now))
        return {
            **super().headers(outgoing, body),
            "X-Holdfast-Delivery": str(outgoing.delivery),
            "X-Holdfast-Timestamp": timestamp,
            "X-Holdfast-Signature": f"v1={signature(body, outgoing.secret, timestamp)}",
        }


def signature(body: bytes, secret: str, timestamp: str) -> str:
    """Return the HMAC-SHA256 of `timestamp.body` in hexadecimal."""
    return hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()
