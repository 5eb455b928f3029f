"""Responses on a job as a whole: goodput, ranks, plans, previews and stored reports."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from holdfast.pacing.policy import IntervalPlan
from holdfast.pacing.what_if import IntervalComparison
from holdfast.protocol.jobs import CheckpointInfo, Edit, Order, Verification
from holdfast.protocol.timeline import LineageInfo, ShortWindow, Window
from holdfast.protocol.wire import RestoreMode

Bucket = Literal[
    "productive",
    "snapshot_wait",
    "checkpoint_slowdown",
    "data_fetch",
    "barrier",
    "paused",
    "restoring",
    "starting",
    "lost",
    "down",
    "unexplained",
]


def category_of(name: str) -> str:
    """Return a bucket in words, as pages and commands write it."""
    return "gradient exchange and waiting" if name == "barrier" else name.replace("_", " ")


class TimeBucket(Struct, kw_only=True, frozen=True):
    name: Bucket
    seconds: float
    share: float
    """Share of the window."""
    definition: str


class Goodput(Struct, kw_only=True, frozen=True):
    """How a job spent its time; the buckets add up to the window."""

    job: str
    window: Window
    begins_at: float
    """Start of the window, or of the job if that is later."""
    ends_at: float
    """Now, or the job's intended end."""
    wall_seconds: float
    goodput: float | None
    """Share of the window in iterations that were not lost; `None` for an empty window."""
    iterations: int
    """Number of iterations that were not lost."""
    lost_iterations: int
    buckets: list[TimeBucket]


class RankInfo(Struct, kw_only=True, frozen=True):
    """One rank: means over its iterations in the window."""

    rank: int
    iterations: int
    iteration_seconds: float
    longest_seconds: float
    stall_seconds: float
    data_seconds: float
    barrier_seconds: float | None
    """Time from its last gradient to the update; `None` if not measured."""
    own_seconds: float
    """Iteration time without the barrier."""
    waits_seconds: float | None
    """Barrier time beyond that of the rank that the others wait for."""
    deviation: float
    """Relative deviation of `own_seconds` from the median."""
    straggler: bool
    cause: str
    """Main cause of a straggler's difference; empty for other ranks."""
    host: str = ""
    """Where it runs; empty if unknown."""
    device: str = ""
    """Its accelerator, such as `NVIDIA H200, cuda:3`."""
    scheduler_job: str = ""
    """The scheduler's job in words, such as `Slurm job 4711`."""


class RankTimes(Struct, kw_only=True, frozen=True):
    """A comparison of the ranks of the newest attempt."""

    job: str
    window: ShortWindow
    world_size: int
    reporting: int
    """Number of ranks that reported iterations in the window."""
    measure: str
    """Description of the compared figure."""
    median_seconds: float | None
    deviation_seconds: float | None
    """Median absolute deviation."""
    waited_for: int | None
    """Rank with the shortest barrier time, if others wait notably longer."""
    waiting_gpu_seconds: float | None
    """Total waiting time of all ranks for it, per iteration."""
    stragglers: list[int]
    ranks: list[RankInfo]
    """Slowest first."""


RecoveryPlace = Literal["memory", "peers", "local", "store"]
"""`memory`: of the hosts. `peers`: of them without any one. `local`: a directory that is copied to the store."""


class RecoverySource(Struct, kw_only=True, frozen=True):
    """One of the places that a start looks for a snapshot or checkpoint in, and the newest one there."""

    place: RecoveryPlace
    name: str
    """The place in words."""
    failure: str
    """Failure that this place survives, as in `one host is lost`."""
    checkpoint: str | None
    """Id of the newest complete snapshot or durable checkpoint there."""
    iteration: int | None
    resumes_from: int
    """Iteration from which the job then goes on: of this place, or of one below; 0: from the start."""
    loses: int
    """Iterations that are then trained again."""
    note: str = ""
    """Why nothing is there, or where it is."""


class HostRecovery(Struct, kw_only=True, frozen=True):
    """A host of the job, and the newest snapshot in the memory of the other hosts."""

    host: str
    iteration: int | None
    """Iteration of the newest snapshot that is complete without this host."""


