"""The Events API v2 of PagerDuty."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from urllib.parse import urlsplit

from holdfast_server.alerts.channel_kinds.kind import HttpChannel, OutgoingMessage, register
from holdfast_server.alerts.messages import details, headline, links
from holdfast_server.core.alert_settings import AlertSettings
from holdfast_server.core.encoding import to_json
from holdfast_server.core.errors import InvalidSetting

URL = "https://events.pagerduty.com/v2/enqueue"
MAX_SUMMARY, MAX_DETAILED = 1024, 50
"""Limits of PagerDuty: characters of a summary, and alerts of which 512 kB hold all fields."""
_INTEGRATION_KEY = re.compile(r"[A-Za-z0-9]{32}")


@register
class PagerDuty(HttpChannel):
    """A group of alerts is one incident, which the end of its last alert resolves."""

    name = "pagerduty"
    title = "PagerDuty"
    target = (
        "the integration key of a service (Events API v2); in the EU, "
        "https://events.eu.pagerduty.com/v2/enqueue#KEY"
    )
    hosts = ("events.pagerduty.com", "events.eu.pagerduty.com")
    has_incidents = True

    def recognizes(self, target: str) -> bool:
        return _INTEGRATION_KEY.fullmatch(target) is not None or super().recognizes(target)

    def parse_target(self, target: str, settings: AlertSettings) -> str:
        url = super().parse_target(f"{URL}#{target}" if _INTEGRATION_KEY.fullmatch(target) else target, settings)
        if not urlsplit(url).fragment:
            reason = f"give the integration key of PagerDuty (Events API v2), or a URL with it: {URL}#KEY"
            raise InvalidSetting("target", reason)
        return url

    def body(self, outgoing: OutgoingMessage) -> bytes:
        message, address = outgoing.message, outgoing.address
        alert, shown = message.alert, links(message, address)
        event: dict[str, object] = {
            "routing_key": urlsplit(outgoing.target).fragment,
            "event_action": "resolve" if message.event == "resolved" else "trigger",
            "dedup_key": message.key(address),
        }
        if message.event != "resolved":
            event["payload"] = {
                "summary": f"{headline(message)}: {details(message)}"[:MAX_SUMMARY],
                "source": alert.job if alert and not message.others else message.project,
                "severity": message.severity,
                "timestamp": datetime.fromtimestamp(alert.fired_at if alert else outgoing.now, UTC).isoformat(),
                "group": message.project,
                "class": alert.rule if alert else "test",
                "custom_details": message.alerts[:MAX_DETAILED] if message.others else alert,
            }
            event |= {"client": "Holdfast", "links": [{"href": one.url, "text": one.title} for one in shown]}
            event |= {"client_url": shown[0].url} if address else {}
        return to_json(event)
