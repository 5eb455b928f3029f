"""Delivery of messages, from the transaction that stores them to the channel.

At least once: a server that is killed after it sent a message, and before it stored that, sends it again under the
same number and with the same content. A message is about a group of alerts as they are at its first try.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from msgspec import Struct
from sqlalchemy import exists, func, select, update
from sqlalchemy.orm import Session, aliased

from holdfast.protocol.administration import Alert, AlertDelivery
from holdfast_server import models
from holdfast_server.alerts import channels, egress, groups, incidents, messages, routing
from holdfast_server.alerts.channel_kinds.kind import OutgoingMessage, kind_of
from holdfast_server.alerts.conditions import SEVERITIES
from holdfast_server.core.alert_settings import AlertSettings
from holdfast_server.core.encoding import answer_from
from holdfast_server.db import Database, lock_alerts, transaction
from holdfast_server.db.background_jobs import BackgroundJob
from holdfast_server.http.metrics import ServerMetrics
from holdfast_server.queries import summaries

EVERY_SECONDS = 2.0
AT_ONCE = 8
WAIT_SECONDS = 15.0
"""Time before a message is sent, in which other alerts join its group: more than one evaluation of the rules."""
MAX_GROUPED = 500
"""Most alerts that a message has; its first line counts all of them."""
UPDATE_SECONDS = 120.0
"""Least time between two messages about a group that is not over."""
RETRY_SECONDS = (10, 30, 120, 600, 1800, 7200)
"""Delays after failed tries. After the last one, the message is dropped."""
MAX_ERROR = 300

logger = logging.getLogger(__name__)


def enqueue(session: Session, row: models.AlertRecord, event: messages.Event, *, now: float) -> None:
    """Queue messages about the group of an alert in the transaction that changes the alert.

    Both are committed or neither. While an alert has an open cause, it sends none. Its end has one for the
    channels that got a message about its group.
    """
    lock_alerts(session)
    _join_group(session, row)
    is_over = row.group_id is None or not groups.has_open(session, row.group_id)
    if event == "resolved":  # what it explained had no message
        for left in groups.open_effects(session, row):
            if incidents.is_announced(left) and not incidents.is_silenced(left, now=now):
                enqueue(session, left, "firing", now=now)
    if not is_over and groups.open_cause(session, row) is not None:
        return
    rows, sent = models.AlertChannelRecord, models.AlertDeliveryRecord
    if event == "resolved":
        informed = select(sent.channel).where(sent.group_id == row.group_id)
        wanted = session.scalars(select(rows).where(rows.id.in_(informed), rows.enabled))
    else:
        wanted = session.scalars(select(rows).where(rows.project == row.project, rows.enabled))
    tags = routing.tags_of(session, [row.job])
    for channel in wanted.all():
        if event == "resolved" or _is_for(channel, row, tags.get(row.job)):
            _queue(session, channel, row, event, is_over=is_over, now=now)


def _join_group(session: Session, row: models.AlertRecord) -> None:
    """Give an alert of a server without groups, and its messages, a group of their own."""
    if row.group_id is None:
        sent, row.group_id = models.AlertDeliveryRecord, row.id
        session.execute(update(sent).where(sent.alert == row.id, sent.group_id.is_(None)).values(group_id=row.id))


def _is_for(channel: models.AlertChannelRecord, row: models.AlertRecord, tags: routing.JobTags | None) -> bool:
    severe = SEVERITIES.index(row.severity) >= SEVERITIES.index(channel.least_severity)
    return severe and row.project == channel.project and routing.receives(channel, tags)


def _queue(
    session: Session,
    channel: models.AlertChannelRecord,
    row: models.AlertRecord,
    event: messages.Event,
    *,
    is_over: bool,
    now: float,
) -> None:
    """Queue a message, or have the one that waits about the same group be about the change as well."""
    rows = models.AlertDeliveryRecord
    query = select(rows).where(rows.group_id == row.group_id, rows.channel == channel.id).order_by(rows.id.desc())
    last = session.scalars(query.limit(1)).first()
    due = now + WAIT_SECONDS
    if last is not None and not is_over:
        due = max(due, (last.ended_at or last.created_at) + UPDATE_SECONDS)
    if last is not None and last.state == "waiting" and not last.payload:
        last.event, last.next_at = event if is_over else last.event, min(last.next_at, due)
        return
    session.add(
        rows(
            channel=channel.id, alert=row.id, group_id=row.group_id, event=event, payload=b"", state="waiting",
            tries=0, created_at=now, next_at=due,
        )
    )  # fmt: skip
    session.flush()


@transaction
def send_test(session: Session, project: str, channel: str, *, now: float) -> AlertDelivery:
    """Queue a test message, which names the jobs whose alerts the channel receives. Raises UnknownChannel."""
    found = channels.find(session, project, channel)
    jobs = routing.received_jobs(session, found)
    message = messages.AlertMessage(event="test", project=project, jobs=len(jobs), ended=tuple(jobs[:10]))
    row = models.AlertDeliveryRecord(
        channel=channel, event="test", payload=msgspec.msgpack.encode(message), state="waiting", tries=0,
        created_at=now, next_at=now,
    )  # fmt: skip
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

        The first message of each channel precedes the second of any, so that a channel that does not answer delays
        only its own messages.
        """
        numbers = await db.ask("background", partial(_due, db, now=now))
        if not numbers:
            return 0
        due = await db.stored(partial(_compose_due, numbers=numbers, now=now))
        results = await asyncio.gather(*(self._send(one, now=now) for one in due))
        for one, result in zip(due, results, strict=True):
            await db.stored(partial(_store, delivery=one, result=result, now=now))
            if self.metrics is not None:
                self.metrics.delivered(channel=one.kind, taken=result.error is None)
        return len(due)

    async def _send(self, one: _DueDelivery, *, now: float) -> _SendResult:
        outgoing = OutgoingMessage(
            message=one.message, target=one.target, secret=one.secret, delivery=one.id, address=self.address,
            now=now,
        )  # fmt: skip
        try:
            await kind_of(one.kind).send(outgoing, self.settings, self.lookup)
        except egress.UrlBlocked as error:
            return _SendResult(str(error), permanent=True)
        except egress.DeliveryFailed as error:
            return _SendResult(str(error))
        except Exception as error:  # one bad message must not delay the others
            logger.exception("sending message %d failed", one.id)
            return _SendResult(f"sending failed: {type(error).__name__}; the server's log has the details")
        return _SendResult()


