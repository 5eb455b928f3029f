"""Jobs: their last reports, their desired state, their attempts and lineages."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from holdfast_server.models.base import Base, partial_index

DEFAULT_PROJECT = "default"


class ProjectRecord(Base):
    """A group of jobs with common access rights and retention."""

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
    "training_paused_at",
    "archived_at",
)


class JobRecord(Base):
    """A job: its last reports, and its desired state."""

    __tablename__ = "jobs"
    __table_args__ = (
        # Columns for status, search and order of many jobs, without reading their large rows.
        Index("ix_jobs_standing", *_STANDING),
        partial_index(None, "every_until", where="every_until IS NOT NULL"),
    )

    name: Mapped[str] = mapped_column(primary_key=True)
    project: Mapped[str] = mapped_column(
        ForeignKey("projects.name"), default=DEFAULT_PROJECT, server_default=DEFAULT_PROJECT, index=True
    )
    created_at: Mapped[float]
    last_contact_at: Mapped[float] = mapped_column(index=True)
    """Time of the last report; the page of a large fleet starts with the latest."""
    progressed_at: Mapped[float | None]
    """Time of the last report of a new iteration."""
    archived_at: Mapped[float | None]
    """When a person archived the job; a later report, which is a new start, takes it out of the archive."""

    # Position of the current attempt, the one that registered last, and the sequence numbers of the batches behind
    # it.
    uid: Mapped[str] = mapped_column(default="")
    attempt: Mapped[int] = mapped_column(default=0)
    """Highest attempt number; after a deleted store, the current attempt has a lower one."""
    sequence: Mapped[int] = mapped_column(default=-1)
    """Sequence number of the newest batch in the control lane."""
    samples_sequence: Mapped[int] = mapped_column(default=-1, server_default=text("-1"))
    iteration: Mapped[int] = mapped_column(default=0)
    lineage: Mapped[int] = mapped_column(default=0)
    latest_lineage: Mapped[int] = mapped_column(default=0)
    recent: Mapped[bytes] = mapped_column(default=b"")
    """`samples.RecentSamples` in msgpack: seconds and losses of the newest iterations, and the last metrics."""
    longest_seconds: Mapped[float] = mapped_column(default=0.0, server_default=text("0"))
    """Duration of the longest recent iteration: a job is not silent while another such iteration may run."""
    paced: Mapped[bytes] = mapped_column(default=b"")
    """Newest interval decision (`protocol.wire.IntervalDecision`) in msgpack."""

    # Desired state.
    version: Mapped[int] = mapped_column(default=0)
    share_number: Mapped[int] = mapped_column(default=0, server_default=text("0"))
    """Number of the newest change of its shares of stores, which makes no version."""
    budget: Mapped[float | None]
    write_bytes_per_second: Mapped[float | None]
    """The write budget."""
    max_unsaved_seconds: Mapped[float | None]
    """Maximum unsaved work, as far as both budgets allow it."""
    policy: Mapped[str | None]
    every: Mapped[int | None]
    """Manually set interval in iterations."""
    interval_seconds: Mapped[float | None]
    """Manually set interval in wall-clock time, instead of `every`."""
    every_until: Mapped[float | None]
    """When the manually set interval ends, and the policy decides again; `None`: when an operator ends it."""
    retention: Mapped[str | None]
    """Retention rule as `holdfast.retention` writes it; `None`: the script's own."""
    on_trouble: Mapped[str | None]
    """What to do about wrong losses, as `holdfast.protocol.orders` writes it; `None`: as the script says."""
    paused: Mapped[bool] = mapped_column(default=False)
    paused_version: Mapped[int] = mapped_column(default=0)
    """Version that last changed `paused`."""
    checkpoint_request: Mapped[int] = mapped_column(default=0)
    probe_request: Mapped[int] = mapped_column(default=0, server_default=text("0"))
    pins_known: Mapped[bool] = mapped_column(default=False, server_default=text("false"))
    """Whether an operator ever pinned a checkpoint here; until then the pins of the store apply."""

    training_order: Mapped[str | None]
    """`protocol.TrainingOrder` in JSON: the newest order to pause, continue or end training."""

    protected: Mapped[bool] = mapped_column(default=False, server_default=text("false"))
    """Whether restores, pauses, ends and values need the approval of a second person."""

    delivered_version: Mapped[int] = mapped_column(default=0, server_default=text("0"))
    """Newest version that the agent has received, as its request for a later one shows."""

    # Applied state, as the agent reports it.
    applied_version: Mapped[int] = mapped_column(default=0)
    applied_iteration: Mapped[int | None]
    applied_at: Mapped[float | None]
    training_paused_at: Mapped[float | None]
    """Since when training is paused, as its agent reports; of a job that has ended: as it ended."""
    training_paused_by: Mapped[str | None]


