"""Rules, the incidents they found, and what was told of them to whom."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from holdfast_server.models.base import Base


class AlertRuleRecord(Base):
    """A rule of a project's own, or a built-in one that the project changed; an unchanged one has no row."""

    __tablename__ = "alert_rules"

    project: Mapped[str] = mapped_column(ForeignKey("projects.name"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]
    enabled: Mapped[bool] = mapped_column(default=True)
    severity: Mapped[str]
    limit_value: Mapped[float]
    """In the unit of its kind."""
    for_seconds: Mapped[float]
    """How long it has to be so before anybody is told."""
    jobs: Mapped[str] = mapped_column(default="*")
    """Names of jobs that it looks at, with * and ? for parts of them."""
    changed_at: Mapped[float]
    changed_by: Mapped[str]


class AlertRecord(Base):
    """One rule that was broken by one job, from the first sign of it to its end."""

    __tablename__ = "alerts"
    __table_args__ = (
        Index(
            "uq_alerts_open",
            "job",
            "rule",
            unique=True,
            sqlite_where=text("resolved_at IS NULL"),
            postgresql_where=text("resolved_at IS NULL"),
        ),
        Index(None, "project", "id"),
        Index(None, "job", "id"),
        Index(None, "resolved_at", "id"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    project: Mapped[str] = mapped_column(ForeignKey("projects.name"))
    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"))
    rule: Mapped[str]
    kind: Mapped[str]
    severity: Mapped[str]
    subject: Mapped[str] = mapped_column(default="")
    """What it is about beside the job, where another one of it is another incident: a restore order."""
    value: Mapped[float | None]
    """The measured one, where it is a number that a column holds; the message says more."""
    message: Mapped[str]
    since: Mapped[float]
    """When it began to be so."""
    fired_at: Mapped[float | None]
    """When it had been so for long enough; None: nobody has been told yet."""
    clear_since: Mapped[float | None]
    """Since when it is no longer so; it resolves when that has lasted."""
    acknowledged_at: Mapped[float | None]
    acknowledged_by: Mapped[str | None]
    silenced_until: Mapped[float | None]
    silenced_by: Mapped[str | None]
    resolved_at: Mapped[float | None]
    resolved_why: Mapped[str | None]


class AlertChannelRecord(Base):
    """Where a project's alerts are sent."""

    __tablename__ = "alert_channels"
    __table_args__ = (Index(None, "project"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    project: Mapped[str] = mapped_column(ForeignKey("projects.name"))
    name: Mapped[str]
    kind: Mapped[str]
    """email, webhook, slack or discord."""
    target: Mapped[str]
    """Addresses with commas between, or a URL; the URL of a chat is as secret as a password."""
    secret: Mapped[str]
    """Signs what is sent to a webhook: kept as it is, since a signature cannot be made from a digest of it."""
    least_severity: Mapped[str]
    enabled: Mapped[bool] = mapped_column(default=True)
    created_at: Mapped[float]
    created_by: Mapped[str]


class AlertDeliveryRecord(Base):
    """One message to one channel, written down with what it tells of: a restart loses none."""

    __tablename__ = "alert_deliveries"
    __table_args__ = (
        Index(
            "ix_alert_deliveries_due",
            "next_at",
            sqlite_where=text("state = 'waiting'"),
            postgresql_where=text("state = 'waiting'"),
        ),
        Index(None, "channel", "id"),
        Index(None, "alert"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    channel: Mapped[str] = mapped_column(ForeignKey("alert_channels.id", ondelete="CASCADE"))
    alert: Mapped[int | None] = mapped_column(ForeignKey("alerts.id"))
    """None: a test."""
    event: Mapped[str]
    """firing, resolved or test."""
    payload: Mapped[bytes]
    """What is told, in JSON; the channel's kind decides on its form when it is sent."""
    state: Mapped[str]
    """waiting, delivered or failed."""
    tries: Mapped[int] = mapped_column(default=0)
    created_at: Mapped[float]
    next_at: Mapped[float]
    ended_at: Mapped[float | None]
    error: Mapped[str | None]
