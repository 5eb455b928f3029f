"""The account: GPU time and written bytes of jobs by hour and day. It outlives the jobs, so it refers to none."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from holdfast_server.models.base import Base


class AccountGroupRecord(Base):
    """What periods are summed by: a job with its project, owner, labels and store at that time."""

    __tablename__ = "account_groups"
    __table_args__ = (Index(None, "job"), Index(None, "last_at"))

    id: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[bytes] = mapped_column(unique=True)
    """Digest of the next six columns, which together may be too long for an index."""
    job: Mapped[str]
    created_at: Mapped[float]
    """`jobs.created_at`: a later job of the same name is another one."""
    project: Mapped[str]
    owner: Mapped[str]
    labels: Mapped[str]
    """As `attempts.labels`; empty without labels."""
    store: Mapped[str]
    """Address of the store; empty if unknown."""
    last_at: Mapped[int]
    """Start of its newest period of an hour."""


class AccountPeriodRecord(Base):
    """An hour or a day of a group. Times are microseconds multiplied by ranks, one column for each category."""

    __tablename__ = "account_periods"
    __table_args__ = ({"sqlite_with_rowid": False},)

    group_id: Mapped[int] = mapped_column(
        ForeignKey("account_groups.id", ondelete="CASCADE"), primary_key=True, autoincrement=False
    )
    seconds: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """3,600 or 86,400."""
    begins_at: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    productive: Mapped[int]
    snapshot_wait: Mapped[int]
    checkpoint_slowdown: Mapped[int]
    data_fetch: Mapped[int]
    barrier: Mapped[int]
    paused: Mapped[int]
    restoring: Mapped[int]
    starting: Mapped[int]
    lost: Mapped[int]
    down: Mapped[int]
    unexplained: Mapped[int]
    saved: Mapped[int]
    """Time of iterations that checkpoints within an epoch kept over a failure."""
    failures: Mapped[int]
    uncompared_failures: Mapped[int]
    """Number of these that saved an unknown time, since the length of an epoch is unknown."""
    written_bytes: Mapped[int]


class AccountJobRecord(Base):
    """Up to where the account of a job is final, and what it has stored."""

    __tablename__ = "account_jobs"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    accounted_at: Mapped[float]
    uid: Mapped[str]
    """Current attempt at that time."""
    started_at: Mapped[float]
    """Start of that attempt on its clock."""
    has_begun: Mapped[bool]
    """Whether that attempt had reported where it starts."""
    lineage: Mapped[int]
    settled_at: Mapped[float]
    """Time before which no report is missing."""
    pending_at: Mapped[float]
    """What `settled_at` becomes once all reports from before `pending_since` have arrived."""
    pending_since: Mapped[float]
    store: Mapped[str]
    stored_bytes: Mapped[int]
    backing_store: Mapped[str]
    """Address of the store behind; empty without one."""
    backing_bytes: Mapped[int]
    is_estimate: Mapped[bool]
    """Whether checkpoints share files in a way that the server does not know."""
    unsized_checkpoints: Mapped[int]
    """Number of stored checkpoints of unknown size."""
