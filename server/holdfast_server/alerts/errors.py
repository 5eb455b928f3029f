"""Requests about alerts, rules and channels that the server refuses."""

from __future__ import annotations

from holdfast_server.core.errors import RequestRefused, ResourceNotFound


class UnknownAlert(ResourceNotFound):
    code, details = "unknown_alert", ("alert",)

    def __init__(self, alert: int) -> None:
        self.alert = alert
        super().__init__(f"there is no alert {alert}")


class AlertResolved(RequestRefused):
    """A resolved alert can be neither acknowledged nor silenced."""

    code, details = "alert_over", ("alert",)

    def __init__(self, alert: int) -> None:
        self.alert = alert
        super().__init__(f"alert {alert} has resolved already")


class UnknownRule(ResourceNotFound):
    code = "unknown_rule"

    def __init__(self, project: str, name: str) -> None:
        super().__init__(f"project {project!r} has no custom rule {name!r}")


class UnknownChannel(ResourceNotFound):
    code = "unknown_channel"

    def __init__(self, channel: str) -> None:
        super().__init__(f"there is no channel {channel!r}")


class WebhooksDisabled(RequestRefused):
    code = "webhooks_off"

    def __init__(self) -> None:
        super().__init__(
            "webhooks are off on this server: its administrator enables them with HOLDFAST_WEBHOOKS=on"
        )


class MailDisabled(RequestRefused):
    code = "mail_off"

    def __init__(self) -> None:
        super().__init__("this server sends no mail: its administrator sets a mail server in HOLDFAST_SMTP_HOST")
