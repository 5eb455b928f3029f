"""Where a project's alerts are sent. Only its admins see and change it: a chat's URL is as good as a password."""

from __future__ import annotations

import re
import secrets
import uuid
from urllib.parse import urlsplit

from msgspec import Struct
from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.protocol.administration import AlertChannel
from holdfast_server import models
from holdfast_server.alerts import egress
from holdfast_server.alerts.conditions import SEVERITIES
from holdfast_server.alerts.errors import MailOff, UnknownChannel, WebhooksOff
from holdfast_server.core.alert_settings import AlertSettings
from holdfast_server.core.errors import InvalidSetting, UnknownProject
from holdfast_server.db import Database
from holdfast_server.records import audit

MAX_NAME = 100
MAX_RECIPIENTS = 20
MAX_CHANNELS = 50
_ADDRESS = re.compile(r"[A-Za-z0-9._%+'-]{1,64}@[A-Za-z0-9.-]{1,190}")
_CHATS = {"hooks.slack.com": "slack", "discord.com": "discord", "discordapp.com": "discord"}


class NewChannel(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Addresses with commas between, or a URL."""

    name: str
    target: str
    least_severity: str = "warning"


async def listed(db: Database, project: str) -> list[AlertChannel]:
    """Raises UnknownProject."""
    rows = models.AlertChannelRecord
    async with db.read() as session:
        if await session.get(models.ProjectRecord, project) is None:
            raise UnknownProject(project)
        query = select(rows).where(rows.project == project).order_by(rows.created_at, rows.id)
        return [_channel(row) for row in await session.scalars(query)]


async def create(
    db: Database,
    settings: AlertSettings,
    project: str,
    asked: NewChannel,
    *,
    who: str,
    request_id: str,
    now: float,
) -> AlertChannel:
    """With the secret, which is not told again. Raises UnknownProject, InvalidSetting, WebhooksOff and MailOff."""
    kind, target = _kind(asked.target.strip(), settings)
    name = " ".join(asked.name.split())
    if not 1 <= len(name) <= MAX_NAME:
        raise InvalidSetting("name", f"a channel's name has 1 to {MAX_NAME} characters")
    if asked.least_severity not in SEVERITIES:
        reason = f"severity {asked.least_severity!r} is none of {', '.join(SEVERITIES)}"
        raise InvalidSetting("least_severity", reason)
    identity, secret = uuid.uuid4().hex, secrets.token_hex(32) if kind == "webhook" else ""

    async def work(session: AsyncSession) -> AlertChannel:
        rows = models.AlertChannelRecord
        if await session.get(models.ProjectRecord, project) is None:
            raise UnknownProject(project)
        known = await session.scalar(select(func.count()).where(rows.project == project))
        if (known or 0) >= MAX_CHANNELS:
            raise InvalidSetting("name", f"a project has at most {MAX_CHANNELS} channels: remove one")
        row = rows(
            id=identity,
            project=project,
            name=name,
            kind=kind,
            target=target,
            secret=secret,
            least_severity=asked.least_severity,
            enabled=True,
            created_at=now,
            created_by=who,
        )
        session.add(row)
        await session.flush()
        await _note(session, "alert.channel.create", row, who=who, request_id=request_id, now=now)
        return _channel(row, secret=secret or None)

    return await db.write(work)


async def remove(db: Database, project: str, channel: str, *, who: str, request_id: str, now: float) -> None:
    """With what waits to be sent there. Raises UnknownChannel."""

    async def work(session: AsyncSession) -> None:
        row = await find(session, project, channel)
        await session.execute(
            delete(models.AlertDeliveryRecord).where(models.AlertDeliveryRecord.channel == channel)
        )
        await session.delete(row)
        await session.flush()
        await _note(session, "alert.channel.remove", row, who=who, request_id=request_id, now=now)

    await db.write(work)


async def find(session: AsyncSession, project: str, channel: str) -> models.AlertChannelRecord:
    row = await session.get(models.AlertChannelRecord, channel)
    if row is None or row.project != project:
        raise UnknownChannel(channel)
    return row


def recipients(target: str) -> list[str]:
    return [address.strip() for address in target.split(",")]


def _kind(target: str, settings: AlertSettings) -> tuple[str, str]:
    if "://" not in target and "@" in target:
        addresses = recipients(target)
        bad = next((address for address in addresses if not _ADDRESS.fullmatch(address)), None)
        if bad is not None:
            raise InvalidSetting("target", f"{bad[:80]!r} is no mail address")
        if len(addresses) > MAX_RECIPIENTS:
            raise InvalidSetting("target", f"at most {MAX_RECIPIENTS} addresses: give a mailing list")
        if not settings.smtp_host:
            raise MailOff
        return "email", ", ".join(addresses)
    if not settings.webhooks:
        raise WebhooksOff
    try:
        host = egress.parse(target, settings).host
    except egress.Blocked as error:
        raise InvalidSetting("target", str(error)) from None
    return _CHATS.get(host, "webhook"), target


def _channel(row: models.AlertChannelRecord, *, secret: str | None = None) -> AlertChannel:
    shown = row.target if row.kind == "email" else f"https://{urlsplit(row.target).hostname}/…"
    own = ("target", "secret")
    return AlertChannel(
        **{name: getattr(row, name) for name in AlertChannel.__struct_fields__ if name not in own},
        target=shown,
        secret=secret,
    )


async def _note(
    session: AsyncSession, action: str, row: models.AlertChannelRecord, *, who: str, request_id: str, now: float
) -> None:
    told = {"channel": row.id, "name": row.name, "kind": row.kind, "target": _channel(row).target}
    await audit.record(
        session, who=who, action=action, project=row.project, after=told, request_id=request_id, now=now
    )
