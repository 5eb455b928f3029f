"""Alert rules, alerts, channels and deliveries."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from holdfast_server.models.base import Base, partial_index


class AlertRuleRecord(Base):
    """A rule of a project, or a built-in one that the project changed; unchanged ones have no row."""

    __tablename__ = "alert_rules"

    project: Mapped[str] = mapped_column(ForeignKey("projects.name"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]
    enabled: Mapped[bool] = mapped_column(default=True)
    severity: Mapped[str]
    limit_value: Mapped[float]
    """Limit in the unit of its kind."""
    window: Mapped[int] = mapped_column(default=0)
    """Number of earlier iterations that a value is compared with."""
    for_seconds: Mapped[float]
    """How long the condition must hold before the alert fires."""
    jobs: Mapped[str] = mapped_column(default="*")
    """Pattern of job names, with * and ?."""
    runbook: Mapped[str] = mapped_column(default="", server_default=text("''"))
    """URL of what to do about its alerts; empty if there is none."""
    changed_at: Mapped[float]
    changed_by: Mapped[str]


class AlertRecord(Base):
    """A violation of a rule by a job, from its start to its end."""

    __tablename__ = "alerts"
    __table_args__ = (
        partial_index("uq_alerts_open", "job", "rule", unique=True, where="resolved_at IS NULL"),
        Index(None, "project", "id"),
        Index(None, "job", "id"),
        Index(None, "resolved_at", "id"),
        Index(None, "fired_at"),
        Index(None, "acknowledged_at"),
        Index(None, "group_id"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    project: Mapped[str] = mapped_column(ForeignKey("projects.name"))
    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"))
    rule: Mapped[str]
    kind: Mapped[str]
    severity: Mapped[str]
    subject: Mapped[str] = mapped_column(default="")
    """Part of the job that the alert is about, such as a restore order, if each has its own alert."""
    value: Mapped[float | None]
    """Measured value, if it is a finite number."""
    message: Mapped[str]
    iteration: Mapped[int | None]
    """Iteration at which the trouble began, if the alert is about one."""
    lineage: Mapped[int | None]
    last_good: Mapped[str | None]
    """Checkpoint that it offers to restore, pinned while it is open."""
    since: Mapped[float]
    """When the condition began to hold."""
    fired_at: Mapped[float | None]
    """When the alert fired; `None` if it has not."""
    clear_since: Mapped[float | None]
    """Since when the condition no longer holds; the alert resolves after a while."""
    acknowledged_at: Mapped[float | None]
    acknowledged_by: Mapped[str | None]
    silenced_until: Mapped[float | None]
    silenced_by: Mapped[str | None]
    resolved_at: Mapped[float | None]
    resolved_why: Mapped[str | None]
    group_id: Mapped[int | None]
    """Number of the alert that opened its group, whose alerts are sent together; `None` until it fires. That alert
    may be deleted before the others."""


class AlertNoteRecord(Base):
    """What a person did about an alert, or wrote about it."""

    __tablename__ = "alert_notes"
    __table_args__ = (Index(None, "alert", "id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    alert: Mapped[int] = mapped_column(ForeignKey("alerts.id", ondelete="CASCADE"))
    at: Mapped[float]
    who: Mapped[str]
    kind: Mapped[str]
    """`comment`, `silenced` or `unsilenced`."""
    text: Mapped[str]


class AlertChannelRecord(Base):
    """Destination of a project's alerts."""

    __tablename__ = "alert_channels"
    __table_args__ = (Index(None, "project"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    project: Mapped[str] = mapped_column(ForeignKey("projects.name"))
    name: Mapped[str]
    kind: Mapped[str]
    """Name of one of the registered kinds of channels."""
    target: Mapped[str]
    """Addresses separated by commas, or a URL; the URL of a chat is as secret as a password."""
    secret: Mapped[str]
    """Key that signs messages, if the kind signs; stored in plain text because signing needs it."""
    least_severity: Mapped[str]
    owner: Mapped[str] = mapped_column(default="", server_default=text("''"))
    """Pattern of the owners of jobs whose alerts it receives; empty for any."""
    labels: Mapped[str] = mapped_column(default="", server_default=text("''"))
    """Patterns of their labels by name, in JSON; empty for any."""
    enabled: Mapped[bool] = mapped_column(default=True)
    created_at: Mapped[float]
    created_by: Mapped[str]


class AlertDeliveryRecord(Base):
    """One message to one channel, stored with its content so that a restart loses none."""

    __tablename__ = "alert_deliveries"
    __table_args__ = (
        partial_index("ix_alert_deliveries_due", "next_at", where="state = 'waiting'"),
        Index(None, "channel", "id"),
        Index(None, "alert"),
        Index(None, "group_id", "channel"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    channel: Mapped[str] = mapped_column(ForeignKey("alert_channels.id", ondelete="CASCADE"))
    alert: Mapped[int | None] = mapped_column(ForeignKey("alerts.id"))
    """Alert that the message was queued for; `None`: a test."""
    group_id: Mapped[int | None]
    """Group that the message is about."""
    event: Mapped[str]
    """`firing`, `resolved` or `test`."""
    payload: Mapped[bytes]
    """Content in msgpack, the same for each try; empty until the first one. The kind of the channel determines its
    format when sent."""
    state: Mapped[str]
    """`waiting`, `delivered` or `failed`."""
    tries: Mapped[int] = mapped_column(default=0)
    created_at: Mapped[float]
    next_at: Mapped[float]
    ended_at: Mapped[float | None]
    error: Mapped[str | None]
