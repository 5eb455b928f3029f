"""What agents reported: batches by name, samples by column, totals of ranks, and rows for what is rare."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from holdfast_server.models.base import Base


class BatchRecord(Base):
    """The batches that were committed; what is named here is never stored a second time."""

    __tablename__ = "batches"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    uid: Mapped[str] = mapped_column(primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    lane: Mapped[str] = mapped_column(primary_key=True, server_default="control")
    sequence: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    received_at: Mapped[float]
    digest: Mapped[bytes]
    """Of its content, so that another one under the same name is noticed."""
    all_before: Mapped[bool] = mapped_column(default=False)
    """It stands for the earlier ones of its rank and lane too, whose rows were pruned."""


class StretchRecord(Base):
    """What one rank of one attempt reported of one lineage: its samples are in chunks and roll-ups."""

    __tablename__ = "stretches"
    __table_args__ = (UniqueConstraint("job", "rank", "lineage", "uid"), Index(None, "last_at"))

    id: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"))
    uid: Mapped[str]
    attempt: Mapped[int]
    rank: Mapped[int]
    lineage: Mapped[int]
    metrics: Mapped[bytes]
    """Their names, in msgpack, in the order of the columns of its roll-ups."""
    first_iteration: Mapped[int]
    last_iteration: Mapped[int]
    last_at: Mapped[float]
    rows: Mapped[int]
    chunks: Mapped[int]
    chunk_bytes: Mapped[int]
    widest: Mapped[int]
    """No chunk reaches over more iterations than this."""
    whole_from: Mapped[int] = mapped_column(default=0, server_default=text("0"))
    """What lies before this iteration was thinned into roll-ups; a multiple of the finest's width."""
    fine_from: Mapped[int] = mapped_column(default=0, server_default=text("0"))
    """What lies before this one, into those of the second level; a multiple of its width."""


class ChunkRecord(Base):
    """Samples on one lineage, by column, compressed: those of one batch, or of several that were merged."""

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


class RollupRecord(Base):
    """What the iterations in one bucket of a stretch come to."""

    __tablename__ = "rollups"

    stretch: Mapped[int] = mapped_column(ForeignKey("stretches.id"), primary_key=True, autoincrement=False)
    level: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """A bucket has 2^level iterations."""
    bucket: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    first_iteration: Mapped[int]
    last_iteration: Mapped[int]
    rows: Mapped[int]
    columns: Mapped[bytes]


class GapRecord(Base):
    """Samples that an agent thinned away."""

    __tablename__ = "gaps"
    __table_args__ = (Index(None, "job", "first_iteration"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"))
    uid: Mapped[str]
    rank: Mapped[int]
    lineage: Mapped[int]
    first_iteration: Mapped[int]
    last_iteration: Mapped[int]
    dropped: Mapped[int]
    at: Mapped[float]
    """When it was told."""


class RetentionRecord(Base):
    """How long a project keeps what its jobs reported. None: for ever, and without a limit."""

    __tablename__ = "retentions"

    project: Mapped[str] = mapped_column(ForeignKey("projects.name"), primary_key=True)
    samples_seconds: Mapped[float | None]
    """Older samples are thinned into roll-ups."""
    fine_seconds: Mapped[float | None]
    """Older roll-ups of the finest level are thinned into those of the second."""
    reports_seconds: Mapped[float | None]
    """Older stalls, notices, gaps, figures of pacing, and alerts that are over go."""
    samples_bytes: Mapped[int | None]
    """Of more, the oldest are thinned into roll-ups."""


class StallRecord(Base):
    __tablename__ = "stalls"
    __table_args__ = (Index(None, "job", "iteration"), Index(None, "job", "at"), Index(None, "job", "kind", "at"))

    id: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"))
    at: Mapped[float]
    iteration: Mapped[int]
    lineage: Mapped[int]
    kind: Mapped[str]
    seconds: Mapped[float]


class PacingRecord(Base):
    """The intervals that were in force, and the figures behind them."""

    __tablename__ = "pacings"
    __table_args__ = (Index(None, "job", "iteration"), Index(None, "job", "at"))

    id: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"))
    at: Mapped[float]
    iteration: Mapped[int]
    lineage: Mapped[int]
    interval: Mapped[int | None]
    budget: Mapped[float]
    measured_overhead: Mapped[float | None]


class NoticeRecord(Base):
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


class WorkRecord(Base):
    """Iterations of one rank, in one attempt and on one lineage, that ended within ten minutes."""

    __tablename__ = "work"
    __table_args__ = (Index(None, "job", "bucket"),)

    # In this order rank 0's rows of a window lie together.
    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    bucket: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """`ends_at` in units of ten minutes, rounded down."""
    uid: Mapped[str] = mapped_column(primary_key=True)
    lineage: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    first_iteration: Mapped[int]
    last_iteration: Mapped[int]
    begins_at: Mapped[float]
    """When the first of them began."""
    ends_at: Mapped[float]
    iterations: Mapped[int]
    """How many were told of: samples may have been thinned away."""
    seconds: Mapped[float]
    longest_seconds: Mapped[float]
    stall_seconds: Mapped[float]
    """Of `seconds`, waits that checkpointing caused."""
    data_seconds: Mapped[float]
    """Of `seconds`, waits for the next batch."""
    barrier_iterations: Mapped[int]
    """Of how many the wait for other ranks was measured."""
    barrier_seconds: Mapped[float]
    """Of the seconds of these, from the rank's own last gradient to the update."""
