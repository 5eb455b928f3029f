"""Responses on the timeline of a job."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from holdfast.protocol.field_types import Time
from holdfast.protocol.jobs import Annotation, CheckpointInfo, Edit, Order
from holdfast.protocol.wire import LeftOutData, StallKind

Window = Literal["1h", "24h", "7d", "all"]
ShortWindow = Literal["10m", "1h", "24h"]


class MeanAndMax(Struct, kw_only=True, frozen=True):
    mean: list[float]
    max: list[float]


class MinMeanMax(Struct, kw_only=True, frozen=True):
    mean: list[float]
    min: list[float]
    max: list[float]


class Series(Struct, kw_only=True, frozen=True):
    """The samples of one lineage, as columns. A bucket has the number of its last iteration."""

    lineage: int
    abandoned: bool
    """Whether the job continued on another lineage, or lost these iterations."""
    lost: bool = False
    """Whether a restart repeats these iterations on the current lineage."""
    stands_until: int = -1
    """Its last iteration on the path to the current one; -1: none."""
    iteration: list[int]
    at: list[float]
    seconds: MeanAndMax
    stall_seconds: list[float]
    """Sum over the bucket."""
    data_seconds: list[float]
    """Sum over the bucket."""
    metrics: dict[str, MinMeanMax]


ComparisonAxis = Literal["iteration", "elapsed", "time"]


class ComparedCurve(Struct, kw_only=True, frozen=True):
    """A metric of a job, or of one of its lineages, as columns."""

    metric: str
    x: list[float]
    """Iterations, seconds since the start of the job, or seconds since the epoch; of a bucket, its end."""
    mean: list[float]
    """Mean of the bucket; may be nan or inf."""
    newest: float
    """The last mean of the finest buckets that were read."""
    lowest: float | None
    """Lowest value of a single iteration in the window; `None`: none is finite."""
    not_finite_from: int | None
    """Iteration, or the first of its bucket, from which on no value is finite; `None`: the newest one is."""


class ComparedJob(Struct, kw_only=True, frozen=True):
    """One job, or one lineage of it, in a comparison."""

    name: str
    """As requested: `job`, or `job:lineage`."""
    job: str
    lineage: int | None
    """The only lineage that is shown; `None`: all that leads to the current iteration."""
    lineages: list[int]
    """All lineages of the job."""
    started_at: float | None
    """Start of the job; `None` before its first iteration."""
    last_iteration: int
    origin: str | None
    """Job that it was forked from, if the caller may view it."""
    origin_iteration: int | None
    """Iteration of the forked checkpoint."""
    bucket_iterations: int
    """Iterations whose mean is one point of its curves; with the axis `iteration` the same for all jobs."""
    curves: list[ComparedCurve]
    """One for each requested metric that it reports."""


class Comparison(Struct, kw_only=True, frozen=True):
    """Metrics of several jobs on one axis."""

    axis: ComparisonAxis
    metrics: list[str]
    """Metrics that at least one of the jobs reports."""
    jobs: list[ComparedJob]


class LineageInfo(Struct, kw_only=True, frozen=True):
    lineage: int
    iteration: int
    """Iteration that it starts from; its first is the next one."""
    parent: str | None
    order: str | None
    at: Time
    last_iteration: int
    abandoned: bool
    """Whether no part of it is on the path to the current iteration."""
    stands_until: int = -1
    """Its last iteration on the path to the current one; -1: none."""
    inexact: str | None = None
    """Id of the checkpoint whose degraded restore its state descends from."""
    left_out: tuple[LeftOutData, ...] = ()
    """Data that restores left out on the way to its state, oldest first."""


class StallInfo(Struct, kw_only=True, frozen=True):
    iteration: int
    lineage: int
    kind: StallKind
    seconds: float
    at: Time
    abandoned: bool = False
    """Whether it is off the path to the current iteration."""


class CheckpointDensity(Struct, kw_only=True, frozen=True):
    """Checkpoints per bar, as columns, if there are too many to show each."""

    width: float
    """Width of each bar in units of the axis: iterations or seconds."""
    start: list[float]
    count: list[int]
    durable: list[int]
    failed: list[int]
    """Number of failed, torn and damaged ones."""
    snapshot_seconds: list[float]
    """Longest time per bar."""
    persist_seconds: list[float]
    """Longest time per bar."""


class StallDensity(Struct, kw_only=True, frozen=True):
    """Stalls of one kind per bar, as columns."""

    kind: StallKind
    width: float
    start: list[float] = []
    count: list[int] = []
    seconds: list[float] = []
    """Total time per bar."""
    longest_seconds: list[float] = []


class AttemptInfo(Struct, kw_only=True, frozen=True):
    attempt: int
    started_at: Time
    iteration: int
    lineage: int
    previous_exit: str | None
    finished: str | None
    """Why it ended; `None` while it runs, or if it ended without a report."""
    last_iteration: int
    host: str = ""
    resumed_from: str | None = None


class IntervalInfo(Struct, kw_only=True, frozen=True):
    iteration: int
    lineage: int
    at: Time
    interval: int | None
    measured_overhead: float | None
    budget: float
    interval_seconds: float | None = None
    """The interval where it is fixed in wall-clock time."""
    stands: bool = False
    """Whether it is on the path to the current iteration and no later attempt repeated it."""


class SampleGapInfo(Struct, kw_only=True, frozen=True):
    """Samples that the agent dropped while no server accepted them."""

    lineage: int
    first_iteration: int
    last_iteration: int
    dropped: int
    """Number of dropped iterations between the first and the last."""


class TroubleInfo(Struct, kw_only=True, frozen=True):
    """An alert about an iteration: a loss that spiked or was not finite."""

    alert: int
    rule: str
    message: str
    iteration: int
    lineage: int
    at: float
    """When the alert fired."""
    last_good: str | None
    """Id of the checkpoint that the alert offers to restore, or did while it was open."""
    abandoned: bool = False
    """Whether it is off the path to the current iteration."""


class LastGoodInfo(Struct, kw_only=True, frozen=True):
    """The newest durable checkpoint before the first wrong loss that the job has not recovered from."""

    iteration: int
    """Iteration at which the loss became wrong."""
    reason: str
    """Text that names the trouble, such as `before the spike at 301`."""
    checkpoint: str | None
    """Id of the checkpoint; `None` if none from before the trouble is left."""


class PauseInfo(Struct, kw_only=True, frozen=True):
    """A time in which training was paused."""

    at: float
    ended_at: float | None
    """`None` while it lasts, and where its attempt ended without a report."""
    iteration: int
    """Iteration after which training was paused."""
    lineage: int
    abandoned: bool = False
    """Whether a restore has replaced the iteration."""
    who: str


class MachineSeries(Struct, kw_only=True, frozen=True):
    """Samples of a rank's machine on one lineage, as columns. A bucket has the number of its last iteration."""

    lineage: int
    stands_until: int
    """Its last iteration on the path to the current one; -1: none."""
    iteration: list[int]
    at: list[float]
    metrics: dict[str, MinMeanMax]
    """By field of `holdfast.protocol.wire.MachineSample`."""