def chore(settings: AlertSettings, *, address: str, metrics: ServerMetrics) -> BackgroundJob:
    sender = MessageSender(settings=settings, address=address, metrics=metrics)
    return BackgroundJob("alert deliveries", EVERY_SECONDS, sender.send_due)


class _SendResult(Struct, frozen=True):
    error: str | None = None
    permanent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _DueDelivery:
    id: int
    tries: int
    kind: str
    target: str
    secret: str
    message: messages.AlertMessage


def _due(db: Database, *, now: float) -> list[int]:
    """Return the messages to try now; a later one about a group waits for the earlier one."""
    rows, earlier = models.AlertDeliveryRecord, aliased(models.AlertDeliveryRecord)
    waits = exists().where(
        earlier.group_id == rows.group_id, earlier.channel == rows.channel, earlier.id < rows.id,
        earlier.state == "waiting",
    )  # fmt: skip
    place = func.row_number().over(partition_by=rows.channel, order_by=(rows.next_at, rows.id)).label("place")
    due = (
        select(rows.id, rows.next_at, place).where(rows.state == "waiting", rows.next_at <= now, ~waits).subquery()
    )
    with db.read() as session:
        return list(session.scalars(select(due.c.id).order_by(due.c.place, due.c.next_at).limit(AT_ONCE)))


def _compose_due(session: Session, *, numbers: Sequence[int], now: float) -> list[_DueDelivery]:
    """Return the messages, and store the content of those that have none; drop those about nothing."""
    lock_alerts(session)  # a change that comes later queues another message
    rows, owner = models.AlertDeliveryRecord, models.AlertChannelRecord
    query = select(rows, owner).join(owner, owner.id == rows.channel)
    query = query.where(rows.id.in_(numbers), rows.state == "waiting").order_by(rows.id)
    found = []
    for row, channel in session.execute(query).all():
        message = _compose(session, row, channel, now=now) if not row.payload else _message(row)
        if message is None:
            session.delete(row)
            continue
        if not row.payload:
            row.event, row.payload = message.event, msgspec.msgpack.encode(message)
        found.append(
            _DueDelivery(
                id=row.id, tries=row.tries, kind=channel.kind, target=channel.target, secret=channel.secret,
                message=message,
            )
        )  # fmt: skip
    return found


