"""Webhooks of Discord."""

from __future__ import annotations

import msgspec

from holdfast_server.alerts.channel_kinds.kind import HttpChannel, OutgoingMessage, register
from holdfast_server.alerts.messages import as_text


@register
class Discord(HttpChannel):
    name = "discord"
    title = "Discord"
    target = "the URL of an incoming webhook"
    hosts = ("discord.com", "discordapp.com")

    def body(self, outgoing: OutgoingMessage) -> bytes:
        # Disable mentions: the names of jobs and the text of errors come from users.
        text = as_text(outgoing.message, outgoing.address)
        return msgspec.json.encode({"content": text, "allowed_mentions": {"parse": []}})
