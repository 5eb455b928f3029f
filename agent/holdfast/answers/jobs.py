"""Jobs, their checkpoints and what people ordered."""

from __future__ import annotations

from typing import Literal

import msgspec

from holdfast.protocol import (
    OPEN_ORDER_STATES,
    CheckpointKind,
    CheckpointState,
    Desired,
    OrderState,
    Paced,
    RankSpan,
    StallKind,
)


class CheckpointRow(msgspec.Struct, kw_only=True, frozen=True):
    """A checkpoint as the server knows it."""

    id: str
    at: float = 0.0
    iteration: int = 0
    lineage: int = 0
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


class Verification(msgspec.Struct, kw_only=True, frozen=True):
    """Whether anybody asked for a checkpoint to be read back, how far that is, and what was last found."""

    checkpoint: str
    request: int = 0
    """The version of what is desired that it came with."""
    state: Literal["unasked", "requested", "reading", "sound", "damaged", "gone", "failed", "cancelled"]
    """Of the newest request."""
    at: float | None = None
    asked_by: str | None = None
    asked_at: float | None = None
    against: str | None = None
    """Another checkpoint, that its tensors are compared with."""
    host: str = ""
    read_bytes: int = 0
    total_bytes: int = 0
    seconds: float | None = None
    reason: str | None = None
    verdict: Literal["sound", "damaged"] | None = None
    """Of the last time that it could be read; a newer request does not change it."""
    verified_at: float | None = None
    verified_host: str = ""
    measured_at: float | None = None
    """When its tensors were summed up; None: they were not."""

    @property
    def open(self) -> bool:
        return self.state in ("requested", "reading")


class TensorRow(msgspec.Struct, kw_only=True, frozen=True):
    """One floating-point tensor of a checkpoint, and of another one. Norms are over what is finite."""

    name: str
    elements: int = 0
    norm: float = 0.0
    largest: float = 0.0
    nan: int = 0
    inf: int = 0
    other_norm: float | None = None
    distance: float | None = None
    """The norm of the difference; None where nobody has computed it."""
    change: float | None = None
    """By the measure of the table, as a share of the other's norm."""


class Tensors(msgspec.Struct, kw_only=True, frozen=True):
    """The tensors of a checkpoint, beside those of another: what is not finite first, then the largest change."""

    checkpoint: str
    other: str | None = None
    measure: Literal["none", "norms", "difference"] = "none"
    measured_at: float | None = None
    missing: list[str] = []
    """Whose tensors were not summed up, of the two."""
    rows: list[TensorRow] = []
    left_out: int = 0


class Transition(msgspec.Struct, kw_only=True, frozen=True):
    """One step of a restore order."""

    state: OrderState
    at: float = 0.0
    who: str = ""
    reason: str | None = None


class ForkSource(msgspec.Struct, kw_only=True, frozen=True):
    """The checkpoint of another job that a job began with a copy of."""

    job: str | None = None
    """None: one of a project that is not shown to whoever asks."""
    project: str | None = None
    """None: the job has not reported there, or is not shown."""
    checkpoint: str
    iteration: int = 0
    lineage: int = 0
    digest: str = ""
    """Of the checkpoint's manifest, and so of all that it holds."""


class ForkRow(msgspec.Struct, kw_only=True, frozen=True):
    """A job that began with a copy of a checkpoint of this one."""

    job: str
    project: str = ""
    checkpoint: str
    """Of this job; its copy has the same name."""
    iteration: int = 0
    lineage: int = 0
    """That the fork began there."""
    at: float = 0.0


class Family(msgspec.Struct, kw_only=True, frozen=True):
    """Where a job was forked from, and what was forked from it, the newest first."""

    origin: ForkSource | None = None
    forks: list[ForkRow] = []


class JobNumbers(msgspec.Struct, kw_only=True, frozen=True):
    """The largest numbers that the server knows of a job."""

    latest_attempt: int = 0
    latest_lineage: int = 0


class Order(msgspec.Struct, kw_only=True, frozen=True):
    """A restore order and how far it got."""

    id: str
    job: str
    checkpoint: str
    iteration: int = 0
    """Of the checkpoint: where the job goes back to."""
    state: OrderState
    created_at: float = 0.0
    who: str = ""
    fence: int = 0
    """The lowest attempt that may act on it."""
    expires_at: float | None = None
    """When it ends unless somebody has taken it up, on the server's clock."""
    from_iteration: int = 0
    from_lineage: int = 0
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


