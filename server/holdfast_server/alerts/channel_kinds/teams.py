"""Workflows of Microsoft Teams that a webhook starts."""

from __future__ import annotations

import msgspec

from holdfast_server.alerts.channel_kinds.kind import HttpChannel, OutgoingMessage, register
from holdfast_server.alerts.messages import MAX_TEXT, details, headline, links

_COLORS = {"critical": "Attention", "warning": "Warning", "resolved": "Good"}


@register
class Teams(HttpChannel):
    name = "teams"
    title = "Microsoft Teams"
    target = "the URL of a workflow that begins with “When a Teams webhook request is received”"
    hosts = ("logic.azure.com", "api.powerplatform.com", "webhook.office.com")

    def body(self, outgoing: OutgoingMessage) -> bytes:
        """Return an adaptive card.

        Its text is in text runs, which Teams does not read as Markdown: the text of errors comes from users.
        """
        message = outgoing.message
        state = "resolved" if message.event == "resolved" else message.severity
        color = _COLORS.get(state, "Default")
        title = {"type": "TextRun", "text": headline(message), "weight": "Bolder", "color": color}
        text = {"type": "TextRun", "text": details(message)[:MAX_TEXT]}
        card: dict[str, object] = {
            "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
            "type": "AdaptiveCard",
            "version": "1.4",
            "body": [{"type": "RichTextBlock", "inlines": [run]} for run in (title, text)],
        }
        if actions := links(message, outgoing.address):
            card["actions"] = [{"type": "Action.OpenUrl", "title": one.title, "url": one.url} for one in actions]
        kind = "application/vnd.microsoft.card.adaptive"
        attachment = {"contentType": kind, "contentUrl": None, "content": card}
        return msgspec.json.encode({"type": "message", "attachments": [attachment]})