class MachineTimeline(Struct, kw_only=True, frozen=True):
    """Use of the machine of one rank."""

    rank: int
    ranks: list[int]
    """Ranks whose machines were measured."""
    series: list[MachineSeries]


class Timeline(Struct, kw_only=True, frozen=True):
    job: str
    lineage: int = 0
    """Current lineage of the job."""
    extent: tuple[int, int] | None
    """First and last known iteration; `None` before the first."""
    window: tuple[int, int] | None
    """Requested iterations; `None` if a time was requested."""
    times: tuple[float, float] | None = None
    """Start of the job and end of its newest known iteration, in seconds since the epoch."""
    silent_since: float | None = None
    """Time of the last report of a silent job, otherwise `None`."""
    time_window: tuple[float, float] | None = None
    """Requested time; `None` if iterations were requested."""
    now: float
    bucketed: bool = False
    metrics: list[str] = []
    """Names of all metrics of the job."""
    series: list[Series] = []
    lineages: list[LineageInfo]
    checkpoints: list[CheckpointInfo]
    """Checkpoints in the window. If there are too many, some of them; `checkpoint_density` counts all."""
    checkpoints_total: int
    checkpoint_density: CheckpointDensity | None = None
    stalls: list[StallInfo]
    """Stalls in the window. If there are too many, the longest; `stall_density` counts all."""
    stalls_total: int = 0
    stall_density: list[StallDensity] = []
    attempts: list[AttemptInfo]
    edits: list[Edit]
    orders: list[Order]
    paced: list[IntervalInfo]
    gaps: list[SampleGapInfo] = []
    annotations: list[Annotation] = []
    """Newest annotations in the window, of people and of the script, oldest first."""
    troubles: list[TroubleInfo] = []
    """Newest alerts about iterations, oldest first."""
    pauses: list[PauseInfo] = []
    """Newest pauses of training, oldest first."""
    last_good: LastGoodInfo | None = None
    """The checkpoint to go back to; `None` if the loss is not wrong."""
    machine: MachineTimeline | None = None
    """Use of the machine of the requested rank; `None` unless requested."""


class StallsOverTime(Struct, kw_only=True, frozen=True):
    """The individually reported stalls, added up by kind over equal intervals of time."""

    job: str
    window: Window
    begins_at: float
    ends_at: float
    stretch_seconds: float
    seconds: dict[StallKind, list[float]]
    """Waiting time per interval by kind, the largest total first."""
