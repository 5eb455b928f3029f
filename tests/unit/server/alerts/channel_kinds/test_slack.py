from __future__ import annotations

import json

from holdfast_server.alerts.channel_kinds.kind import kind_for
from holdfast_server.alerts.channel_kinds.slack import Slack


def test_its_webhooks_are_recognized_and_those_of_similar_hosts_are_not():
    assert kind_for("https://hooks.slack.com/services/x").name == "slack"
    assert kind_for("https://hooks.slack.com.example.org/services/x").name == "webhook"
    assert kind_for("https://my-hooks.slack.com/x").name == "webhook"


def test_what_slack_reads_as_markup_is_escaped(outgoing):
    assert json.loads(Slack().body(outgoing())) == {
        "text": "[warning] char-gpt: Loss not finite\nloss is &lt;nan&gt; &amp; rising @everyone\n"
        "<https://h/alerts/1|Open alert> · <https://h/alerts/1#acknowledge|Acknowledge>"
    }
