"""What a rank did in ten minutes, as sums: what accounts of time and comparisons of ranks are made of."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from holdfast_server.models.base import Base


class Work(Base):
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
