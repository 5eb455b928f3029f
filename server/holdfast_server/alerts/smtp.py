"""Handing a mail to the mail server."""

from __future__ import annotations

import smtplib
import ssl
from email.message import EmailMessage

from holdfast_server.core.alert_settings import AlertSettings

TIMEOUT_SECONDS = 10.0


def send(mail: EmailMessage, settings: AlertSettings) -> None:
    """Raises OSError and SMTPException; one for each recipient that is refused only when all are."""
    place = (settings.smtp_host, settings.smtp_port)
    if settings.smtp_security == "ssl":
        server: smtplib.SMTP = smtplib.SMTP_SSL(
            *place, timeout=TIMEOUT_SECONDS, context=ssl.create_default_context()
        )
    else:
        server = smtplib.SMTP(*place, timeout=TIMEOUT_SECONDS)
    with server:
        if settings.smtp_security == "starttls":
            server.starttls(context=ssl.create_default_context())
        if settings.smtp_user:
            server.login(settings.smtp_user, settings.smtp_password)
        server.send_message(mail)
