from __future__ import annotations

import hashlib
import hmac
import json

import pytest

from holdfast_server.alerts.channel_kinds.kind import kind_for
from holdfast_server.alerts.channel_kinds.webhook import Webhook


@pytest.mark.parametrize("target", ["https://hooks.example.org/", "https://[bad/", "anything"])
def test_other_targets_count_as_webhooks(target):
    assert kind_for(target).name == "webhook"


def test_the_signature_covers_the_time_and_the_body(outgoing):
    message = outgoing(secret="s3cret")
    body = Webhook().body(message)
    headers = Webhook().headers(message, body)
    wanted = hmac.new(b"s3cret", b"1000." + body, hashlib.sha256).hexdigest()
    assert headers["X-Holdfast-Signature"] == f"v1={wanted}"
    assert (headers["X-Holdfast-Timestamp"], headers["X-Holdfast-Delivery"]) == ("1000", "7")
    assert (json.loads(body)["delivery"], json.loads(body)["url"]) == (7, "https://h/alerts/1")
