"""Incoming webhooks of Slack."""

from __future__ import annotations

import msgspec

from holdfast_server.alerts.channel_kinds.kind import HttpChannel, OutgoingMessage, register
from holdfast_server.alerts.messages import as_text


@register
class Slack(HttpChannel):
    name = "slack"
    title = "Slack"
    target = "the URL of an incoming webhook"
    hosts = ("hooks.slack.com",)

    def body(self, outgoing: OutgoingMessage) -> bytes:
        text = as_text(outgoing.message, outgoing.address)
        for character, written in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
            text = text.replace(character, written)
        return msgspec.json.encode({"text": text})
