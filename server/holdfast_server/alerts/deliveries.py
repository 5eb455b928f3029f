"""Messages from being written down, with what they tell of, to having arrived.

At least once: a server that is killed after it has sent one and before it has noted so sends it again, under the
same number.
"""

from __future__ import annotations

import asyncio
import logging
import smtplib
from dataclasses import dataclass
from functools import partial

import msgspec
from msgspec import Struct
from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.protocol.administration import AlertDelivery
from holdfast_server import models
from holdfast_server.alerts import channels, egress, incidents, messages, smtp
from holdfast_server.alerts.conditions import SEVERITIES
from holdfast_server.core.alert_settings import AlertSettings
from holdfast_server.db import Database
from holdfast_server.db.background_jobs import Chore
from holdfast_server.http.metrics import ServerMeasures

EVERY_SECONDS = 2.0
AT_ONCE = 8
RETRY_SECONDS = (10, 30, 120, 600, 1800, 7200)
"""After each attempt that failed; after the last of them a message is given up."""
MAX_ERROR = 300

logger = logging.getLogger(__name__)


async def tell(session: AsyncSession, row: models.AlertRecord, event: messages.Event, *, now: float) -> None:
    """In the transaction that moves the alert: both are stored, or neither is."""
    rows = models.AlertChannelRecord
    told = messages.Told(event=event, project=row.project, alert=incidents.as_row(row, now=now))
    for channel in await session.scalars(select(rows).where(rows.project == row.project, rows.enabled)):
        if SEVERITIES.index(row.severity) >= SEVERITIES.index(channel.least_severity):
            session.add(_waiting(channel, told, now=now))


def _waiting(channel: models.AlertChannelRecord, told: messages.Told, *, now: float) -> models.AlertDeliveryRecord:
    return models.AlertDeliveryRecord(
        channel=channel.id,
        alert=told.alert.id if told.alert else None,
        event=told.event,
        payload=msgspec.msgpack.encode(told),
        state="waiting",
        tries=0,
        created_at=now,
        next_at=now,
    )


async def test(db: Database, project: str, channel: str, *, now: float) -> AlertDelivery:
    """A message that says nothing but that it arrived; the log says whether it did. Raises UnknownChannel."""

    async def work(session: AsyncSession) -> AlertDelivery:
        found = await channels.find(session, project, channel)
        row = _waiting(found, messages.Told(event="test", project=project), now=now)
        session.add(row)
        await session.flush()
        return _as(row)

    return await db.write(work)


async def log(db: Database, project: str, channel: str, *, limit: int = 50) -> list[AlertDelivery]:
    """The newest first. Raises UnknownChannel."""
    rows = models.AlertDeliveryRecord
    async with db.read() as session:
        await channels.find(session, project, channel)
        query = select(rows).where(rows.channel == channel).order_by(rows.id.desc()).limit(limit)
        return [_as(row) for row in await session.scalars(query)]


def _as(row: models.AlertDeliveryRecord) -> AlertDelivery:
    return AlertDelivery(
        **{name: getattr(row, name) for name in AlertDelivery.__struct_fields__ if name != "tries"},
        tries=row.tries or 0,
    )


# ---- the chore --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """How messages leave."""

    settings: AlertSettings
    address: str = ""
    """Of this server, for links; empty: messages have none."""
    measures: ServerMeasures | None = None
    lookup: egress.Lookup = egress.look_up

    async def send_due(self, db: Database, now: float) -> int:
        """Try what is due, several at once; how many were tried.

        The first message of each channel goes before the second of any: one that nobody answers at holds up
        itself and not the others.
        """
        rows, owner = models.AlertDeliveryRecord, models.AlertChannelRecord
        place = func.row_number().over(partition_by=rows.channel, order_by=(rows.next_at, rows.id))
        waiting = (
            select(rows.id, place.label("place")).where(rows.state == "waiting", rows.next_at <= now).subquery()
        )
        query = (
            select(rows, owner)
            .join(waiting, waiting.c.id == rows.id)
            .join(owner, owner.id == rows.channel)
            .order_by(waiting.c.place, rows.next_at)
            .limit(AT_ONCE)
        )
        async with db.read() as session:
            due = (await session.execute(query)).all()
        ends = await asyncio.gather(*(self._send(row, channel, now=now) for row, channel in due))
        for (row, channel), end in zip(due, ends, strict=True):
            await db.write(partial(_note, delivery=row.id, tries=row.tries + 1, end=end, now=now))
            if self.measures is not None:
                self.measures.delivered(channel=channel.kind, taken=end.error is None)
        return len(due)

    async def _send(
        self, row: models.AlertDeliveryRecord, channel: models.AlertChannelRecord, *, now: float
    ) -> _End:
        told = msgspec.msgpack.decode(row.payload, type=messages.Told)
        try:
            if channel.kind == "email":
                await self._mail(told, channel, row.id)
            else:
                await self._post(told, channel, row.id, now=now)
        except egress.Blocked as error:
            return _End(str(error), hopeless=True)
        except egress.NotTaken as error:
            return _End(str(error))
        except (OSError, smtplib.SMTPException) as error:  # a mail server says no in many ways
            return _End(f"the mail server did not take it: {type(error).__name__}")
        except Exception as error:  # whatever is wrong with this one, those behind it are to arrive
            logger.exception("message %d could not be sent", row.id)
            return _End(f"it could not be sent: {type(error).__name__}; the server's log says more")
        return _End()

    async def _mail(self, told: messages.Told, channel: models.AlertChannelRecord, delivery: int) -> None:
        if not self.settings.smtp_host:
            raise egress.NotTaken("this server sends no mail any more: HOLDFAST_SMTP_HOST is not set")
        mail = messages.as_mail(
            told,
            sender=self.settings.smtp_from,
            recipients=channels.recipients(channel.target),
            address=self.address,
            delivery=delivery,
        )
        await asyncio.to_thread(smtp.send, mail, self.settings)

    async def _post(
        self, told: messages.Told, channel: models.AlertChannelRecord, delivery: int, *, now: float
    ) -> None:
        if not self.settings.webhooks:
            raise egress.NotTaken("webhooks are off on this server: HOLDFAST_WEBHOOKS is not on")
        headers = {"Content-Type": "application/json", "User-Agent": "holdfast"}
        match channel.kind:
            case "slack":
                body = messages.as_slack(told, self.address)
            case "discord":
                body = messages.as_discord(told, self.address)
            case _:
                body = messages.as_webhook(told, delivery, self.address)
                headers = messages.signed(body, channel.secret, delivery=delivery, now=now)
        await egress.post(channel.target, body, headers, self.settings, lookup=self.lookup)


def chore(settings: AlertSettings, *, address: str, measures: ServerMeasures) -> Chore:
    post = Post(settings=settings, address=address, measures=measures)
    return Chore("alert deliveries", EVERY_SECONDS, post.send_due)


class _End(Struct, frozen=True):
    error: str | None = None
    hopeless: bool = False


async def _note(session: AsyncSession, *, delivery: int, tries: int, end: _End, now: float) -> None:
    rows = models.AlertDeliveryRecord
    values: dict[str, object] = {"tries": tries, "error": end.error[:MAX_ERROR] if end.error else None}
    if end.error is None:
        values |= {"state": "delivered", "ended_at": now}
    elif end.hopeless or tries > len(RETRY_SECONDS):
        values |= {"state": "failed", "ended_at": now}
    else:
        values |= {"next_at": now + RETRY_SECONDS[tries - 1]}
    await session.execute(update(rows).where(rows.id == delivery, rows.state == "waiting").values(**values))
