"""Requests about alerts, rules and channels that the server refuses."""

from __future__ import annotations

from holdfast_server.core.errors import RequestRefused, ResourceNotFound


class UnknownAlert(ResourceNotFound):
    code, details, message = "unknown_alert", ("alert",), "there is no alert {}"


class AlertResolved(RequestRefused):
    """A resolved alert can be neither acknowledged nor silenced."""

    code, details, message = "alert_over", ("alert",), "alert {} has resolved already"


class UnknownRule(ResourceNotFound):
    code, message = "unknown_rule", "project {!r} has no custom rule {!r}"


class UnknownChannel(ResourceNotFound):
    code, message = "unknown_channel", "there is no channel {!r}"


class WebhooksDisabled(RequestRefused):
    code = "webhooks_off"
    message = "webhooks are off on this server: its administrator enables them with HOLDFAST_WEBHOOKS=on"


class MailDisabled(RequestRefused):
    code = "mail_off"
    message = "this server sends no mail: its administrator sets a mail server in HOLDFAST_SMTP_HOST"
