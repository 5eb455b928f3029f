"""What the server answers with: the rows that the HTTP API encodes and the pages render."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from holdfast.pacing.outlook import Outlook
from holdfast.pacing.profile import Plan
from holdfast.protocol import (
    OPEN_ORDER_STATES,
    CheckpointKind,
    CheckpointState,
    Desired,
    OrderState,
    Paced,
    RankSpan,
    RestoreMode,
    StallKind,
)
from holdfast_server.timesheet import Bucket
from holdfast_server.windows import ShortWindow, Window

JobStatus = Literal["starting", "running", "paused", "finished", "stopped", "failed", "silent"]


class CheckpointRow(Struct, kw_only=True, frozen=True):
    id: str
    at: float
    iteration: int
    lineage: int
    kind: CheckpointKind
    state: CheckpointState
    payload_bytes: int = 0
    snapshot_started_at: float | None = None
    snapshot_seconds: float | None = None
    stall_seconds: float | None = None
    persist_started_at: float | None = None
    persist_seconds: float | None = None
    durable_iteration: int | None = None
    reason: str | None = None
    store_free_bytes: int | None = None
    label: str | None = None
    """What an operator calls it."""
    pinned: bool = False
    """Kept against retention until somebody unpins it."""
    pinned_by: str | None = None
    pinned_at: float | None = None
    abandoned: bool = False
    """Not on the way from the job's start to where it is now."""
    restorable: bool = False
    ranks: list[RankSpan] = []
    """Of one that several ranks wrote: the slowest first, where the question is about few checkpoints."""


