"""Answers about a job as a whole: goodput, ranks, plans, previews, storage."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from holdfast.pacing.profile import Plan
from holdfast.pacing.what_if import Outlook
from holdfast.protocol.jobs import CheckpointRow, Edit, Order, Verification
from holdfast.protocol.messages import RestoreMode
from holdfast.protocol.timeline import LineageRow, ShortWindow, Window

Bucket = Literal[
    "productive",
    "snapshot_wait",
    "persist_backpressure",
    "data_fetch",
    "data_prep",
    "barrier",
    "restoring",
    "starting",
    "lost",
    "down",
    "unexplained",
]


class TimeBucket(Struct, kw_only=True, frozen=True):
    name: Bucket
    seconds: float
    share: float
    """Of the window."""
    definition: str


class Goodput(Struct, kw_only=True, frozen=True):
    """Where the time of a job went; the buckets sum up to the window."""

    job: str
    window: Window
    begins_at: float
    """When the window begins, or the job did where that was later."""
    ends_at: float
    """Now, or when the job came to the end that somebody wanted."""
    wall_seconds: float
    goodput: float | None
    """Share of the time that moved training forward and was not lost; None without any time."""
    iterations: int
    """That stand."""
    lost_iterations: int
    buckets: list[TimeBucket]


class RankRow(Struct, kw_only=True, frozen=True):
    """One rank, by the mean of its iterations in the window."""

    rank: int
    iterations: int
    iteration_seconds: float
    longest_seconds: float
    stall_seconds: float
    data_seconds: float
    barrier_seconds: float | None
    """From its own last gradient to the update; None where that cannot be measured."""
    own_seconds: float
    """The iteration without the barrier: what this rank itself took."""
    waits_seconds: float | None
    """How much longer than the rank that the others wait for it stood at the barrier."""
    deviation: float
    """Of its own seconds from the median, as a share of that."""
    straggler: bool
    cause: str
    """Of a straggler: what most of the difference is; empty for others."""


class RankTimes(Struct, kw_only=True, frozen=True):
    """How the ranks of the attempt that is or was the last compare."""

    job: str
    window: ShortWindow
    world_size: int
    reporting: int
    """How many ranks told of iterations in the window."""
    measure: str
    """What is compared, in words."""
    median_seconds: float | None
    deviation_seconds: float | None
    """The median absolute deviation from it."""
    waited_for: int | None
    """The rank that stands least at the barrier, where others stand there notably longer."""
    waiting_gpu_seconds: float | None
    """What all ranks together wait for it, in each iteration."""
    stragglers: list[int]
    ranks: list[RankRow]
    """The slowest first."""


class RetentionChanges(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How long a project keeps what its jobs reported. UNSET: as it is. None: for ever, and without a limit."""

    samples_seconds: float | UnsetType | None = UNSET
    """Older samples are thinned into roll-ups: minimum, mean and maximum of 64 iterations and more."""
    fine_seconds: float | UnsetType | None = UNSET
    """Older roll-ups of 64 iterations are thinned into those of 256."""
    reports_seconds: float | UnsetType | None = UNSET
    """Older stalls, notices, gaps, figures of pacing, and alerts that are over go."""
    samples_bytes: int | UnsetType | None = UNSET
    """Of more samples than this, the oldest are thinned into roll-ups."""


class Kept(Struct, kw_only=True, frozen=True):
    """How long a project keeps what its jobs reported, and how much that is."""

    project: str
    samples_seconds: float | None
    fine_seconds: float | None
    reports_seconds: float | None
    samples_bytes: int | None
    stored_bytes: int
    """Of samples, roll-ups left out."""


class SettingsPreview(Struct, kw_only=True, frozen=True):
    plan: Plan | None
    in_force: Plan | None
    """The same of the interval in force; None without one."""
    why_none: str
    """Why there is no plan; empty when there is one."""
    measured_overhead: float | None


Origin = Literal["measured", "estimated", "stated", "set", "assumed"]


"""Where a figure comes from: this job; this job and what is published of others; the question; the job's settings;
a default."""


class CheckpointStory(Struct, kw_only=True, frozen=True):
    """One checkpoint, what it comes from, and what became of it."""

    checkpoint: CheckpointRow
    lineage: list[LineageRow]
    """The lines of training that it descends from, the one that it is on first."""
    begun_here: list[LineageRow]
    """Those that a restore of it began."""
    orders: list[Order]
    """To go back to it, the newest first."""
    before: CheckpointRow | None
    """The durable one before it on its lineage, and the one after."""
    after: CheckpointRow | None
    edit: Edit | None
    """The newest change of a setting when it was taken."""
    verification: Verification


class JobPlan(Struct, kw_only=True, frozen=True):
    """What if: every interval weighed for this job, as it is or as it might be."""

    job: str
    outlook: Outlook | None
    why_none: str
    """Why there is none; empty when there is one."""
    held_by_hand: bool
    """The interval in force is one that a person ordered."""
    failures: int
    """Attempts that ended without being asked to."""
    running_seconds: float
    """In how much time, over all attempts."""
    restarts: int
    """How many of them a measured restart time rests on."""
    origins: dict[str, Origin]
    """Of `mtbf_seconds`, `restart_seconds`, `world_size`, `budget`: where each comes from."""


class RestorePreview(Struct, kw_only=True, frozen=True):
    checkpoint: CheckpointRow
    from_iteration: int
    to_iteration: int
    iterations_abandoned: int
    """Left behind on the lineage that the job is on; they stay visible, and restorable."""
    seconds_abandoned: float | None
    gpu_hours_abandoned: float | None
    """The same on every rank."""
    points_abandoned: int
    """Durable checkpoints among what is left behind."""
    attempt: int
    host: str
    """Of the attempt that runs, or ran last; empty where it did not say."""
    world_size: int
    supervised: bool
    """A supervisor starts the job again, should this attempt end."""
    estimated_seconds: float | None
    estimated_from: str
    """What the estimate rests on, in words; empty when there is none."""
    alive: bool
    mode: RestoreMode
    what: str
    """What would happen, and when, in words."""
    safety_checkpoint: bool
    """Of the state that is left, before anything else. Otherwise its newest durable checkpoint is the way back."""