def _compose(
    session: Session, row: models.AlertDeliveryRecord, channel: models.AlertChannelRecord, *, now: float
) -> messages.AlertMessage | None:
    """Return the message about a group as it is now; `None` if it has nothing to say, as while it is silenced."""
    group = row.group_id or 0
    members = [alert for alert in groups.members(session, group) if incidents.is_announced(alert)]
    tags = routing.tags_of(session, {alert.job for alert in members})
    received = [alert for alert in members if _is_for(channel, alert, tags.get(alert.job))]
    if not received and all(alert.resolved_at is not None for alert in members):
        received = members  # the end reaches a channel although the route or the job's project changed
    shown = [
        alert
        for alert in received
        if alert.resolved_at is None and not incidents.is_silenced(alert, now=now)
    ]  # fmt: skip
    event: messages.Event = "firing"
    if shown and all(alert.acknowledged_at is not None for alert in shown):
        return None
    if not shown:
        if any(alert.resolved_at is None for alert in received):
            return None
        event, quiet = "resolved", not kind_of(channel.kind).has_incidents
        shown = [a for a in received if not (quiet and incidents.is_silenced(a, now=a.resolved_at or now))]
    parts = groups.split(shown)
    if not parts.causes:
        return None
    first, *others = (incidents.as_answer(alert, now=now) for alert in parts.causes[:MAX_GROUPED])
    ended = sorted({alert.job for alert in received if event == "firing" and alert.resolved_at is not None})
    verdict = _verdict(session, first, now=now) if event == "firing" and not others else ""
    rule = session.get(models.AlertRuleRecord, (channel.project, first.rule))
    return messages.AlertMessage(
        event=event,
        project=channel.project,
        group=group,
        opened=_opened(session, row),
        alert=first,
        others=tuple(others),
        jobs=len({alert.job for alert in parts.causes}),
        effects=tuple(incidents.as_answer(alert, now=now) for alert in parts.effects[:MAX_GROUPED]),
        ended=tuple(ended),
        verdict=verdict,
        runbook=rule.runbook if rule is not None else "",
    )


def _verdict(session: Session, alert: Alert, *, now: float) -> str:
    """Return the verdict on the job of an alert and what to do; without the text that the alert has itself."""
    job = session.get(models.JobRecord, alert.job)
    if job is None:
        return ""
    verdict = summaries.summaries(session, [job], now=now)[0].verdict
    if verdict is None:
        return ""
    text = "" if alert.message in verdict.text else f"{verdict.text}."
    return " ".join(filter(None, [text, f"{verdict.next_step}." if verdict.next_step else ""]))


def _opened(session: Session, row: models.AlertDeliveryRecord) -> Alert | None:
    """Return the alert by which the first message about a group named the incident; see `AlertMessage.opened`."""
    rows = models.AlertDeliveryRecord
    sent = select(rows).where(rows.group_id == row.group_id, rows.channel == row.channel, rows.payload != b"")
    first = session.scalars(sent.order_by(rows.id).limit(1)).first()
    return None if first is None else _message(first).opened


def _message(row: models.AlertDeliveryRecord) -> messages.AlertMessage:
    message = msgspec.msgpack.decode(row.payload, type=messages.AlertMessage)
    if message.group or message.alert is None:
        return message
    return msgspec.structs.replace(message, group=row.group_id or 0, opened=message.alert)


def _store(session: Session, *, delivery: _DueDelivery, result: _SendResult, now: float) -> None:
    rows, tries = models.AlertDeliveryRecord, delivery.tries + 1
    values: dict[str, object] = {"tries": tries, "error": result.error[:MAX_ERROR] if result.error else None}
    if result.error is None:
        values |= {"state": "delivered", "ended_at": now}
    elif result.permanent or tries > len(RETRY_SECONDS):
        values |= {"state": "failed", "ended_at": now}
    else:
        values |= {"next_at": now + RETRY_SECONDS[tries - 1]}
    session.execute(update(rows).where(rows.id == delivery.id, rows.state == "waiting").values(**values))
