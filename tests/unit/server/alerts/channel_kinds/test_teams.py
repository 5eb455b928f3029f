from __future__ import annotations

import json

import pytest

from holdfast_server.alerts.channel_kinds.kind import kind_for
from holdfast_server.alerts.channel_kinds.teams import Teams


@pytest.mark.parametrize(
    "url",
    [
        "https://prod-12.westeurope.logic.azure.com:443/workflows/x?sig=y",
        "https://default1a.2b.environment.api.powerplatform.com/powerautomate/automations/direct/x",
        "https://example.webhook.office.com/webhookb2/x",
    ],
)
def test_its_workflows_are_recognized(url):
    assert kind_for(url).name == "teams"


def test_an_adaptive_card_has_plain_text_and_a_link(outgoing):
    sent = json.loads(Teams().body(outgoing()))
    (attachment,) = sent["attachments"]
    assert (sent["type"], attachment["contentType"]) == ("message", "application/vnd.microsoft.card.adaptive")
    card = attachment["content"]
    assert (card["type"], card["actions"][0]["url"]) == ("AdaptiveCard", "https://h/alerts/1")
    title, text = (block["inlines"][0] for block in card["body"])
    assert (title["type"], title["text"], title["color"]) == (
        "TextRun", "[warning] char-gpt: Loss not finite", "Warning",
    )  # fmt: skip
    assert text["text"] == "loss is <nan> & rising @everyone"
