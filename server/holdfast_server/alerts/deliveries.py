"""Delivery of messages, from the transaction that stores them to the channel.

At least once: a server that is killed after it sent a message, and before it stored that, sends it again under the
same number.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial

import msgspec
from msgspec import Struct
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from holdfast.protocol.administration import Alert, AlertDelivery
from holdfast_server import models
from holdfast_server.alerts import channels, egress, incidents, messages
from holdfast_server.alerts.channel_kinds.kind import OutgoingMessage, kind_of
from holdfast_server.alerts.conditions import SEVERITIES
from holdfast_server.core.alert_settings import AlertSettings
from holdfast_server.core.encoding import answer_from
from holdfast_server.db import Database, transaction
from holdfast_server.db.background_jobs import BackgroundJob
from holdfast_server.http.metrics import ServerMetrics
from holdfast_server.queries import summaries

EVERY_SECONDS = 2.0
AT_ONCE = 8
MAX_GROUPED = 500
"""Most due messages that are looked at for ones about the same rule."""
_STOPPED = ("silent", "no_progress", "persist_failing")
CAUSES = dict.fromkeys(("durable_age", "exposure_gpu_hours", "exposure_iterations"), _STOPPED)
"""By kind of rule, kinds of which an open alert of the same job explains that the rule is broken."""
RETRY_SECONDS = (10, 30, 120, 600, 1800, 7200)
"""Delays after failed tries. After the last one, the message is dropped."""
MAX_ERROR = 300

logger = logging.getLogger(__name__)


def enqueue(session: Session, row: models.AlertRecord, event: messages.Event, *, now: float) -> None:
    """Store the messages in the transaction that changes the alert, so that both are committed or neither.

    An alert whose cause is an open alert of the same job has no message. The end of an alert has one for the
    channels that got its beginning.
    """
    rows, sent = models.AlertChannelRecord, models.AlertDeliveryRecord
    wanted = select(rows).where(rows.project == row.project, rows.enabled)
    if event == "resolved":
        firing = select(sent.channel).where(sent.alert == row.id, sent.event == "firing")
        wanted = wanted.where(rows.id.in_(firing))
    elif _has_open_cause(session, row):
        return
    message = messages.AlertMessage(event=event, project=row.project, alert=incidents.as_answer(row, now=now))
    for channel in session.scalars(wanted):
        if SEVERITIES.index(row.severity) >= SEVERITIES.index(channel.least_severity):
            session.add(_queued(channel, message, now=now))


def _has_open_cause(session: Session, row: models.AlertRecord) -> bool:
    rows = models.AlertRecord
    open_causes = select(rows.id).where(
        rows.job == row.job, rows.kind.in_(CAUSES.get(row.kind, ())), rows.fired_at.is_not(None),
        rows.resolved_at.is_(None),
    )  # fmt: skip
    return session.scalars(open_causes.limit(1)).first() is not None


def _queued(
    channel: models.AlertChannelRecord, message: messages.AlertMessage, *, now: float
) -> models.AlertDeliveryRecord:
    return models.AlertDeliveryRecord(
        channel=channel.id,
        alert=message.alert.id if message.alert else None,
        event=message.event,
        payload=msgspec.msgpack.encode(message),
        state="waiting",
        tries=0,
        created_at=now,
        next_at=now,
    )


@transaction
def send_test(session: Session, project: str, channel: str, *, now: float) -> AlertDelivery:
    """Queue a test message. Raises UnknownChannel."""
    found = channels.find(session, project, channel)
    row = _queued(found, messages.AlertMessage(event="test", project=project), now=now)
    session.add(row)
    session.flush()
    return answer_from(row, AlertDelivery)


def list_deliveries(db: Database, project: str, channel: str, *, limit: int = 50) -> list[AlertDelivery]:
    """List a channel's messages, newest first. Raises UnknownChannel."""
    rows = models.AlertDeliveryRecord
    with db.read() as session:
        channels.find(session, project, channel)
        query = select(rows).where(rows.channel == channel).order_by(rows.id.desc()).limit(limit)
        return [answer_from(row, AlertDelivery) for row in session.scalars(query)]


# ---- the background job -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSender:
    """Sends the messages that are due."""

    settings: AlertSettings
    address: str = ""
    """Public URL of the server, for links; empty for messages without links."""
    metrics: ServerMetrics | None = None
    lookup: egress.Lookup = egress.look_up

    async def send_due(self, db: Database, now: float) -> int:
        """Try to send messages that are due, several at once, and return their number.

        Those about the same rule that are due for the same channel are sent as one. The first message of each
        channel precedes the second of any, so that a channel that does not answer delays only its own messages.
        """
        due = await db.ask("background", partial(_due, db, now=now))
        results = await asyncio.gather(*(self._send(some, now=now) for some in due))
        for some, result in zip(due, results, strict=True):
            await db.stored(partial(_store, some=some, result=result, now=now))
            if self.metrics is not None:
                self.metrics.delivered(channel=some.channel.kind, taken=result.error is None)
        return len(due)

    async def _send(self, some: _Outgoing, *, now: float) -> _SendResult:
        channel, number = some.channel, some.rows[0].id
        if some.message is None:
            return _SendResult()
        outgoing = OutgoingMessage(
            message=some.message, target=channel.target, secret=channel.secret, delivery=number,
            address=self.address, now=now,
        )  # fmt: skip
        try:
            await kind_of(channel.kind).send(outgoing, self.settings, self.lookup)
        except egress.UrlBlocked as error:
            return _SendResult(str(error), permanent=True)
        except egress.DeliveryFailed as error:
            return _SendResult(str(error))
        except Exception as error:  # one bad message must not delay the others
            logger.exception("sending message %d failed", number)
            return _SendResult(f"sending failed: {type(error).__name__}; the server's log has the details")
        return _SendResult()


