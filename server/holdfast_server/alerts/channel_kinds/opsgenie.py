"""The Alert API of Opsgenie, which Jira Service Management serves as well."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import quote, urlsplit

from holdfast_server.alerts.channel_kinds.kind import HttpChannel, OutgoingMessage, register
from holdfast_server.alerts.messages import as_text, headline
from holdfast_server.core.alert_settings import AlertSettings
from holdfast_server.core.encoding import to_json
from holdfast_server.core.errors import InvalidSetting

URL = "https://api.opsgenie.com/v2/alerts"
MAX_MESSAGE, MAX_ENTITY = 130, 512
"""Limits of Opsgenie, in characters."""
_API_KEY = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PRIORITIES = {"critical": "P1", "warning": "P3", "info": "P5"}


@register
class Opsgenie(HttpChannel):
    """A group of alerts is one alert of the service, by its alias, which the end of its last alert closes."""

    name = "opsgenie"
    title = "Opsgenie"
    target = f"the key of an API integration; in the EU, {URL.replace('api.', 'api.eu.')}#KEY"
    hosts = ("api.opsgenie.com", "api.eu.opsgenie.com")
    has_incidents = True

    def recognizes(self, target: str) -> bool:
        return _API_KEY.fullmatch(target) is not None or super().recognizes(target)

    def parse_target(self, target: str, settings: AlertSettings) -> str:
        url = super().parse_target(f"{URL}#{target}" if _API_KEY.fullmatch(target) else target, settings)
        if not re.fullmatch(r"[A-Za-z0-9-]{1,100}", urlsplit(url).fragment):  # it is a header of each request
            raise InvalidSetting("target", f"give the key of an API integration, or a URL with it: {URL}#KEY")
        return url

    def url(self, outgoing: OutgoingMessage) -> str:
        base = outgoing.target.partition("#")[0].rstrip("/")
        if outgoing.message.event != "resolved":
            return base
        return f"{base}/{quote(outgoing.message.key(outgoing.address))}/close?identifierType=alias"

    def headers(self, outgoing: OutgoingMessage, body: bytes) -> Mapping[str, str]:
        key = urlsplit(outgoing.target).fragment
        return {**super().headers(outgoing, body), "Authorization": f"GenieKey {key}"}

    def body(self, outgoing: OutgoingMessage) -> bytes:
        message, address = outgoing.message, outgoing.address
        text = as_text(message, address)
        if message.event == "resolved":
            return to_json({"source": "Holdfast", "note": text})
        jobs = ", ".join(alert.job for alert in message.alerts)
        return to_json(
            {
                "message": headline(message)[:MAX_MESSAGE],
                "alias": message.key(address),
                "description": text,
                "priority": _PRIORITIES[message.severity],
                "source": "Holdfast",
                "entity": (jobs or message.project)[:MAX_ENTITY],
                "tags": [message.project, message.alert.rule if message.alert else "test"],
            }
        )
