"""The tables.

Rows for what is rare and asked for by identity; samples stay columnar, one compressed chunk per batch and
lineage. What may be nan or inf, and what is only ever read whole, is msgpack: SQLite turns nan into NULL.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, ForeignKey, Index, Integer, LargeBinary, MetaData, UniqueConstraint, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from holdfast.protocol import OPEN_ORDER_STATES

_OPEN = ", ".join(f"'{state}'" for state in OPEN_ORDER_STATES)


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy's own way to declare it
        bytes: LargeBinary,
        # SQLite's integers hold 64 bits anyway, and only INTEGER counts up by itself.
        int: BigInteger().with_variant(Integer, "sqlite"),
    }


class Job(Base):
    """A job: what it reported last, and what people want it to be."""

    __tablename__ = "jobs"

    name: Mapped[str] = mapped_column(primary_key=True)
    created_at: Mapped[float]
    last_contact_at: Mapped[float]

    # Where the current attempt stands, the one that registered last; (uid, sequence) says which batch said so.
    uid: Mapped[str] = mapped_column(default="")
    attempt: Mapped[int] = mapped_column(default=0)
    """The highest number seen. Where a store was deleted, the current attempt's own is lower."""
    sequence: Mapped[int] = mapped_column(default=-1)
    iteration: Mapped[int] = mapped_column(default=0)
    lineage: Mapped[int] = mapped_column(default=0)
    latest_lineage: Mapped[int] = mapped_column(default=0)
    recent: Mapped[bytes] = mapped_column(default=b"")
    """Seconds of the newest iterations and the metrics of the last, in msgpack."""
    paced: Mapped[bytes] = mapped_column(default=b"")
    """The newest Paced event, in msgpack."""

    # What is desired.
    version: Mapped[int] = mapped_column(default=0)
    budget: Mapped[float | None]
    policy: Mapped[str | None]
    every: Mapped[int | None]
    paused: Mapped[bool] = mapped_column(default=False)
    paused_version: Mapped[int] = mapped_column(default=0)
    """The version in which `paused` last changed."""
    checkpoint_request: Mapped[int] = mapped_column(default=0)

    # What the agent says it acts on.
    applied_version: Mapped[int] = mapped_column(default=0)
    applied_iteration: Mapped[int | None]
    applied_at: Mapped[float | None]


class Attempt(Base):
    __tablename__ = "attempts"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    uid: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int]
    started_at: Mapped[float]
    iteration: Mapped[int]
    lineage: Mapped[int]
    last_iteration: Mapped[int]
    iterations: Mapped[int] = mapped_column(default=0)
    """How many it has reported; none: it is still starting."""
    resumed_from: Mapped[str | None]
    host: Mapped[str] = mapped_column(default="")
    pid: Mapped[int] = mapped_column(default=0)
    world_size: Mapped[int] = mapped_column(default=1)
    supervised: Mapped[bool] = mapped_column(default=False)
    previous_exit: Mapped[str | None]
    versions: Mapped[bytes] = mapped_column(default=b"")
    finished_at: Mapped[float | None]
    finished: Mapped[str | None]


class Lineage(Base):
    __tablename__ = "lineages"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    lineage: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    at: Mapped[float]
    iteration: Mapped[int]
    parent: Mapped[str | None]
    order_id: Mapped[str | None]
    last_iteration: Mapped[int]


class Checkpoint(Base):
    __tablename__ = "checkpoints"
    __table_args__ = (Index(None, "job", "state", "iteration"),)

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
    attempt: Mapped[int]
    """With `sequence`, which batch spoke last, so that a late one does not take it back."""
    sequence: Mapped[int]


class Stall(Base):
    __tablename__ = "stalls"
    __table_args__ = (Index(None, "job", "iteration"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"))
    at: Mapped[float]
    iteration: Mapped[int]
    lineage: Mapped[int]
    kind: Mapped[str]
    seconds: Mapped[float]


class Pacing(Base):
    """The intervals that were in force, and the figures behind them."""

    __tablename__ = "pacings"
    __table_args__ = (Index(None, "job", "iteration"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"))
    at: Mapped[float]
    iteration: Mapped[int]
    lineage: Mapped[int]
    interval: Mapped[int | None]
    budget: Mapped[float]
    measured_overhead: Mapped[float | None]


class Notice(Base):
    __tablename__ = "notices"
    __table_args__ = (Index(None, "job", "id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"))
    at: Mapped[float]
    iteration: Mapped[int]
    lineage: Mapped[int]
    level: Mapped[str]
    code: Mapped[str]
    message: Mapped[str]


class SettingsVersion(Base):
    """One version of what is desired: who changed what, and from which iteration on it held."""

    __tablename__ = "settings_versions"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    who: Mapped[str]
    at: Mapped[float]
    changes: Mapped[bytes]
    applied_iteration: Mapped[int | None]
    applied_at: Mapped[float | None]


class RestoreOrder(Base):
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
    from_iteration: Mapped[int]
    from_lineage: Mapped[int]
    new_lineage: Mapped[int | None]
    reason: Mapped[str | None]
    seconds: Mapped[float | None]
    safety_checkpoint: Mapped[str | None]


class OrderTransition(Base):
    __tablename__ = "order_transitions"
    __table_args__ = (Index(None, "order_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[str] = mapped_column(ForeignKey("orders.id"))
    state: Mapped[str]
    at: Mapped[float]
    who: Mapped[str]
    reason: Mapped[str | None]


class Batch(Base):
    """The batches that were committed; what is named here is never stored a second time."""

    __tablename__ = "batches"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    uid: Mapped[str] = mapped_column(primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    sequence: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    received_at: Mapped[float]
    digest: Mapped[bytes]
    """Of its content, so that another one under the same name is noticed."""
    all_before: Mapped[bool] = mapped_column(default=False)
    """It stands for the earlier ones of its rank too, whose rows were pruned."""


class Chunk(Base):
    """Samples of one batch on one lineage, by column, compressed."""

    __tablename__ = "chunks"
    __table_args__ = (Index(None, "job", "rank", "lineage", "first_iteration"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"))
    uid: Mapped[str]
    attempt: Mapped[int]
    rank: Mapped[int]
    sequence: Mapped[int]
    lineage: Mapped[int]
    first_iteration: Mapped[int]
    last_iteration: Mapped[int]
    first_at: Mapped[float]
    last_at: Mapped[float]
    rows: Mapped[int]
    seconds: Mapped[float]
    """Sum over its iterations, so that long stretches are priced without being decoded."""
    columns: Mapped[bytes]
