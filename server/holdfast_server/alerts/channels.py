"""Channels that a project's alerts are sent to. Only its admins see them: a chat's webhook URL is a secret."""

from __future__ import annotations

import re
import secrets
import uuid
from urllib.parse import urlsplit

from msgspec import Struct
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from holdfast.protocol.administration import AlertChannel
from holdfast_server import models
from holdfast_server.accounts.projects import require_project
from holdfast_server.alerts import egress
from holdfast_server.alerts.conditions import SEVERITIES
from holdfast_server.core.alert_settings import AlertSettings
from holdfast_server.core.encoding import answer_from
from holdfast_server.core.errors import InvalidSetting, MailDisabled, UnknownChannel, WebhooksDisabled
from holdfast_server.db import Database, transaction
from holdfast_server.records import audit

MAX_NAME = 100
MAX_RECIPIENTS = 20
MAX_CHANNELS = 50
_ADDRESS = re.compile(r"[A-Za-z0-9._%+'-]{1,64}@[A-Za-z0-9.-]{1,190}")
KINDS = ("email", "slack", "teams", "pagerduty", "discord", "webhook")
_HOSTS = (
    ("hooks.slack.com", "slack"), ("discord.com", "discord"), ("discordapp.com", "discord"),
    (".logic.azure.com", "teams"), (".api.powerplatform.com", "teams"), (".webhook.office.com", "teams"),
    ("events.pagerduty.com", "pagerduty"), ("events.eu.pagerduty.com", "pagerduty"),
)  # fmt: skip
"""Hosts, or ends of them, of the URLs of known services."""
PAGERDUTY_URL = "https://events.pagerduty.com/v2/enqueue"
_INTEGRATION_KEY = re.compile(r"[A-Za-z0-9]{32}")


class NewChannel(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A channel to create."""

    name: str
    target: str
    """Mail addresses separated by commas, a URL, or an integration key of PagerDuty."""
    kind: str = ""
    """email, slack, teams, pagerduty, discord or webhook; by default, what the target is known as."""
    least_severity: str = "warning"


def list_channels(db: Database, project: str) -> list[AlertChannel]:
    """Raises UnknownProject."""
    rows = models.AlertChannelRecord
    with db.read() as session:
        require_project(session, project)
        query = select(rows).where(rows.project == project).order_by(rows.created_at, rows.id)
        return [_as_answer(row) for row in session.scalars(query)]


@transaction
def create(
    session: Session, settings: AlertSettings, project: str, request: NewChannel, *, who: str, now: float
) -> AlertChannel:
    """Create a channel and return it with its secret, which no other answer contains.

    Raises:
        UnknownProject, InvalidSetting, WebhooksDisabled, MailDisabled.
    """
    kind, target = _parse_target(request.target.strip(), request.kind, settings)
    name = " ".join(request.name.split())
    if not 1 <= len(name) <= MAX_NAME:
        raise InvalidSetting("name", f"the name of a channel has 1 to {MAX_NAME} characters")
    if request.least_severity not in SEVERITIES:
        reason = f"severity {request.least_severity!r} is none of {', '.join(SEVERITIES)}"
        raise InvalidSetting("least_severity", reason)
    row_id, secret = uuid.uuid4().hex, secrets.token_hex(32) if kind == "webhook" else ""
    rows = models.AlertChannelRecord
    require_project(session, project)
    known = session.scalar(select(func.count()).where(rows.project == project))
    if (known or 0) >= MAX_CHANNELS:
        raise InvalidSetting("name", f"a project has at most {MAX_CHANNELS} channels: remove one first")
    row = rows(
        id=row_id,
        project=project,
        name=name,
        kind=kind,
        target=target,
        secret=secret,
        least_severity=request.least_severity,
        enabled=True,
        created_at=now,
        created_by=who,
    )
    session.add(row)
    session.flush()
    _record(session, "alert.channel.create", row, who=who, now=now)
    return _as_answer(row, secret=secret or None)


@transaction
def remove(session: Session, project: str, channel: str, *, who: str, now: float) -> None:
    """Remove a channel with its queued messages. Raises UnknownChannel."""
    row = find(session, project, channel)
    session.execute(delete(models.AlertDeliveryRecord).where(models.AlertDeliveryRecord.channel == channel))
    session.delete(row)
    session.flush()
    _record(session, "alert.channel.remove", row, who=who, now=now)


def find(session: Session, project: str, channel: str) -> models.AlertChannelRecord:
    """Raises UnknownChannel."""
    row = session.get(models.AlertChannelRecord, channel)
    if row is None or row.project != project:
        raise UnknownChannel(channel)
    return row


def recipients(target: str) -> list[str]:
    return [address.strip() for address in target.split(",")]


def _parse_target(target: str, kind: str, settings: AlertSettings) -> tuple[str, str]:
    """Return the kind of the channel, and the target as it is stored."""
    if kind not in ("", *KINDS):
        raise InvalidSetting("kind", f"kind {kind[:80]!r} is none of {', '.join(KINDS)}")
    if kind == "email" or (not kind and "://" not in target and "@" in target):
        return "email", _mail_addresses(target, settings)
    if not settings.webhooks:
        raise WebhooksDisabled
    if kind in ("", "pagerduty") and _INTEGRATION_KEY.fullmatch(target):
        return "pagerduty", f"{PAGERDUTY_URL}#{target}"
    try:
        host = egress.parse(target, settings).host
    except egress.UrlBlocked as error:
        raise InvalidSetting("target", str(error)) from None
    kind = kind or next((name for end, name in _HOSTS if host == end or host.endswith(end)), "webhook")
    if kind == "pagerduty" and not urlsplit(target).fragment:
        reason = f"give the integration key of PagerDuty (Events API v2), or a URL with it: {PAGERDUTY_URL}#KEY"
        raise InvalidSetting("target", reason)
    return kind, target


def _mail_addresses(target: str, settings: AlertSettings) -> str:
    addresses = recipients(target)
    bad = next((address for address in addresses if not _ADDRESS.fullmatch(address)), None)
    if bad is not None:
        raise InvalidSetting("target", f"{bad[:80]!r} is not a mail address")
    if len(addresses) > MAX_RECIPIENTS:
        raise InvalidSetting("target", f"at most {MAX_RECIPIENTS} addresses: use a mailing list")
    if not settings.smtp_host:
        raise MailDisabled
    return ", ".join(addresses)


def _as_answer(row: models.AlertChannelRecord, *, secret: str | None = None) -> AlertChannel:
    url = urlsplit(row.target)
    shown = row.target if row.kind == "email" else f"{url.scheme}://{url.netloc.rpartition('@')[2]}/…"
    return answer_from(row, AlertChannel, target=shown, secret=secret)


def _record(session: Session, action: str, row: models.AlertChannelRecord, *, who: str, now: float) -> None:
    about = {"channel": row.id, "name": row.name, "kind": row.kind, "target": _as_answer(row).target}
    audit.record(session, who=who, action=action, project=row.project, after=about, now=now)