class AttemptRecord(Base):
    __tablename__ = "attempts"
    __table_args__ = (Index(None, "job", "started_at"), Index(None, "started_at"))

    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    uid: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int]
    started_at: Mapped[float]
    iteration: Mapped[int]
    lineage: Mapped[int]
    last_iteration: Mapped[int]
    iterations: Mapped[int] = mapped_column(default=0)
    """Number of reported iterations; 0 while it is starting."""
    resumed_from: Mapped[str | None]
    host: Mapped[str] = mapped_column(default="")
    pid: Mapped[int] = mapped_column(default=0)
    world_size: Mapped[int] = mapped_column(default=1)
    supervised: Mapped[bool] = mapped_column(default=False)
    previous_exit: Mapped[str | None]
    versions: Mapped[bytes] = mapped_column(default=b"")
    owner: Mapped[str | None]
    labels: Mapped[str | None]
    """Values by name as JSON without spaces, in which a label can be searched for."""
    finished_at: Mapped[float | None]
    finished: Mapped[str | None]
    ended_by: Mapped[str | None]
    """Who ended it on request."""
    restore_mode: Mapped[str | None]
    """How it restores (`protocol.RestoreMode`); `None` until reported."""
    restore_reason: Mapped[str | None]
    on_trouble: Mapped[str | None]
    """What it does about wrong losses; `None` until reported."""
    batches_an_iteration: Mapped[int | None]
    """Batches that each iteration takes; `None` or 0: unknown, or they differ."""
    start_seconds: Mapped[float | None]
    """Time from the start of its processes to its first iteration."""
    stores: Mapped[str | None]
    """Addresses of its store, and of the one behind it, as a list in JSON."""
    exception: Mapped[str | None]
    """The line of its output that names the exception of the last traceback."""
    supervisor: Mapped[str | None]
    """What its supervisor last reported to do (`protocol.SupervisorState`). An attempt that a supervisor restarts
    begins with the report on the attempt before it, without a time limit."""
    supervisor_until: Mapped[float | None]
    """When a restart counts as failed, unless the supervisor reports again."""
    supervisor_report: Mapped[bytes | None]
    """That report (`protocol.SupervisorReport`) in msgpack."""


class AttemptConfigurationRecord(Base):
    """One section of the configuration of an attempt: `protocol.ConfigurationSection`."""

    __tablename__ = "attempt_configurations"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    uid: Mapped[str] = mapped_column(primary_key=True)
    section: Mapped[str] = mapped_column(primary_key=True)
    contents: Mapped[bytes]
    """Values by name in msgpack, compressed."""


class OutputRecord(Base):
    """Lines of an attempt's output, of one report."""

    __tablename__ = "attempt_output"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    uid: Mapped[str] = mapped_column(primary_key=True)
    first: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Number of the first line."""
    end: Mapped[int]
    """Number behind the last line."""
    contents: Mapped[bytes]
    """List of lines in msgpack, compressed."""


class HostMemoryRecord(Base):
    """What the memory of a host holds, as its first rank last reported."""

    __tablename__ = "host_memories"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    uid: Mapped[str]
    """Attempt that reported it."""
    host: Mapped[str]
    at: Mapped[float]
    snapshots: Mapped[bytes]
    """List of `protocol.HeldSnapshot` in msgpack."""


class RankPlaceRecord(Base):
    """Where a rank of the newest attempt runs (`protocol.RankPlace`)."""

    __tablename__ = "rank_places"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    uid: Mapped[str]
    """Attempt that reported it."""
    at: Mapped[float]
    host: Mapped[str]
    device: Mapped[str]
    scheduler_job: Mapped[str]


class LineageRecord(Base):
    __tablename__ = "lineages"
    __table_args__ = (partial_index(None, "from_job", where="from_job IS NOT NULL"),)

    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    lineage: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    at: Mapped[float]
    iteration: Mapped[int]
    parent: Mapped[str | None]
    order_id: Mapped[str | None]
    last_iteration: Mapped[int]
    from_job: Mapped[str | None]
    """Source job of a fork, on its first lineage."""
    from_checkpoint: Mapped[str | None]
    from_digest: Mapped[str | None]
    inexact: Mapped[str | None]
    """Checkpoint whose degraded restore its state descends from."""
    left_out: Mapped[str | None]
    """List of `wire.LeftOutData` in JSON: data that restores left out on the way to its state."""


class ApprovalRecord(Base):
    """A request about a protected job, which a second person approves or declines."""

    __tablename__ = "approvals"
    __table_args__ = (Index(None, "job", "created_at"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"))
    what: Mapped[str]
    request: Mapped[str]
    """`approvals.Wish` in JSON."""
    who: Mapped[str]
    owner: Mapped[str]
    """The person who asked, also with a key: cannot approve it."""
    created_at: Mapped[float]
    expires_at: Mapped[float]
    state: Mapped[str]
    """`waiting`, also after it has expired, `approved` or `declined`."""
    decided_by: Mapped[str | None]
    decided_at: Mapped[float | None]


class SettingsVersionRecord(Base):
    """One version of the desired state: its author, its changes, and from which iteration on it applied."""

    __tablename__ = "settings_versions"
    __table_args__ = (Index(None, "at"),)

    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    who: Mapped[str]
    at: Mapped[float]
    changes: Mapped[str]
    """List of `desired.StoredChange` in JSON."""
    applied_iteration: Mapped[int | None]
    applied_at: Mapped[float | None]
