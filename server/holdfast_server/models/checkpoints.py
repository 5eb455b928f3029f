"""Checkpoints, their verifications, and restore orders."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, UniqueConstraint, false, text
from sqlalchemy.orm import Mapped, mapped_column

from holdfast.protocol.wire import OPEN_ORDER_STATES
from holdfast_server.models.base import Base, partial_index

_OPEN = ", ".join(f"'{state}'" for state in OPEN_ORDER_STATES)


class CheckpointRecord(Base):
    __tablename__ = "checkpoints"
    __table_args__ = (
        Index(None, "job", "state", "iteration"),
        # the expression of `checkpoints.taken_at`, in parentheses for PostgreSQL
        Index("ix_checkpoints_taken", "job", text("(coalesce(snapshot_started_at, at))")),
        partial_index("ix_checkpoints_pinned", "job", "id", where="pinned_at IS NOT NULL"),
    )

    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    id: Mapped[str] = mapped_column(primary_key=True)
    iteration: Mapped[int]
    lineage: Mapped[int]
    at: Mapped[float]
    kind: Mapped[str]
    state: Mapped[str]
    payload_bytes: Mapped[int] = mapped_column(default=0)
    reused_bytes: Mapped[int] = mapped_column(default=0)
    raw_bytes: Mapped[int] = mapped_column(default=0)
    snapshot_started_at: Mapped[float | None]
    snapshot_seconds: Mapped[float | None]
    stall_seconds: Mapped[float | None]
    persist_started_at: Mapped[float | None]
    persist_seconds: Mapped[float | None]
    durable_iteration: Mapped[int | None]
    reason: Mapped[str | None]
    store_free_bytes: Mapped[int | None]
    ranks: Mapped[bytes | None]
    """`protocol.RankCheckpointTimes` in msgpack; None for a job of one rank."""
    changed: Mapped[bytes | None]
    """`protocol.ChangedTensor` in msgpack; None unless it is incremental."""
    metrics: Mapped[bytes | None]
    """`wire.Checkpoint.metrics` in msgpack: they may be NaN. `None` if there are none."""
    label: Mapped[str | None]
    """Name that an operator gave it."""
    pinned_by: Mapped[str | None]
    """User who pinned it, which protects it from retention; `None`: not pinned."""
    pinned_at: Mapped[float | None]
    copy_place: Mapped[str | None]
    """`protocol.CopyPlace`; `None`: it has no copy in a store behind."""
    attempt: Mapped[int]
    """Attempt of the newest report, with `sequence`, so that a late report does not overwrite it."""
    sequence: Mapped[int]


class VerificationRecord(Base):
    """Newest request to verify a checkpoint, its progress, and the newest verdict."""

    __tablename__ = "verifications"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    checkpoint: Mapped[str] = mapped_column(primary_key=True)
    request: Mapped[int]
    """Version of the desired state that contains the request."""
    against: Mapped[str | None]
    """Checkpoint whose tensors to compare."""
    asked_by: Mapped[str]
    asked_at: Mapped[float]
    state: Mapped[str]
    at: Mapped[float]
    """Time of the last report of `state`."""
    host: Mapped[str] = mapped_column(default="")
    read_bytes: Mapped[int] = mapped_column(default=0)
    total_bytes: Mapped[int] = mapped_column(default=0)
    seconds: Mapped[float | None]
    reason: Mapped[str | None]

    verdict: Mapped[str | None]
    """Verdict of the last complete verification, `sound` or `damaged`; a later request keeps it."""
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
        # the database enforces that a job has at most one open order
        partial_index("uq_orders_open", "job", unique=True, where=f"state IN ({_OPEN})"),
        Index(None, "job", "created_at"),
        Index(None, "created_at"),
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
    """Time at which it expires unless an attempt has started it."""
    overruled_state: Mapped[str | None]
    """Final state that a later report of the agent overruled."""
    taken_by_attempt: Mapped[int | None]
    """Attempt that last reported on it; reports of earlier attempts are ignored."""
    from_iteration: Mapped[int]
    from_lineage: Mapped[int]
    new_lineage: Mapped[int | None]
    reason: Mapped[str | None]
    seconds: Mapped[float | None]
    safety_checkpoint: Mapped[str | None]
    degraded: Mapped[bool] = mapped_column(server_default=false())
    """Whether lost bytes may be replaced where only the important bytes of the checkpoint are left."""
    skip: Mapped[str | None]
    """`wire.DataSkip` in JSON: the data to leave out."""


class OrderTransitionRecord(Base):
    __tablename__ = "order_transitions"
    __table_args__ = (Index(None, "order_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[str] = mapped_column(ForeignKey("orders.id"))
    state: Mapped[str]
    at: Mapped[float]
    who: Mapped[str]
    reason: Mapped[str | None]
