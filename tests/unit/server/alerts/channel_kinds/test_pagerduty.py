from __future__ import annotations

import json

import pytest

from holdfast_server.alerts import deliveries, incidents
from holdfast_server.alerts.channel_kinds.kind import kind_for
from holdfast_server.alerts.channel_kinds.pagerduty import URL, PagerDuty
from holdfast_server.core.alert_settings import AlertSettings
from holdfast_server.core.errors import InvalidSetting

KEY = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize("target", [KEY, "https://events.eu.pagerduty.com/v2/enqueue#R0123"])
def test_its_keys_and_urls_are_recognized(target):
    assert kind_for(target).name == "pagerduty"


def test_a_key_is_stored_with_the_url_of_the_service_and_not_shown():
    stored = PagerDuty().parse_target(KEY, AlertSettings(webhooks=True))
    assert (stored, PagerDuty().shown(stored)) == (f"{URL}#{KEY}", "https://events.pagerduty.com/…")


def test_a_url_without_a_key_is_refused():
    with pytest.raises(InvalidSetting, match="integration key"):
        PagerDuty().parse_target(URL, AlertSettings(webhooks=True))


def test_a_message_about_many_jobs_is_within_the_limit_of_the_service(outgoing):
    many = outgoing("𝒳" * incidents.MAX_MESSAGE, target=f"{URL}#R0123", others=deliveries.MAX_GROUPED - 1)
    body = PagerDuty().body(many)
    assert len(body) <= 512_000
    sent = json.loads(body)
    assert (sent["routing_key"], sent["event_action"]) == ("R0123", "trigger")
    assert sent["payload"]["summary"].startswith("[warning] 1 job of default")
