"""Channels that a project's alerts are sent to. Only its admins see them: a chat's webhook URL is a secret."""

from __future__ import annotations

import secrets
import uuid

from msgspec import UNSET, Struct, UnsetType
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from holdfast.protocol.administration import AlertChannel
from holdfast_server import models
from holdfast_server.accounts.projects import require_project
from holdfast_server.alerts import routing
from holdfast_server.alerts.channel_kinds.kind import ChannelKind, channel_kinds, kind_for, kind_of
from holdfast_server.alerts.conditions import SEVERITIES
from holdfast_server.core.alert_settings import AlertSettings
from holdfast_server.core.encoding import answer_from
from holdfast_server.core.errors import InvalidSetting, UnknownChannel
from holdfast_server.db import Database, transaction
from holdfast_server.records import audit

MAX_NAME = 100
MAX_CHANNELS = 50


class NewChannel(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A channel to create."""

    name: str
    target: str
    """Where the service takes messages, such as mail addresses separated by commas, or a URL."""
    kind: str = ""
    """Service, such as `email` or `slack`; by default, the one that the target belongs to."""
    least_severity: str = "warning"
    owner: str = ""
    """Pattern of the owners of jobs whose alerts it receives, with the wildcards * and ?; empty for any."""
    labels: dict[str, str] = {}
    """Patterns of the labels of these jobs by name; each must match."""


class ChannelChanges(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A change of the alerts that a channel receives."""

    least_severity: str | UnsetType = UNSET
    owner: str | UnsetType = UNSET
    labels: dict[str, str] | UnsetType = UNSET


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
    row_id, secret = uuid.uuid4().hex, secrets.token_hex(32) if kind.signs else ""
    rows = models.AlertChannelRecord
    require_project(session, project)
    known = session.scalar(select(func.count()).where(rows.project == project))
    if (known or 0) >= MAX_CHANNELS:
        raise InvalidSetting("name", f"a project has at most {MAX_CHANNELS} channels: remove one first")
    row = rows(
        id=row_id,
        project=project,
        name=name,
        kind=kind.name,
        target=target,
        secret=secret,
        least_severity=_parse_severity(request.least_severity),
        owner=routing.parse_owner(request.owner),
        labels=routing.stored_labels(routing.check_labels(request.labels)),
        enabled=True,
        created_at=now,
        created_by=who,
    )
    session.add(row)
    session.flush()
    _record(session, "alert.channel.create", row, who=who, now=now)
    return _as_answer(row, secret=secret or None)


@transaction
def change(
    session: Session, project: str, channel: str, changes: ChannelChanges, *, who: str, now: float
) -> AlertChannel:
    """Change which alerts a channel receives. Raises UnknownChannel and InvalidSetting, which names the field."""
    row = find(session, project, channel)
    if changes.least_severity is not UNSET:
        row.least_severity = _parse_severity(changes.least_severity)
    if changes.owner is not UNSET:
        row.owner = routing.parse_owner(changes.owner)
    if changes.labels is not UNSET:
        row.labels = routing.stored_labels(routing.check_labels(changes.labels))
    session.flush()
    _record(session, "alert.channel.change", row, who=who, now=now)
    return _as_answer(row)


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


def _parse_severity(text: str) -> str:
    if text not in SEVERITIES:
        raise InvalidSetting("least_severity", f"severity {text[:80]!r} is not one of {', '.join(SEVERITIES)}")
    return text


def _parse_target(target: str, kind: str, settings: AlertSettings) -> tuple[ChannelKind, str]:
    """Return the kind of the channel, and the target as it is stored."""
    kinds = channel_kinds()
    if kind not in ("", *kinds):
        raise InvalidSetting("kind", f"kind {kind[:80]!r} is not one of {', '.join(kinds)}")
    chosen = kinds[kind] if kind else kind_for(target)
    return chosen, chosen.parse_target(target, settings)


def _as_answer(row: models.AlertChannelRecord, *, secret: str | None = None) -> AlertChannel:
    shown = kind_of(row.kind).shown(row.target)
    return answer_from(row, AlertChannel, target=shown, labels=routing.labels_of(row.labels), secret=secret)


def _record(session: Session, action: str, row: models.AlertChannelRecord, *, who: str, now: float) -> None:
    shown = _as_answer(row)
    about = {"channel": row.id} | {
        name: getattr(shown, name) for name in ("name", "kind", "target", "least_severity", "owner", "labels")
    }
    audit.record(session, who=who, action=action, project=row.project, after=about, now=now)
