"""What happened to a job, iteration by iteration."""

from __future__ import annotations

import msgspec

from holdfast.answers.jobs import CheckpointRow, Edit, Order
from holdfast.protocol import StallKind


class Mean(msgspec.Struct, kw_only=True, frozen=True):
    """A column of a series, by bucket."""

    mean: list[float] = []
    max: list[float] = []


class Band(msgspec.Struct, kw_only=True, frozen=True):
    """A metric of a series, by bucket."""

    mean: list[float] = []
    min: list[float] = []
    max: list[float] = []


class Series(msgspec.Struct, kw_only=True, frozen=True):
    """One lineage, by column. A bucket carries the number of its last iteration."""

    lineage: int = 0
    abandoned: bool = False
    """The job has left it for another, maybe one that goes on from the middle of it, or it is lost."""
    lost: bool = False
    """On the lineage that the job is on, and ahead of the job: a restart took it back, to repeat them."""
    iteration: list[int] = []
    at: list[float] = []
    seconds: Mean = Mean()
    stall_seconds: list[float] = []
    """Sum over the bucket."""
    data_seconds: list[float] = []
    """Sum over the bucket."""
    metrics: dict[str, Band] = {}


class LineageRow(msgspec.Struct, kw_only=True, frozen=True):
    """One line of training, from a start or a restore."""

    lineage: int = 0
    iteration: int = 0
    """Where it starts: its first own iteration is the next one."""
    parent: str | None = None
    order: str | None = None
    at: float = 0.0
    last_iteration: int = 0
    abandoned: bool = False


class StallRow(msgspec.Struct, kw_only=True, frozen=True):
    """One wait."""

    iteration: int = 0
    lineage: int = 0
    kind: StallKind
    seconds: float = 0.0
    at: float = 0.0


class Density(msgspec.Struct, kw_only=True, frozen=True):
    """Checkpoints by bar, by column, where there are more than can be told apart."""

    width: float = 1.0
    """Of each bar, in what the axis counts: iterations or seconds."""
    start: list[float] = []
    count: list[int] = []
    durable: list[int] = []
    failed: list[int] = []
    """Failed, torn or damaged."""
    snapshot_seconds: list[float] = []
    """The longest."""
    persist_seconds: list[float] = []
    """The longest."""


class StallDensity(msgspec.Struct, kw_only=True, frozen=True):
    """Stalls of one kind by bar, by column."""

    kind: StallKind
    width: float = 1.0
    start: list[float] = []
    count: list[int] = []
    seconds: list[float] = []
    """Together."""
    longest_seconds: list[float] = []


class AttemptRow(msgspec.Struct, kw_only=True, frozen=True):
    """One start of a job's processes."""

    attempt: int = 0
    started_at: float = 0.0
    iteration: int = 0
    lineage: int = 0
    previous_exit: str | None = None
    finished: str | None = None
    """Why it ended; None while it runs, or when nobody lived to say."""
    last_iteration: int = 0
    host: str = ""
    resumed_from: str | None = None


class PacedRow(msgspec.Struct, kw_only=True, frozen=True):
    """An interval that was in force."""

    iteration: int = 0
    lineage: int = 0
    at: float = 0.0
    interval: int | None = None
    measured_overhead: float | None = None
    budget: float = 0.0


class GapRow(msgspec.Struct, kw_only=True, frozen=True):
    """Samples that the agent thinned away, for want of room while no server took them."""

    lineage: int = 0
    first_iteration: int = 0
    last_iteration: int = 0
    dropped: int = 0
    """How many of the iterations from first to last."""


class Timeline(msgspec.Struct, kw_only=True, frozen=True):
    """What happened from one iteration to another."""

    job: str
    extent: tuple[int, int] | None = None
    """First and last iteration known; None before the first."""
    window: tuple[int, int] | None = None
    """The iterations asked for; None where time was."""
    times: tuple[float, float] | None = None
    """When the job began, and when the newest iteration that is known ended; seconds since the epoch."""
    silent_since: float | None = None
    """When a job was last heard of that should have said something since; None: it has, or has ended."""
    time_window: tuple[float, float] | None = None
    """The stretch of time asked for; None where iterations were."""
    now: float = 0.0
    bucketed: bool = False
    metrics: list[str] = []
    """All that there are, whichever were asked for."""
    series: list[Series] = []
    lineages: list[LineageRow] = []
    checkpoints: list[CheckpointRow] = []
    """All in the window or, of too many, some: then `checkpoint_density` counts all."""
    checkpoints_total: int = 0
    checkpoint_density: Density | None = None
    stalls: list[StallRow] = []
    """All in the window or, of too many, the longest: then `stall_density` counts all, by kind."""
    stalls_total: int = 0
    stall_density: list[StallDensity] = []
    attempts: list[AttemptRow] = []
    edits: list[Edit] = []
    orders: list[Order] = []
    paced: list[PacedRow] = []
    gaps: list[GapRow] = []
