"""What the server answers with: the rows that the HTTP API encodes and the pages render."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from holdfast.pacing.profile import Plan
from holdfast.protocol import CheckpointKind, CheckpointState, Desired, OrderState, Paced, StallKind

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
    abandoned: bool = False
    """Not on the way from the job's start to where it is now."""
    restorable: bool = False


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
        return self.state in ("requested", "delivered", "restoring")


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
    status: JobStatus
    status_reason: str
    """One clause in words; empty when the status says it all."""
    alive: bool
    """In contact and not finished: an order would be acted on now, in place."""
    iteration: int
    lineage: int
    attempt: int
    restarts: int
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
    last_durable: CheckpointRow | None
    failing: Failing | None
    """None as long as the newest checkpoint that settled is a good one."""
    desired: Desired
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


class StallRow(Struct, kw_only=True, frozen=True):
    iteration: int
    lineage: int
    kind: StallKind
    seconds: float
    at: float


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


class Timeline(Struct, kw_only=True, frozen=True):
    job: str
    extent: tuple[int, int] | None
    """First and last iteration known; None before the first."""
    window: tuple[int, int] | None
    now: float
    bucketed: bool
    series: list[Series]
    lineages: list[LineageRow]
    checkpoints: list[CheckpointRow]
    checkpoints_total: int
    stalls: list[StallRow]
    attempts: list[AttemptRow]
    edits: list[Edit]
    orders: list[Order]
    paced: list[PacedRow]


class DesiredChanges(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What an operator changes. UNSET: untouched. None: back to the script's own setting."""

    budget: float | str | UnsetType | None = UNSET
    """A fraction, or text such as "2%"."""
    policy: str | UnsetType | None = UNSET
    every: int | str | UnsetType | None = UNSET
    paused: bool | UnsetType = UNSET
    checkpoint_request: bool | UnsetType = UNSET
    """True: take a checkpoint now."""


class SettingsPreview(Struct, kw_only=True, frozen=True):
    plan: Plan | None
    in_force: Plan | None
    """The same of the interval in force; None without one."""
    why_none: str
    """Why there is no plan; empty when there is one."""
    measured_overhead: float | None


class RestorePreview(Struct, kw_only=True, frozen=True):
    checkpoint: CheckpointRow
    from_iteration: int
    to_iteration: int
    iterations_abandoned: int
    """Left behind on the lineage that the job is on; they stay visible, and restorable."""
    seconds_abandoned: float | None
    estimated_seconds: float | None
    estimated_from: str
    """What the estimate rests on, in words; empty when there is none."""
    alive: bool
    what: str
    safety_checkpoint: bool
