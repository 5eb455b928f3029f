from __future__ import annotations

import json
from dataclasses import replace

import pytest
from msgspec import structs

from holdfast_server.alerts.channel_kinds.kind import kind_for
from holdfast_server.alerts.channel_kinds.opsgenie import MAX_MESSAGE, URL, Opsgenie
from holdfast_server.core.alert_settings import AlertSettings
from holdfast_server.core.errors import InvalidSetting

KEY = "01234567-89ab-cdef-0123-456789abcdef"


@pytest.mark.parametrize("target", [KEY, f"https://api.eu.opsgenie.com/v2/alerts#{KEY}"])
def test_its_keys_and_urls_are_recognized(target):
    assert kind_for(target).name == "opsgenie"


def test_a_key_is_stored_with_the_url_of_the_service_and_not_shown():
    stored = Opsgenie().parse_target(KEY, AlertSettings(webhooks=True))
    assert (stored, Opsgenie().shown(stored)) == (f"{URL}#{KEY}", "https://api.opsgenie.com/…")


@pytest.mark.parametrize("target", [URL, f"{URL}#a%0d%0ab", f"{URL}#a b"])
def test_a_url_without_a_key_that_is_a_header_is_refused(target):
    with pytest.raises(InvalidSetting, match=r"key of an API integration|URL"):
        Opsgenie().parse_target(target, AlertSettings(webhooks=True))


def test_the_end_of_a_group_closes_the_alert_that_its_alias_names(outgoing):
    opened = outgoing("x" * 1000, target=f"{URL}#{KEY}")
    closed = replace(opened, message=structs.replace(opened.message, event="resolved"))
    body = json.loads(Opsgenie().body(opened))
    assert (len(body["message"]) <= MAX_MESSAGE, body["priority"]) == (True, "P3")
    assert Opsgenie().url(opened) == URL
    assert Opsgenie().url(closed) == f"{URL}/{body['alias']}/close?identifierType=alias"
    assert json.loads(Opsgenie().body(closed)).keys() == {"source", "note"}
