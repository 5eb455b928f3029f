"""Reports of agents: names of batches, samples by column, totals of ranks, and single events."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from holdfast_server.models.base import Base, JobRow, TrainingRow


class BatchRecord(Base):
    """Name of a stored batch, which is not stored a second time."""

    __tablename__ = "batches"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    uid: Mapped[str] = mapped_column(primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    lane: Mapped[str] = mapped_column(primary_key=True, server_default="control")
    sequence: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    received_at: Mapped[float]
    digest: Mapped[bytes]
    """Digest of its body, to detect a different batch of the same name."""
    covers_earlier: Mapped[bool] = mapped_column(default=False)
    """Whether it represents the earlier batches of its rank and lane, whose rows were pruned."""


class SampleSeriesRecord(JobRow, Base):
    """Samples of one rank of one attempt on one lineage; its values are in chunks and roll-ups."""

    __tablename__ = "sample_series"
    __table_args__ = (UniqueConstraint("job", "rank", "lineage", "uid"), Index(None, "last_at"))

    uid: Mapped[str]
    attempt: Mapped[int]
    rank: Mapped[int]
    lineage: Mapped[int]
    metrics: Mapped[bytes]
    """Names of the metrics in msgpack, in the order of the columns of its roll-ups."""
    first_iteration: Mapped[int]
    last_iteration: Mapped[int]
    last_at: Mapped[float]
    rows: Mapped[int]
    chunks: Mapped[int]
    chunk_bytes: Mapped[int]
    widest_chunk: Mapped[int]
    """Iterations between first and last of its widest chunk."""
    chunks_from: Mapped[int] = mapped_column(default=0, server_default=text("0"))
    """Iteration before which chunks were downsampled to roll-ups, a multiple of the finest width."""
    finest_from: Mapped[int] = mapped_column(default=0, server_default=text("0"))
    """Iteration before which the finest roll-ups were removed, a multiple of the second width."""


class ChunkRecord(JobRow, Base):
    """Compressed samples on one lineage, of one batch or of several merged ones."""

    __tablename__ = "chunks"
    __table_args__ = (Index(None, "job", "rank", "lineage", "first_iteration"),)

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
    """Sum over its iterations, available without decoding."""
    columns: Mapped[bytes]


class RollupRecord(Base):
    """Statistics of the iterations in one bucket of a series."""

    __tablename__ = "rollups"

    series: Mapped[int] = mapped_column(ForeignKey("sample_series.id"), primary_key=True, autoincrement=False)
    level: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Binary logarithm of the iterations in a bucket."""
    bucket: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    first_iteration: Mapped[int]
    last_iteration: Mapped[int]
    rows: Mapped[int]
    columns: Mapped[bytes]


class GapRecord(JobRow, Base):
    """Range of samples that an agent dropped."""

    __tablename__ = "gaps"
    __table_args__ = (Index(None, "job", "first_iteration"),)

    uid: Mapped[str]
    rank: Mapped[int]
    lineage: Mapped[int]
    first_iteration: Mapped[int]
    last_iteration: Mapped[int]
    dropped: Mapped[int]
    at: Mapped[float]
    """Time of the report."""


class RetentionRecord(Base):
    """Retention settings of a project's reports. `None`: without a limit."""

    __tablename__ = "retentions"

    project: Mapped[str] = mapped_column(ForeignKey("projects.name"), primary_key=True)
    samples_seconds: Mapped[float | None]
    """Age from which on samples are downsampled to roll-ups."""
    fine_seconds: Mapped[float | None]
    """Age from which on roll-ups of the finest level are removed."""
    reports_seconds: Mapped[float | None]
    """Age from which on stalls, notices, gaps, interval decisions and resolved alerts are deleted."""
    samples_bytes: Mapped[int | None]
    """Limit on the size of samples; the oldest are downsampled to roll-ups."""


class TrainingPauseRecord(TrainingRow, Base):
    """A time in which an attempt was paused on request, from `at` on."""

    __tablename__ = "training_pauses"
    __table_args__ = (Index(None, "job", "at"),)

    uid: Mapped[str]
    who: Mapped[str]
    ended_at: Mapped[float | None]
    """`None` while it lasts, and where its attempt ended without a report."""


class StallRecord(TrainingRow, Base):
    __tablename__ = "stalls"
    __table_args__ = (Index(None, "job", "iteration"), Index(None, "job", "at"), Index(None, "job", "kind", "at"))

    kind: Mapped[str]
    seconds: Mapped[float]


class IntervalDecisionRecord(TrainingRow, Base):
    """An interval decision of the agent's policy, with its inputs."""

    __tablename__ = "interval_decisions"
    __table_args__ = (Index(None, "job", "iteration"), Index(None, "job", "at"))

    interval: Mapped[int | None]
    interval_seconds: Mapped[float | None]
    """The interval where it is fixed in wall-clock time."""
    budget: Mapped[float]
    measured_overhead: Mapped[float | None]


class NoticeRecord(TrainingRow, Base):
    __tablename__ = "notices"
    __table_args__ = (Index(None, "job", "id"),)

    level: Mapped[str]
    code: Mapped[str]
    message: Mapped[str]


class AnnotationRecord(TrainingRow, Base):
    """An annotation at an iteration, by a person or by the script.

    `lineage` had the iteration on its path when the note was written. `at` is the time of the iteration, or of the
    note if that is unknown.
    """

    __tablename__ = "annotations"
    __table_args__ = (Index(None, "job", "iteration"), Index(None, "job", "at"), Index(None, "written_at"))

    text: Mapped[str]
    who: Mapped[str | None]
    """User name; `None` for the script."""
    written_at: Mapped[float]


class RankTotalsRecord(Base):
    """Totals of one rank's iterations, on one attempt and lineage, that ended within ten minutes."""

    __tablename__ = "rank_totals"
    __table_args__ = (Index(None, "job", "bucket"),)

    # In this order, rank 0's rows of a window are adjacent.
    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    bucket: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Number of the ten minutes: `ends_at` / 600 s, rounded down."""
    uid: Mapped[str] = mapped_column(primary_key=True)
    lineage: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    first_iteration: Mapped[int]
    last_iteration: Mapped[int]
    begins_at: Mapped[float]
    """Start of the first iteration."""
    ends_at: Mapped[float]
    iterations: Mapped[int]
    """Number of reported iterations, without dropped samples."""
    seconds: Mapped[float]
    longest_seconds: Mapped[float]
    stall_seconds: Mapped[float]
    """Part of `seconds` that waited for checkpointing."""
    data_seconds: Mapped[float]
    """Part of `seconds` that waited for the next batch."""
    barrier_iterations: Mapped[int]
    """Number of iterations with a measured wait for other ranks."""
    barrier_seconds: Mapped[float]
    """Time of these from the rank's last gradient to the update."""
