"""Incoming webhooks of Slack."""

from __future__ import annotations

import msgspec

from holdfast_server.alerts.channel_kinds.kind import HttpChannel, OutgoingMessage, register
from holdfast_server.alerts.messages import links, text_lines


@register
class Slack(HttpChannel):
    name = "slack"
    title = "Slack"
    target = "the URL of an incoming webhook"
    hosts = ("hooks.slack.com",)

    def body(self, outgoing: OutgoingMessage) -> bytes:
        shown = (f"<{_escaped(link.url)}|{link.title}>" for link in links(outgoing.message, outgoing.address))
        lines = (_escaped(text_lines(outgoing.message)), " · ".join(shown))
        return msgspec.json.encode({"text": "\n".join(filter(None, lines))})


def _escaped(text: str) -> str:
    for character, written in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(character, written)
    return text
