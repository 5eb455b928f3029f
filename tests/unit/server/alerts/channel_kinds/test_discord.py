from __future__ import annotations

import json

import pytest

from holdfast_server.alerts.channel_kinds.discord import Discord
from holdfast_server.alerts.channel_kinds.kind import kind_for


@pytest.mark.parametrize("host", ["discord.com", "discordapp.com", "canary.discord.com"])
def test_its_webhooks_are_recognized(host):
    assert kind_for(f"https://{host}/api/webhooks/1/x").name == "discord"


def test_a_message_mentions_nobody_and_is_short_enough(outgoing):
    sent = json.loads(Discord().body(outgoing("@everyone " * 500, address="")))
    assert sent["allowed_mentions"] == {"parse": []}
    assert len(sent["content"]) < 2000
