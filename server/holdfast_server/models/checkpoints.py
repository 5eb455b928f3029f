"""Checkpoints, and orders to go back to one."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from holdfast.protocol.messages import OPEN_ORDER_STATES
from holdfast_server.models.base import Base

_OPEN = ", ".join(f"'{state}'" for state in OPEN_ORDER_STATES)


class CheckpointRecord(Base):
    __tablename__ = "checkpoints"
    __table_args__ = (
        Index(None, "job", "state", "iteration"),
        # Written as `taken_at` of the questions is, and in parentheses for PostgreSQL.
        Index("ix_checkpoints_taken", "job", text("(coalesce(snapshot_started_at, at))")),
        Index(
            "ix_checkpoints_pinned",
            "job",
            "id",
            sqlite_where=text("pinned_at IS NOT NULL"),
            postgresql_where=text("pinned_at IS NOT NULL"),
        ),
    )

    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    id: Mapped[str] = mapped_column(primary_key=True)
    iteration: Mapped[int]
    lineage: Mapped[int]
    at: Mapped[float]
    kind: Mapped[str]
    state: Mapped[str]
    payload_bytes: Mapped[int] = mapped_column(default=0)
    snapshot_started_at: Mapped[float | None]
    snapshot_seconds: Mapped[float | None]
    stall_seconds: Mapped[float | None]
    persist_started_at: Mapped[float | None]
    persist_seconds: Mapped[float | None]
    durable_iteration: Mapped[int | None]
    reason: Mapped[str | None]
    store_free_bytes: Mapped[int | None]
    ranks: Mapped[bytes | None]
    """`protocol.RankSpans` in msgpack; None for a job of one rank."""
    label: Mapped[str | None]
    """What an operator calls it."""
    pinned_by: Mapped[str | None]
    """Who keeps it against retention; None: nobody."""
    pinned_at: Mapped[float | None]
    attempt: Mapped[int]
    """With `sequence`, which batch spoke last, so that a late one does not take it back."""
    sequence: Mapped[int]


class VerificationRecord(Base):
    """The newest request to read a checkpoint back, how far that is, and the newest verdict there is on it."""

    __tablename__ = "verifications"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    checkpoint: Mapped[str] = mapped_column(primary_key=True)
    request: Mapped[int]
    """The version of what is desired that it came with."""
    against: Mapped[str | None]
    """Which other one its tensors are to be compared with."""
    asked_by: Mapped[str]
    asked_at: Mapped[float]
    state: Mapped[str]
    at: Mapped[float]
    """When `state` was last told."""
    host: Mapped[str] = mapped_column(default="")
    read_bytes: Mapped[int] = mapped_column(default=0)
    total_bytes: Mapped[int] = mapped_column(default=0)
    seconds: Mapped[float | None]
    reason: Mapped[str | None]

    verdict: Mapped[str | None]
    """`sound` or `damaged`: of the last time that it could be read, which a later request does not take away."""
    verified_at: Mapped[float | None]
    verified_host: Mapped[str] = mapped_column(default="")
    tensors: Mapped[bytes | None]
    """`protocol.TensorNorms` in msgpack, compressed."""
    tensors_at: Mapped[float | None]
    tensors_against: Mapped[str | None]


class RestoreOrderRecord(Base):
    __tablename__ = "orders"
    __table_args__ = (
        UniqueConstraint("job", "key"),
        # The rule that a job goes back to one place at a time holds in the database, whatever the code does.
        Index(
            "uq_orders_open",
            "job",
            unique=True,
            sqlite_where=text(f"state IN ({_OPEN})"),
            postgresql_where=text(f"state IN ({_OPEN})"),
        ),
        Index(None, "job", "created_at"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"))
    key: Mapped[str]
    checkpoint: Mapped[str]
    iteration: Mapped[int]
    state: Mapped[str]
    created_at: Mapped[float]
    who: Mapped[str]
    fence: Mapped[int]
    expires_at: Mapped[float | None]
    """None: placed before orders had a time of their own, and ended since."""
    overruled: Mapped[str | None]
    """The last state that was to be its end, and was not: what the agent had done came first."""
    taken_by: Mapped[int | None]
    """The attempt that moved it last; one before that has no more say in it."""
    from_iteration: Mapped[int]
    from_lineage: Mapped[int]
    new_lineage: Mapped[int | None]
    reason: Mapped[str | None]
    seconds: Mapped[float | None]
    safety_checkpoint: Mapped[str | None]


class OrderTransitionRecord(Base):
    __tablename__ = "order_transitions"
    __table_args__ = (Index(None, "order_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[str] = mapped_column(ForeignKey("orders.id"))
    state: Mapped[str]
    at: Mapped[float]
    who: Mapped[str]
    reason: Mapped[str | None]
