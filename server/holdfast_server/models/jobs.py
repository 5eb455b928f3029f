"""Jobs: what they reported last, what people want them to be, and the starts and lines of their training."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from holdfast_server.models.base import Base

DEFAULT_PROJECT = "default"


class ProjectRecord(Base):
    """Jobs that belong together: people have their rights, and reports their retention, by project."""

    __tablename__ = "projects"

    name: Mapped[str] = mapped_column(primary_key=True)
    created_at: Mapped[float]


_STANDING = (
    "project",
    "name",
    "uid",
    "last_contact_at",
    "longest_seconds",
    "paused",
    "paused_version",
    "applied_version",
    "iteration",
)


class JobRecord(Base):
    """A job: what it reported last, and what people want it to be."""

    __tablename__ = "jobs"
    __table_args__ = (
        # What the status, the search and the order of many jobs go by, apart from the bulk of their rows.
        Index("ix_jobs_standing", *_STANDING),
        Index(
            None,
            "every_until",
            sqlite_where=text("every_until IS NOT NULL"),
            postgresql_where=text("every_until IS NOT NULL"),
        ),
    )

    name: Mapped[str] = mapped_column(primary_key=True)
    project: Mapped[str] = mapped_column(
        ForeignKey("projects.name"), default=DEFAULT_PROJECT, server_default=DEFAULT_PROJECT, index=True
    )
    created_at: Mapped[float]
    last_contact_at: Mapped[float] = mapped_column(index=True)
    """The last heard of come first: where the page of a large fleet begins."""
    progressed_at: Mapped[float | None]
    """When the server last heard of an iteration that it had not heard of."""

    # Where the current attempt stands, the one that registered last; (uid, sequence) says which batch said so.
    uid: Mapped[str] = mapped_column(default="")
    attempt: Mapped[int] = mapped_column(default=0)
    """The highest number seen. Where a store was deleted, the current attempt's own is lower."""
    sequence: Mapped[int] = mapped_column(default=-1)
    """Of the control lane; `samples_sequence` of the other."""
    samples_sequence: Mapped[int] = mapped_column(default=-1, server_default=text("-1"))
    iteration: Mapped[int] = mapped_column(default=0)
    lineage: Mapped[int] = mapped_column(default=0)
    latest_lineage: Mapped[int] = mapped_column(default=0)
    recent: Mapped[bytes] = mapped_column(default=b"")
    """Seconds of the newest iterations and the metrics of the last, in msgpack."""
    longest_seconds: Mapped[float] = mapped_column(default=0.0, server_default=text("0"))
    """Of the newest iterations the longest: a job is not silent while one more of these may be under way."""
    paced: Mapped[bytes] = mapped_column(default=b"")
    """The newest Paced event, in msgpack."""

    # What is desired.
    version: Mapped[int] = mapped_column(default=0)
    budget: Mapped[float | None]
    policy: Mapped[str | None]
    every: Mapped[int | None]
    every_until: Mapped[float | None]
    """When the interval ordered by hand ends, and the policy decides again; None: when somebody says so."""
    retention: Mapped[str | None]
    """Which checkpoints stay, as `holdfast.protocol.retention` spells it; None: as the script has it."""
    paused: Mapped[bool] = mapped_column(default=False)
    paused_version: Mapped[int] = mapped_column(default=0)
    """The version in which `paused` last changed."""
    checkpoint_request: Mapped[int] = mapped_column(default=0)
    probe_request: Mapped[int] = mapped_column(default=0, server_default=text("0"))
    pins_known: Mapped[bool] = mapped_column(default=False, server_default=text("false"))
    """Whether anyone ever pinned a checkpoint here; until then the pins in the store stand."""

    delivered_version: Mapped[int] = mapped_column(default=0, server_default=text("0"))
    """Which the agent has shown to hold, by asking for a later one."""

    # What the agent says it acts on.
    applied_version: Mapped[int] = mapped_column(default=0)
    applied_iteration: Mapped[int | None]
    applied_at: Mapped[float | None]


class AttemptRecord(Base):
    __tablename__ = "attempts"
    __table_args__ = (Index(None, "job", "started_at"),)

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
    owner: Mapped[str | None]
    labels: Mapped[bytes | None]
    """In msgpack, by name."""
    finished_at: Mapped[float | None]
    finished: Mapped[str | None]
    restore_mode: Mapped[str | None]
    """How its script is taken back, as `protocol.RestoreMode` says; None: it has not said."""
    restore_reason: Mapped[str | None]
    start_seconds: Mapped[float | None]
    """From the start of its processes to training."""


class LineageRecord(Base):
    __tablename__ = "lineages"
    __table_args__ = (
        Index(
            None,
            "from_job",
            sqlite_where=text("from_job IS NOT NULL"),
            postgresql_where=text("from_job IS NOT NULL"),
        ),
    )

    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    lineage: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    at: Mapped[float]
    iteration: Mapped[int]
    parent: Mapped[str | None]
    order_id: Mapped[str | None]
    last_iteration: Mapped[int]
    from_job: Mapped[str | None]
    """Of the first lineage of a fork: the job that `from_checkpoint` was copied from."""
    from_checkpoint: Mapped[str | None]
    from_digest: Mapped[str | None]


class SettingsVersionRecord(Base):
    """One version of what is desired: who changed what, and from which iteration on it held."""

    __tablename__ = "settings_versions"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    who: Mapped[str]
    at: Mapped[float]
    changes: Mapped[str]
    """A list of `desired.Changed` in JSON."""
    applied_iteration: Mapped[int | None]
    applied_at: Mapped[float | None]