class Change(msgspec.Struct, kw_only=True, frozen=True):
    """One setting that an edit changed."""

    field: str = ""
    before: str = ""
    after: str = ""


class Edit(msgspec.Struct, kw_only=True, frozen=True):
    """One version of what is desired, and what became of it."""

    version: int
    who: str = ""
    at: float = 0.0
    summary: str = ""
    """All changes in words: `budget 3.5% → 2%`."""
    changes: list[Change] = []
    applied_iteration: int | None = None
    applied_at: float | None = None


class NoticeRow(msgspec.Struct, kw_only=True, frozen=True):
    """Something that a job had to say."""

    id: int
    at: float = 0.0
    iteration: int = 0
    lineage: int = 0
    level: str = ""
    code: str = ""
    message: str = ""


class LongestStall(msgspec.Struct, kw_only=True, frozen=True):
    """The longest wait of late."""

    seconds: float = 0.0
    kind: StallKind
    iteration: int = 0


class Failing(msgspec.Struct, kw_only=True, frozen=True):
    """Checkpoints that failed one after the other, up to now."""

    count: int = 0
    reason: str = ""
    """Of the newest."""
    since: float = 0.0
    """When the first of them was taken."""


class Job(msgspec.Struct, kw_only=True, frozen=True):
    """A job as the fleet page sees it."""

    job: str
    project: str = ""
    owner: str = ""
    """Who launched the newest attempt; empty where it did not say."""
    labels: dict[str, str] = {}
    status: str
    status_reason: str = ""
    """One clause in words; empty when the status says it all."""
    alive: bool = False
    """In contact and not finished: an order would be acted on now."""
    restore_mode: str = "in_place"
    """`in_place`, `relaunch`, or `next_start`: somebody has to start the script again."""
    restore_reason: str = ""
    """Why not in place; empty otherwise."""
    iteration: int = 0
    lineage: int = 0
    attempt: int = 0
    restarts: int = 0
    world_size: int = 0
    iterations_per_second: float | None = None
    last_contact_seconds: float = 0.0
    """How long ago the job was last heard."""
    started_at: float | None = None
    """Of the newest attempt."""
    loss: float | None = None
    """The newest; may be nan or inf. None when the loop reports none."""
    metrics: list[str] = []
    paced: Paced | None = None
    measured_overhead: float | None = None
    measured_window_iterations: int = 0
    budget: float | None = None
    """In force, as the agent last said; None until it did."""
    interval: int | None = None
    """In force; None: no checkpoints for now, or not known yet."""
    policy: str | None = None
    interval_reason: str = ""
    """Why this interval, told with the newest profile; empty until the agent has decided on one."""
    exposure_iterations: int = 0
    """Iterations since the last durable checkpoint on this lineage: lost if the job died now."""
    exposure_seconds: float | None = None
    """What these took: each as it was measured, up to the last 200, and beyond those as many at their mean."""
    exposure_gpu_hours: float | None = None
    """The same on every rank."""
    last_durable: CheckpointRow | None = None
    failing: Failing | None = None
    """None as long as the newest checkpoint that settled is a good one."""
    desired: Desired = Desired()
    every_until: float | None = None
    """When the interval ordered by hand ends by itself."""
    delivered_version: int = 0
    """Of what is desired: the agent has it."""
    applied_version: int = 0
    applied_iteration: int | None = None
    applied_at: float | None = None
    open_order: Order | None = None
    checkpoints_total: int = 0
    """Durable ones."""
    longest_stall: LongestStall | None = None
    """Over the last 1,000 iterations on the way to where the job is; restores are left out."""
    sparkline: list[float] = []
    """Seconds of the newest iterations, oldest first, at most 40 points."""
    lineages: int = 0


class Fleet(msgspec.Struct, kw_only=True, frozen=True):
    """One page of the jobs that a question is about."""

    jobs: list[Job] = []
    page: int = 0
    """Counted from 1; the last one where a later one was asked for."""
    pages: int = 0
    size: int = 0
    """Most jobs on a page."""
    total: int = 0
    """Jobs on all pages."""
    counts: dict[str, int] = {}
    """By status, whatever status was asked for."""
    projects: list[str] = []
    """Whose jobs may be seen, whatever project was asked for."""
