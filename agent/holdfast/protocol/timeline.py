"""The timeline of a job."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from holdfast.protocol.jobs import CheckpointRow, Edit, Order
from holdfast.protocol.messages import StallKind

Window = Literal["1h", "24h", "7d", "all"]
ShortWindow = Literal["10m", "1h", "24h"]


class Mean(Struct, kw_only=True, frozen=True):
    mean: list[float]
    max: list[float]


class Band(Struct, kw_only=True, frozen=True):
    mean: list[float]
    min: list[float]
    max: list[float]


class Series(Struct, kw_only=True, frozen=True):
    """One lineage, by column. A bucket carries the number of its last iteration."""

    lineage: int
    abandoned: bool
    """The job has left it for another, maybe one that goes on from the middle of it, or it is lost."""
    lost: bool = False
    """On the lineage that the job is on, and ahead of the job: a restart took it back, to repeat them."""
    stands_until: int = -1
    """The last of its iterations on the way to where the job is; -1: none is."""
    iteration: list[int]
    at: list[float]
    seconds: Mean
    stall_seconds: list[float]
    """Sum over the bucket."""
    data_seconds: list[float]
    """Sum over the bucket."""
    metrics: dict[str, Band]


class LineageRow(Struct, kw_only=True, frozen=True):
    lineage: int
    iteration: int
    """Where it starts: its first own iteration is the next one."""
    parent: str | None
    order: str | None
    at: float
    last_iteration: int
    abandoned: bool
    """No part of it lies on the way to where the job is."""
    stands_until: int = -1
    """Its last iteration on the way to where the job is; -1: none is."""


class StallRow(Struct, kw_only=True, frozen=True):
    iteration: int
    lineage: int
    kind: StallKind
    seconds: float
    at: float
    abandoned: bool = False
    """It is not on the way to where the job is."""


class Density(Struct, kw_only=True, frozen=True):
    """Checkpoints by bar, by column, where there are more than can be told apart."""

    width: float
    """Of each bar, in what the axis counts: iterations or seconds."""
    start: list[float]
    count: list[int]
    durable: list[int]
    failed: list[int]
    """Failed, torn or damaged."""
    snapshot_seconds: list[float]
    """The longest."""
    persist_seconds: list[float]
    """The longest."""


class StallDensity(Struct, kw_only=True, frozen=True):
    """Stalls of one kind by bar, by column."""

    kind: StallKind
    width: float
    start: list[float] = []
    count: list[int] = []
    seconds: list[float] = []
    """Together."""
    longest_seconds: list[float] = []


class AttemptRow(Struct, kw_only=True, frozen=True):
    attempt: int
    started_at: float
    iteration: int
    lineage: int
    previous_exit: str | None
    finished: str | None
    """Why it ended; None while it runs, or when nobody lived to say."""
    last_iteration: int
    host: str = ""
    resumed_from: str | None = None


class PacedRow(Struct, kw_only=True, frozen=True):
    iteration: int
    lineage: int
    at: float
    interval: int | None
    measured_overhead: float | None
    budget: float
    stands: bool = False
    """It is on the way to where the job is, and not repeated by a later attempt."""


class GapRow(Struct, kw_only=True, frozen=True):
    """Samples that the agent thinned away, for want of room while no server took them."""

    lineage: int
    first_iteration: int
    last_iteration: int
    dropped: int
    """How many of the iterations from first to last."""


class Timeline(Struct, kw_only=True, frozen=True):
    job: str
    lineage: int = 0
    """The lineage that the job is on."""
    extent: tuple[int, int] | None
    """First and last iteration known; None before the first."""
    window: tuple[int, int] | None
    """The iterations asked for; None where time was."""
    times: tuple[float, float] | None = None
    """When the job began, and when the newest iteration that is known ended; seconds since the epoch."""
    silent_since: float | None = None
    """When a job was last heard of that should have said something since; None: it has, or has ended."""
    time_window: tuple[float, float] | None = None
    """The stretch of time asked for; None where iterations were."""
    now: float
    bucketed: bool
    metrics: list[str] = []
    """All that there are, whichever were asked for."""
    series: list[Series]
    lineages: list[LineageRow]
    checkpoints: list[CheckpointRow]
    """All in the window or, of too many, some: then `checkpoint_density` counts all."""
    checkpoints_total: int
    checkpoint_density: Density | None = None
    stalls: list[StallRow]
    """All in the window or, of too many, the longest: then `stall_density` counts all, by kind."""
    stalls_total: int = 0
    stall_density: list[StallDensity] = []
    attempts: list[AttemptRow]
    edits: list[Edit]
    orders: list[Order]
    paced: list[PacedRow]
    gaps: list[GapRow] = []


class StallsOverTime(Struct, kw_only=True, frozen=True):
    """The waits that were long enough to be told one by one, summed up by kind over equal stretches of time."""

    job: str
    window: Window
    begins_at: float
    ends_at: float
    stretch_seconds: float
    seconds: dict[StallKind, list[float]]
    """By kind, the one that took most first; of each stretch, what training waited."""