def chore(settings: AlertSettings, *, address: str, metrics: ServerMetrics) -> BackgroundJob:
    sender = MessageSender(settings=settings, address=address, metrics=metrics)
    return BackgroundJob("alert deliveries", EVERY_SECONDS, sender.send_due)


class _SendResult(Struct, frozen=True):
    error: str | None = None
    permanent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outgoing:
    """Queued messages that are sent as one."""

    rows: list[models.AlertDeliveryRecord]
    channel: models.AlertChannelRecord
    message: messages.AlertMessage | None
    """`None`: nothing is sent, because the incident that it would resolve has other open alerts."""


def _due(db: Database, *, now: float) -> list[_Outgoing]:
    with db.read() as session:
        return [_combined(session, *group, now=now) for group in _due_groups(session, now=now)]


def _due_groups(
    session: Session, *, now: float
) -> list[tuple[models.AlertChannelRecord, list[models.AlertDeliveryRecord]]]:
    rows, owner, alerts = models.AlertDeliveryRecord, models.AlertChannelRecord, models.AlertRecord
    place = func.row_number().over(partition_by=rows.channel, order_by=(rows.next_at, rows.id))
    waiting = select(rows.id, place.label("place")).where(rows.state == "waiting", rows.next_at <= now).subquery()
    query = (
        select(rows, owner, alerts.rule)
        .join(waiting, waiting.c.id == rows.id)
        .join(owner, owner.id == rows.channel)
        .outerjoin(alerts, alerts.id == rows.alert)
        .order_by(waiting.c.place, rows.next_at)
        .limit(MAX_GROUPED)
    )
    groups: dict[tuple[object, ...], tuple[models.AlertChannelRecord, list[models.AlertDeliveryRecord]]] = {}
    for row, channel, rule in session.execute(query):
        # the service resolves an incident, which may be about other alerts than those that end together
        alone = rule is None or (kind_of(channel.kind).has_incidents and row.event == "resolved")
        key = (channel.id, row.id) if alone else (channel.id, row.event, rule)
        if key in groups or len(groups) < AT_ONCE:
            groups.setdefault(key, (channel, []))[1].append(row)
    return list(groups.values())


def _combined(
    session: Session,
    channel: models.AlertChannelRecord,
    rows: list[models.AlertDeliveryRecord],
    *,
    now: float,
) -> _Outgoing:
    first, *others = (_message(row) for row in rows)
    more = tuple(message.alert for message in others if message.alert is not None)
    verdict = _verdict(session, first.alert, now=now) if first.event == "firing" and not more else ""
    message: messages.AlertMessage | None = msgspec.structs.replace(first, others=more, verdict=verdict)
    if kind_of(channel.kind).has_incidents and first.event == "resolved":
        message = _incident_end(session, rows[0], first)
    return _Outgoing(rows=rows, channel=channel, message=message)


def _verdict(session: Session, alert: Alert | None, *, now: float) -> str:
    """Return the verdict on the job of an alert and what to do; without the text that the alert has itself."""
    job = session.get(models.JobRecord, alert.job) if alert is not None else None
    if alert is None or job is None:
        return ""
    verdict = summaries.summaries(session, [job], now=now)[0].verdict
    if verdict is None:
        return ""
    text = "" if alert.message in verdict.text else f"{verdict.text}."
    return " ".join(filter(None, [text, f"{verdict.next_step}." if verdict.next_step else ""]))


def _incident_end(
    session: Session, row: models.AlertDeliveryRecord, message: messages.AlertMessage
) -> messages.AlertMessage | None:
    """Return the message that resolves the incident of an alert; `None` while other alerts of it are open."""
    rows, alerts = models.AlertDeliveryRecord, models.AlertRecord
    sent = select(rows).where(rows.channel == row.channel, rows.alert == row.alert, rows.event == "firing")
    begun = session.scalars(sent.order_by(rows.id.desc()).limit(1)).first()
    opened = None if begun is None else _message(begun)
    if opened is None or not opened.others:
        return message
    numbers = [alert.id for alert in opened.alerts]
    still_open = select(func.count()).where(alerts.id.in_(numbers), alerts.resolved_at.is_(None))
    return None if session.scalar(still_open) else msgspec.structs.replace(message, alert=opened.alert)


def _message(row: models.AlertDeliveryRecord) -> messages.AlertMessage:
    return msgspec.msgpack.decode(row.payload, type=messages.AlertMessage)


def _store(session: Session, *, some: _Outgoing, result: _SendResult, now: float) -> None:
    rows = models.AlertDeliveryRecord
    for row in some.rows:
        tries = row.tries + 1
        values: dict[str, object] = {"tries": tries, "error": result.error[:MAX_ERROR] if result.error else None}
        if result.error is None:
            values |= {"state": "delivered", "ended_at": now}
            if some.message is not None and some.message.others:
                values["payload"] = msgspec.msgpack.encode(some.message)  # the end of each alert looks it up
        elif result.permanent or tries > len(RETRY_SECONDS):
            values |= {"state": "failed", "ended_at": now}
        else:
            values |= {"next_at": now + RETRY_SECONDS[tries - 1]}
        session.execute(update(rows).where(rows.id == row.id, rows.state == "waiting").values(**values))