class Recovery(Struct, kw_only=True, frozen=True):
    """Places from which a job would resume if it ended now."""

    job: str
    iteration: int
    sources: list[RecoverySource]
    """In the order in which a start looks, the nearest first."""
    hosts: list[HostRecovery]
    """The hosts that reported what their memory holds, those first whose loss costs most."""


class ReportRetentionChanges(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A change of how long a project keeps reports. UNSET: unchanged. `None`: no limit."""

    samples_seconds: float | UnsetType | None = UNSET
    """Age at which samples are reduced to roll-ups: minimum, mean and maximum of 64 iterations or more."""
    fine_seconds: float | UnsetType | None = UNSET
    """Age at which roll-ups of 64 iterations are reduced to roll-ups of 256."""
    reports_seconds: float | UnsetType | None = UNSET
    """Age at which stalls, notices, gaps, interval decisions and resolved alerts are deleted."""
    samples_bytes: int | UnsetType | None = UNSET
    """Size beyond which the oldest samples are reduced to roll-ups."""


class ReportRetention(Struct, kw_only=True, frozen=True):
    """How long a project keeps reports, and their size."""

    project: str
    samples_seconds: float | None
    fine_seconds: float | None
    reports_seconds: float | None
    samples_bytes: int | None
    stored_bytes: int
    """Size of the samples, without roll-ups."""


class SettingsPreview(Struct, kw_only=True, frozen=True):
    plan: IntervalPlan | None
    in_force: IntervalPlan | None
    """Plan for the interval in force, or `None`."""
    why_none: str
    """Why there is no plan; otherwise empty."""
    measured_overhead: float | None


Origin = Literal["measured", "estimated", "stated", "set", "assumed"]
"""Source of a figure: this job; this job and published figures; the request; the job's settings; a default."""


class CheckpointDetail(Struct, kw_only=True, frozen=True):
    """A checkpoint with its ancestry and history."""

    checkpoint: CheckpointInfo
    lineage: list[LineageInfo]
    """Lineages that it descends from, its own first."""
    begun_here: list[LineageInfo]
    """Lineages that a restore of it began."""
    orders: list[Order]
    """Restores of it, newest first."""
    before: CheckpointInfo | None
    """Previous and next durable checkpoint on its lineage."""
    after: CheckpointInfo | None
    edit: Edit | None
    """Newest change of settings before it was taken."""
    verification: Verification


class JobPlan(Struct, kw_only=True, frozen=True):
    """A comparison of checkpoint intervals for this job, or for changed premises."""

    job: str
    comparison: IntervalComparison | None
    why_none: str
    """Why there is no plan; otherwise empty."""
    held_by_hand: bool
    """Whether an operator fixed the interval in force."""
    failures: int
    """Number of attempts that failed."""
    running_seconds: float
    """Running time of all attempts."""
    restarts: int
    """Number of restarts behind a measured restart time."""
    origins: dict[str, Origin]
    """Sources of `mtbf_seconds`, `restart_seconds`, `world_size` and `budget`."""


SAME_LOSSES = (
    "the same iterations give the same losses again, unless you change something first: the data or the learning "
    "rate in the script"
)
"""Note for restores to before a wrong loss: a resume is exact, so the loss repeats."""


class RestorePreview(Struct, kw_only=True, frozen=True):
    checkpoint: CheckpointInfo
    from_iteration: int
    to_iteration: int
    iterations_abandoned: int
    """Number of iterations that the restore discards; they stay visible and restorable."""
    seconds_abandoned: float | None
    gpu_hours_abandoned: float | None
    """This time multiplied by the number of ranks."""
    points_abandoned: int
    """Number of durable checkpoints that it discards."""
    attempt: int
    host: str
    """Host of the newest attempt; empty if unknown."""
    world_size: int
    supervised: bool
    """Whether a supervisor restarts the job."""
    estimated_seconds: float | None
    estimated_from: str
    """Basis of the estimate; empty if there is none."""
    alive: bool
    mode: RestoreMode
    what: str
    """Description of what would happen."""
    safety_checkpoint: bool
    """Whether the current state is saved first; otherwise an undo returns to the newest durable checkpoint."""
    repeats: str = ""
    """Wrong loss that the restore repeats unless something is changed, as in `the spike at 301`; empty if none."""
    repeats_at: int | None = None
    """Iteration of that loss."""
    batches_an_iteration: int = 0
    """Batches that each iteration takes; 0: not known, or they differ."""
