"""Stores, the jobs that write to them, and the limits that operators set."""

from __future__ import annotations

from sqlalchemy import ForeignKey, text
from sqlalchemy.orm import Mapped, mapped_column

from holdfast_server.models.base import Base


class StoreRecord(Base):
    """A store that a job has reported."""

    __tablename__ = "stores"

    id: Mapped[str] = mapped_column(primary_key=True)
    """The id in its root, or one made from its address, for a directory with the host."""
    address: Mapped[str]
    """As the last report has it: a directory may have another path on another host."""
    host: Mapped[str]
    """Host of the last report."""
    at: Mapped[float]
    """Time of the last report."""


class StoreDiskRecord(Base):
    """Space of the file system of a store, as last measured on a day."""

    __tablename__ = "store_disks"

    store: Mapped[str] = mapped_column(primary_key=True)
    """`StoreRecord.id`. A deleted store keeps its days until they are old."""
    day: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Start of the day in seconds since the epoch, in UTC."""
    at: Mapped[float]
    free_bytes: Mapped[int]
    total_bytes: Mapped[int | None]


class StoreWriterRecord(Base):
    """The writes of a job to a store, and its share."""

    __tablename__ = "store_writers"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    address: Mapped[str] = mapped_column(primary_key=True)
    """Address of the store, as this job reports it."""
    store: Mapped[str] = mapped_column(index=True)
    """`StoreRecord.id`."""
    uid: Mapped[str]
    """The attempt that reported last."""
    at: Mapped[float]
    written_bytes: Mapped[int]
    """By this attempt."""
    earlier_bytes: Mapped[int] = mapped_column(server_default=text("0"))
    """By attempts before it."""
    bytes_per_second: Mapped[float | None]
    waiting_bytes: Mapped[int]
    checkpoint_bytes: Mapped[int]
    interval_seconds: Mapped[float | None]
    writing: Mapped[bool]
    wants: Mapped[int]
    """Newest request for a start of a checkpoint."""
    wanted_at: Mapped[float | None]
    started: Mapped[int]
    """Newest request whose checkpoint has begun."""
    earned_at: Mapped[float | None]
    """When its share of a limit has earned its next checkpoint."""
    weight: Mapped[float] = mapped_column(server_default=text("1"))
    """Its part of a limit relative to other jobs, as an operator set it."""

    # What the last division of a limit assigned; NULL without a limit.
    granted: Mapped[int] = mapped_column(server_default=text("0"))
    """Newest request that may begin."""
    granted_at: Mapped[float | None]
    share_bytes_per_second: Mapped[float | None]
    """Rate of its writes now."""
    fair_bytes_per_second: Mapped[float | None]
    """Rate on average, by need and weight."""
    fallback_bytes_per_second: Mapped[float | None]
    longest_wait_seconds: Mapped[float | None]
    holds_seconds: Mapped[float | None]
    number: Mapped[int] = mapped_column(server_default=text("0"))
    """Number of the last change of these columns; see `JobRecord.share_number`."""


class StoreLimitRecord(Base):
    """An operator's limit for all jobs together that write to a store, or to all stores below an address."""

    __tablename__ = "store_limits"

    target: Mapped[str] = mapped_column(primary_key=True)
    """Id of a store, or the beginning of addresses."""
    bytes_per_second: Mapped[float]
    writers: Mapped[int]
    """Checkpoints that are written at the same time."""
    fallback_bytes_per_second: Mapped[float | None]
    """Rate of each job while it has no contact with a server; `None`: an equal part by weight."""
    holds_seconds: Mapped[float]
    """Time without contact after which the fallback applies."""
    who: Mapped[str]
    at: Mapped[float]
