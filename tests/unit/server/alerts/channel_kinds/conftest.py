from __future__ import annotations

import pytest

from holdfast.protocol.administration import Alert
from holdfast_server.alerts.channel_kinds.kind import OutgoingMessage
from holdfast_server.alerts.messages import AlertMessage


@pytest.fixture
def outgoing():
    """Make a message about one alert."""

    def make(text="loss is <nan> & rising @everyone", *, target="", secret="", address="https://h", others=0):
        alert = Alert(
            id=1, project="default", job="char-gpt", rule="loss_nan", kind="loss_nan", title="Loss not finite",
            severity="warning", state="firing", message=text, value=None, since=1.0, fired_at=2.0,
        )  # fmt: skip
        message = AlertMessage(event="firing", project="default", alert=alert, others=(alert,) * others)
        return OutgoingMessage(
            message=message, target=target, secret=secret, delivery=7, address=address, now=1000.0
        )

    return make