class CheckpointChanges(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What operators may change of a checkpoint; what is left out stays."""

    pinned: bool | UnsetType = UNSET
    label: str | UnsetType | None = UNSET
    """null, or nothing but spaces: none."""


VerificationState = Literal["unasked", "requested", "reading", "sound", "damaged", "gone", "failed", "cancelled"]


class Verification(Struct, kw_only=True, frozen=True):
    """Whether anybody asked for a checkpoint to be read back, how far that is, and what was last found."""

    checkpoint: str
    request: int = 0
    """The version of what is desired that it came with."""
    state: VerificationState = "unasked"
    """Of the newest request."""
    at: float | None = None
    """When that was told."""
    asked_by: str | None = None
    asked_at: float | None = None
    against: str | None = None
    """Another checkpoint, that its tensors are compared with."""
    host: str = ""
    """Which reads it, or has read it."""
    read_bytes: int = 0
    total_bytes: int = 0
    seconds: float | None = None
    reason: str | None = None
    verdict: Literal["sound", "damaged"] | None = None
    """Of the last time that it could be read to its end, or to the damage; a newer request does not change it."""
    verified_at: float | None = None
    verified_host: str = ""
    measured_at: float | None = None
    """When its tensors were summed up; None: they were not."""

    @property
    def open(self) -> bool:
        return self.state in ("requested", "reading")


class TensorRow(Struct, kw_only=True, frozen=True):
    """One floating-point tensor of a checkpoint, and of another one. Norms are over what is finite."""

    name: str
    elements: int
    norm: float
    """L2."""
    largest: float
    """Of the absolute values."""
    nan: int
    inf: int
    other_norm: float | None = None
    """None where the other has no such tensor."""
    distance: float | None = None
    """The norm of the difference; None where nobody has computed it."""
    change: float | None = None
    """By the measure of the table, as a share of the other's norm."""


class Tensors(Struct, kw_only=True, frozen=True):
    """The tensors of a checkpoint, beside those of another: what is not finite first, then the largest change."""

    checkpoint: str
    other: str | None
    measure: Literal["none", "norms", "difference"]
    """What `change` is: nothing; by how much the norm differs, which says nothing of the direction; or the norm of
    the difference."""
    measured_at: float | None
    """None: its tensors were never summed up, or those of the other were not."""
    missing: list[str]
    """Whose tensors were not summed up, of the two."""
    rows: list[TensorRow]
    left_out: int
    """Tensors that the report does not tell of."""


class JobNumbers(Struct, kw_only=True, frozen=True):
    """The largest numbers known of a job, beyond which its next attempt and its next lineage are numbered."""

    latest_attempt: int
    latest_lineage: int


class NumberChanges(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What is left out stays as it is."""

    latest_attempt: int | UnsetType = UNSET
    latest_lineage: int | UnsetType = UNSET


class Transition(Struct, kw_only=True, frozen=True):
    state: OrderState
    at: float
    who: str
    reason: str | None = None


class Order(Struct, kw_only=True, frozen=True):
    id: str
    job: str
    checkpoint: str
    iteration: int
    """Of the checkpoint: where the job goes back to."""
    state: OrderState
    created_at: float
    who: str
    fence: int
    """The lowest attempt that may act on it."""
    expires_at: float | None = None
    """When it ends unless somebody has taken it up, on the server's clock."""
    from_iteration: int
    from_lineage: int
    new_lineage: int | None = None
    reason: str | None = None
    seconds: float | None = None
    """From the boundary at which the loop stopped to the state being back."""
    safety_checkpoint: str | None = None
    cancellable: bool = False
    """Nobody is at it yet, or nobody is at it any more."""
    undoable: bool = False
    """The job went there, and the state that it left is still in the store."""
    transitions: list[Transition] = []

    @property
    def open(self) -> bool:
        return self.state in OPEN_ORDER_STATES


class Change(Struct, kw_only=True, frozen=True):
    field: str
    before: str
    after: str


class Edit(Struct, kw_only=True, frozen=True):
    """One version of what is desired, and what became of it."""

    version: int
    who: str
    at: float
    summary: str
    """All changes in words: `budget 3.5% → 2%`."""
    changes: list[Change] = []
    applied_iteration: int | None = None
    applied_at: float | None = None


class NoticeRow(Struct, kw_only=True, frozen=True):
    id: int
    at: float
    iteration: int
    lineage: int
    level: Literal["info", "warning", "error"]
    code: str
    message: str


class LongestStall(Struct, kw_only=True, frozen=True):
    seconds: float
    kind: StallKind
    iteration: int


class Failing(Struct, kw_only=True, frozen=True):
    """Checkpoints that failed one after the other, up to now."""

    count: int
    reason: str
    """Of the newest."""
    since: float
    """When the first of them was taken."""


class JobSummary(Struct, kw_only=True, frozen=True):
    job: str
    project: str
    owner: str
    """Who launched the newest attempt; empty where it did not say."""
    labels: dict[str, str]
    status: JobStatus
    status_reason: str
    """One clause in words; empty when the status says it all."""
    alive: bool
    """In contact and not finished: an order would be acted on now."""
    restore_mode: RestoreMode
    """How: in place, by starting the script again, or only when somebody starts it again."""
    restore_reason: str
    """Why not in place; empty otherwise."""
    iteration: int
    lineage: int
    attempt: int
    restarts: int
    world_size: int
    iterations_per_second: float | None
    last_contact_seconds: float
    """How long ago the job was last heard."""
    started_at: float | None
    """Of the newest attempt."""
    loss: float | None
    """The newest; may be nan or inf. None when the loop reports none."""
    metrics: list[str]
    paced: Paced | None
    measured_overhead: float | None
    measured_window_iterations: int
    budget: float | None
    """In force, as the agent last said; None until it did."""
    interval: int | None
    """In force; None: no checkpoints for now, or not known yet."""
    policy: str | None
    interval_reason: str
    """Why this interval, told with the newest profile; empty until the agent has decided on one."""
    exposure_iterations: int
    """Iterations since the last durable checkpoint on this lineage: lost if the job died now."""
    exposure_seconds: float | None
    """What these took: each as it was measured, up to the last 200, and beyond those as many at their mean."""
    exposure_gpu_hours: float | None
    """The same on every rank."""
    last_durable: CheckpointRow | None
    failing: Failing | None
    """None as long as the newest checkpoint that settled is a good one."""
    desired: Desired
    every_until: float | None
    """When the interval ordered by hand ends by itself."""
    delivered_version: int
    """Of what is desired: the agent has it."""
    applied_version: int
    applied_iteration: int | None
    applied_at: float | None
    open_order: Order | None
    checkpoints_total: int
    """Durable ones."""
    longest_stall: LongestStall | None
    """Over the last 1,000 iterations on the way to where the job is; restores are left out."""
    sparkline: list[float]
    """Seconds of the newest iterations, oldest first, at most 40 points."""
    lineages: int


class BulkOutcome(Struct, kw_only=True, frozen=True):
    """What became of a change to one job of several."""

    job: str
    version: int | None
    """None: it was refused."""
    refusal: str


class Fleet(Struct, kw_only=True, frozen=True):
    """One page of the jobs that a question is about."""

    jobs: list[JobSummary]
    page: int
    """Counted from 1; the last one where a later one was asked for."""
    pages: int
    size: int
    """Most jobs on a page."""
    total: int
    """Jobs on all pages."""
    counts: dict[JobStatus, int]
    """By status, whatever status was asked for."""
    projects: list[str]
    """Whose jobs may be seen, whatever project was asked for."""


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


class ForkSource(Struct, kw_only=True, frozen=True):
    """The checkpoint of another job that a job began with a copy of."""

    job: str | None
    """None: one of a project that is not shown to whoever asks."""
    project: str | None
    """None: the job has not reported here, or is not shown."""
    checkpoint: str
    iteration: int
    lineage: int
    digest: str
    """Of the checkpoint's manifest, and so of all that it holds."""


class ForkRow(Struct, kw_only=True, frozen=True):
    """A job that began with a copy of a checkpoint of this one."""

    job: str
    project: str
    checkpoint: str
    """Of this job; its copy has the same name."""
    iteration: int
    lineage: int
    """That the fork began there."""
    at: float


class Family(Struct, kw_only=True, frozen=True):
    """Where a job was forked from, and what was forked from it."""

    origin: ForkSource | None
    forks: list[ForkRow]
    """The newest first, at most 200."""


class StallRow(Struct, kw_only=True, frozen=True):
    iteration: int
    lineage: int
    kind: StallKind
    seconds: float
    at: float


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


class GapRow(Struct, kw_only=True, frozen=True):
    """Samples that the agent thinned away, for want of room while no server took them."""

    lineage: int
    first_iteration: int
    last_iteration: int
    dropped: int
    """How many of the iterations from first to last."""


class Timeline(Struct, kw_only=True, frozen=True):
    job: str
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


class DesiredChanges(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What an operator changes. UNSET: untouched. None: back to the script's own setting."""

    budget: float | str | UnsetType | None = UNSET
    """A fraction, or text such as "2%"."""
    policy: str | UnsetType | None = UNSET
    every: int | str | UnsetType | None = UNSET
    every_seconds: float | UnsetType | None = UNSET
    """With `every`: after so long the policy decides again. UNSET or None: when somebody says so."""
    paused: bool | UnsetType = UNSET
    retention: str | UnsetType | None = UNSET
    """Which checkpoints stay: any of `last 5, every 1000, spaced 12, size 200GB, per lineage`."""
    checkpoint_request: bool | UnsetType = UNSET
    """True: take a checkpoint now."""
    probe_request: bool | UnsetType = UNSET
    """True: measure now how the data are loaded."""


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


class StallsOverTime(Struct, kw_only=True, frozen=True):
    """The waits that were long enough to be told one by one, summed up by kind over equal stretches of time."""

    job: str
    window: Window
    begins_at: float
    ends_at: float
    stretch_seconds: float
    seconds: dict[StallKind, list[float]]
    """By kind, the one that took most first; of each stretch, what training waited."""


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
