"""Jobs, their checkpoints, and what operators change and order."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from holdfast.protocol.messages import (
    OPEN_ORDER_STATES,
    CheckpointFacts,
    Desired,
    OrderState,
    Paced,
    RestoreMode,
    StallKind,
)

JobStatus = Literal["starting", "running", "paused", "finished", "stopped", "failed", "silent"]


class CheckpointRow(CheckpointFacts, kw_only=True, frozen=True):  # type: ignore[misc]  # msgspec allows it
    label: str | None = None
    """What an operator calls it."""
    pinned: bool = False
    """Kept against retention until somebody unpins it."""
    pinned_by: str | None = None
    pinned_at: float | None = None
    abandoned: bool = False
    """Not on the way from the job's start to where it is now."""
    restorable: bool = False


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
