"""What cannot be done with alerts, rules and channels."""

from __future__ import annotations

from holdfast_server.core.errors import NotThere, Refused


class UnknownAlert(NotThere):
    """There is no alert of that number, or not for whoever asks."""

    def __init__(self, alert: int) -> None:
        self.alert = alert
        super().__init__(f"there is no alert {alert}")


class AlertOver(Refused):
    """It has resolved: there is nothing left to acknowledge or to silence."""

    def __init__(self, alert: int) -> None:
        self.alert = alert
        super().__init__(f"alert {alert} has resolved already")


class UnknownRule(NotThere):
    def __init__(self, project: str, name: str) -> None:
        self.project, self.name = project, name
        super().__init__(f"project {project!r} has no rule {name!r} of its own")


class UnknownChannel(NotThere):
    def __init__(self, channel: str) -> None:
        self.channel = channel
        super().__init__(f"there is no channel {channel!r}")


class WebhooksOff(Refused):
    """Nobody has allowed this server to send requests anywhere."""

    def __init__(self) -> None:
        super().__init__(
            "webhooks are off on this server: whoever runs it turns them on with HOLDFAST_WEBHOOKS=on"
        )


class MailOff(Refused):
    """The server knows no mail server."""

    def __init__(self) -> None:
        super().__init__("this server sends no mail: whoever runs it names a mail server in HOLDFAST_SMTP_HOST")
