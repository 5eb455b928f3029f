"""Mail over SMTP."""

from __future__ import annotations

import asyncio
import re
import smtplib
import ssl
from email.message import EmailMessage

from holdfast_server.alerts import egress
from holdfast_server.alerts.channel_kinds.kind import ChannelKind, OutgoingMessage, register
from holdfast_server.alerts.messages import as_text, headline
from holdfast_server.core.alert_settings import AlertSettings
from holdfast_server.core.errors import InvalidSetting, MailDisabled

MAX_RECIPIENTS = 20
SMTP_SECONDS = 10.0
"""Time limit for each step of a conversation with a mail server."""
_ADDRESS = re.compile(r"[A-Za-z0-9._%+'-]{1,64}@[A-Za-z0-9.-]{1,190}")


@register
class Email(ChannelKind):
    name = "email"
    title = "Email"
    target = "addresses, separated by commas"

    def recognizes(self, target: str) -> bool:
        return "://" not in target and "@" in target

    def parse_target(self, target: str, settings: AlertSettings) -> str:
        addresses = [address.strip() for address in target.split(",")]
        bad = next((address for address in addresses if not _ADDRESS.fullmatch(address)), None)
        if bad is not None:
            raise InvalidSetting("target", f"{bad[:80]!r} is not an email address")
        if len(addresses) > MAX_RECIPIENTS:
            raise InvalidSetting("target", f"at most {MAX_RECIPIENTS} addresses: use a mailing list")
        if not settings.smtp_host:
            raise MailDisabled
        return ", ".join(addresses)

    def shown(self, target: str) -> str:
        return target

    async def send(self, outgoing: OutgoingMessage, settings: AlertSettings, lookup: egress.Lookup) -> None:
        if not settings.smtp_host:
            raise egress.DeliveryFailed("email is disabled on this server: HOLDFAST_SMTP_HOST is not set")
        mail = EmailMessage()
        mail["Subject"] = " ".join(headline(outgoing.message).split())
        mail["From"], mail["To"] = settings.smtp_from, outgoing.target
        mail["Auto-Submitted"], mail["X-Holdfast-Delivery"] = "auto-generated", str(outgoing.delivery)
        mail.set_content(as_text(outgoing.message, outgoing.address) + "\n")
        try:
            await asyncio.to_thread(send_mail, mail, settings)
        except (OSError, smtplib.SMTPException) as error:  # the ways in which a mail server refuses
            reason = f"the mail server refused the message: {type(error).__name__}"
            raise egress.DeliveryFailed(reason) from error


def send_mail(mail: EmailMessage, settings: AlertSettings) -> None:
    """Send a mail. Raises OSError and SMTPException; refused recipients raise only if all are refused."""
    place = (settings.smtp_host, settings.smtp_port)
    if settings.smtp_security == "ssl":
        server: smtplib.SMTP = smtplib.SMTP_SSL(*place, timeout=SMTP_SECONDS, context=ssl.create_default_context())
    else:
        server = smtplib.SMTP(*place, timeout=SMTP_SECONDS)
    with server:
        if settings.smtp_security == "starttls":
            server.starttls(context=ssl.create_default_context())
        if settings.smtp_user:
            server.login(settings.smtp_user, settings.smtp_password)
        server.send_message(mail)
