"""Responses on jobs and their checkpoints, settings and restores, and the bodies of changes.

One module, since a job, its orders and its checkpoints refer to each other.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from holdfast.protocol.field_types import MeasuredTime
from holdfast.protocol.verdicts import Verdict
from holdfast.protocol.wire import (
    OPEN_ORDER_STATES,
    CheckpointFacts,
    CopyPlace,
    DataSkip,
    Desired,
    IntervalDecision,
    LeftOutData,
    OrderState,
    RestoreMode,
    StallKind,
    SupervisorState,
)

DELETED_BY_RETENTION = "deleted by retention"
"""Beginning of the reason of a retired checkpoint, which has the state `missing`."""
MAX_REASON = 1000
"""Longest reason of a scrub in characters."""
JobStatus = Literal["starting", "running", "paused", "restarting", "finished", "stopped", "failed", "silent"]
"""Restarting: the supervisor starts the script again, or has, and no iteration is finished yet."""


class CheckpointInfo(CheckpointFacts, kw_only=True, frozen=True):  # type: ignore[misc]  # msgspec allows it
    label: str | None = None
    """Label set by an operator."""
    pinned: bool = False
    """Whether retention keeps it until it is unpinned."""
    pinned_by: str | None = None
    pinned_at: MeasuredTime = None
    abandoned: bool = False
    """Whether it is off the path from the job's start to its current iteration."""
    restorable: bool = False
    inexact: str | None = None
    """Id of the checkpoint whose degraded restore its state descends from."""
    copy_place: CopyPlace | None = None
    """Where it is, if the store behind a drained directory has it."""
    verified: str | None = None
    """What its last verification found, `sound` or `damaged`, in lists of checkpoints; `None`: not verified."""
    verified_at: MeasuredTime = None

    @property
    def is_kept_for_alert(self) -> bool:
        """Whether retention keeps it only for an open alert, which offers to restore it."""
        return is_alert(self.pinned_by)

    @property
    def state_name(self) -> str:
        """The state in words: `retired` for a checkpoint that retention deleted."""
        retired = self.state == "missing" and (self.reason or "").startswith(DELETED_BY_RETENTION)
        return "retired" if retired else self.state


def is_alert(actor: str | None) -> bool:
    """Return whether an actor is an alert, such as `alert 14`; no account has such a name."""
    return actor is not None and actor.startswith(("alert ", "an alert"))


class CheckpointChanges(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A change of a checkpoint; omitted fields stay as they are."""

    pinned: bool | UnsetType = UNSET
    label: str | UnsetType | None = UNSET
    """New label; `null` or blank removes it."""


VerificationState = Literal["unasked", "requested", "reading", "sound", "damaged", "gone", "failed", "cancelled"]


class Verification(Struct, kw_only=True, frozen=True):
    """The verification of a checkpoint: its state, progress and last result."""

    checkpoint: str
    request: int = 0
    """Version of the desired state that added the newest request."""
    state: VerificationState = "unasked"
    """State of the newest request."""
    at: float | None = None
    """Time of that state."""
    asked_by: str | None = None
    asked_at: float | None = None
    against: str | None = None
    """Id of another checkpoint to compare the tensors with."""
    host: str = ""
    """Host that reads it, or has read it."""
    read_bytes: int = 0
    total_bytes: int = 0
    seconds: float | None = None
    reason: str | None = None
    verdict: Literal["sound", "damaged"] | None = None
    """Result of the last complete verification; a newer request does not change it."""
    verified_at: float | None = None
    verified_host: str = ""
    measured_at: float | None = None
    """Time at which its tensors were summarized, or `None`."""

    @property
    def open(self) -> bool:
        return self.state in ("requested", "reading")


ScrubState = Literal["sound", "repaired", "repairable", "damaged"]


class ScrubReport(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What `holdfast store scrub` found in a checkpoint."""

    state: ScrubState
    """Damage remains in the last two."""
    host: Annotated[str, Meta(max_length=200)] = ""
    """Host that read it."""
    read_bytes: Annotated[int, Meta(ge=0, le=2**62)] = 0
    seconds: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    reason: Annotated[str, Meta(max_length=MAX_REASON)] | None = None
    """The damage, by file and range."""


class TensorRow(Struct, kw_only=True, frozen=True):
    """A floating-point tensor of a checkpoint, compared with another one. Norms are over finite values."""

    name: str
    elements: int
    norm: float
    """L2 norm."""
    largest: float
    """Largest absolute value."""
    nan: int
    inf: int
    other_norm: float | None = None
    """L2 norm in the other checkpoint; `None` if it has no such tensor."""
    distance: float | None = None
    """Norm of the difference; `None` if it was not computed."""
    change: float | None = None
    """Change relative to the other norm, by the table's measure."""


class Tensors(Struct, kw_only=True, frozen=True):
    """The tensors of a checkpoint, compared with another: non-finite ones first, then the largest change."""

    checkpoint: str
    other: str | None
    measure: Literal["none", "norms", "difference"]
    """What `change` measures: nothing, the difference of the norms, or the norm of the difference."""
    measured_at: float | None
    """Time of the summary; `None` if one is missing."""
    missing: list[str]
    """Ids of the checkpoints without a summary."""
    rows: list[TensorRow]
    left_out: int
    """Number of tensors beyond the reported ones."""


class JobNumbers(Struct, kw_only=True, frozen=True):
    """The largest known attempt and lineage numbers of a job; new ones exceed them."""

    latest_attempt: int
    latest_lineage: int


class NumberChanges(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A change of these numbers; omitted fields stay as they are."""

    latest_attempt: int | UnsetType = UNSET
    latest_lineage: int | UnsetType = UNSET


class OrderStep(Struct, kw_only=True, frozen=True):
    state: OrderState
    at: float
    who: str
    reason: str | None = None


class Order(Struct, kw_only=True, frozen=True):
    id: str
    job: str
    checkpoint: str
    iteration: int
    """Iteration of the checkpoint."""
    state: OrderState
    created_at: float
    who: str
    fence: int
    """Lowest attempt number that may carry it out."""
    expires_at: float | None = None
    """Time at which it expires unless an attempt has begun it, on the server's clock."""
    from_iteration: int
    from_lineage: int
    new_lineage: int | None = None
    reason: str | None = None
    seconds: float | None = None
    """Duration of the restore, while the loop waited."""
    safety_checkpoint: str | None = None
    cancellable: bool = False
    """Whether it can be cancelled: no attempt is carrying it out."""
    undoable: bool = False
    """Whether it can be undone: it was completed, and the previous state is still in the store."""
    degraded: bool = False
    """Whether lost bytes may be replaced where only the important bytes of the checkpoint are left."""
    skip: DataSkip | None = None
    """Data to leave out; `None`: training repeats the same data."""
    transitions: list[OrderStep] = []

    @property
    def open(self) -> bool:
        return self.state in OPEN_ORDER_STATES


class SettingChange(Struct, kw_only=True, frozen=True):
    field: str
    before: str
    after: str


class Edit(Struct, kw_only=True, frozen=True):
    """A version of the desired state, and when the job applied it."""

    version: int
    who: str
    at: float
    summary: str
    """All changes in words, as in `budget 3.5% → 2%`."""
    changes: list[SettingChange] = []
    applied_iteration: int | None = None
    applied_at: float | None = None


class Annotation(Struct, kw_only=True, frozen=True):
    """An annotation at an iteration, by a person or by the script."""

    id: int
    iteration: int
    lineage: int
    at: float
    """Time of the iteration, or, if that is unknown, of the annotation."""
    text: str
    who: str | None
    """User name; `None` for the script."""
    written_at: float
    """When it was added or last edited."""
    abandoned: bool = False
    """Whether it is off the path to the current iteration."""


class NewAnnotation(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """An annotation to add. `iteration`: a finished one; `None`: the newest."""

    text: str
    iteration: int | None = None


class AnnotationChanges(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The new text of an annotation."""

    text: str


class NoticeInfo(Struct, kw_only=True, frozen=True):
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


class RecentFailures(Struct, kw_only=True, frozen=True):
    """The newest checkpoints, if they failed."""

    count: int
    reason: str
    """Reason of the newest failure."""
    since: float
    """Time of the first failure."""


class SupervisorInfo(Struct, kw_only=True, frozen=True):
    """What `holdfast run` does, or did, after the last start ended."""

    state: SupervisorState
    host: str
    reason: str
    """Why that start ended, or what the next one restores."""
    start: int
    """Number of the next start in a row without a new iteration, or of the last one; 0 if they are not counted."""
    limit: int
    """Number of such starts after which it gives up; 0 if they are not counted."""
    failed: bool
    """Whether that start failed; a restore restarts a script as well."""
    has_started: bool
    """Whether the next start has begun, and has finished no iteration yet."""
    waits: bool
    """Whether it waits for a restore request."""


class JobSummary(Struct, kw_only=True, frozen=True):
    job: str
    project: str
    owner: str
    """Who launched the newest attempt; empty if unknown."""
    labels: dict[str, str]
    status: JobStatus
    status_reason: str
    """Explanation of the status; may be empty."""
    alive: bool
    """Whether the job has not ended, so that it acts on requests now or as soon as it has restarted."""
    supervisor: SupervisorInfo | None = None
    """What the supervisor does after the last start has ended; `None` while the job trains."""
    restore_mode: RestoreMode
    """How a restore happens: in place, by a supervised restart, or at the next start."""
    restore_reason: str
    """Why a restore does not happen in place; may be empty."""
    iteration: int
    lineage: int
    attempt: int
    restarts: int
    world_size: int
    iterations_per_second: float | None
    last_contact_seconds: float
    """Time since the last report."""
    started_at: float | None
    """Start of the newest attempt."""
    loss: float | None
    """Newest loss; may be nan or inf. `None` if the loop reports none."""
    metrics: list[str]
    paced: IntervalDecision | None
    measured_overhead: float | None
    measured_window_iterations: int
    budget: float | None
    """Budget in force, as last reported, or `None`."""
    interval: int | None
    """In force, in iterations; None: no checkpoints for now, or not known yet."""
    interval_seconds: float | None
    """In force, where it is fixed in wall-clock time; `interval` is then an estimate."""
    policy: str | None
    interval_reason: str
    """Reason for the interval, from the newest profile; may be empty."""
    unsaved_iterations: int
    """Iterations since the last durable checkpoint, which a crash would lose now."""
    unsaved_seconds: float | None
    """Time of these iterations: measured for the last 200, extrapolated beyond."""
    unsaved_gpu_hours: float | None
    """This time multiplied by the number of ranks."""
    last_durable: CheckpointInfo | None
    failing: RecentFailures | None
    """Failures since the last good checkpoint, if there are any."""
    desired: Desired
    every_until: float | None
    """Time at which a fixed interval expires."""
    delivered_version: int
    """Version of the desired state that the agent has received."""
    applied_version: int
    applied_iteration: int | None
    applied_at: float | None
    open_order: Order | None
    checkpoints_total: int
    """Number of durable checkpoints."""
    longest_stall: LongestStall | None
    """Longest stall of the last 1,000 current iterations, without restores."""
    sparkline: list[float]
    """Times of the newest iterations in seconds, oldest first, at most 40."""
    lineages: int
    inexact: str | None = None
    """Id of the checkpoint whose degraded restore the state of this lineage descends from."""
    on_trouble: str = ""
    """Reaction of the newest attempt to a wrong loss; empty if unknown."""
    left_out: tuple[LeftOutData, ...] = ()
    """Data that restores left out on the way to the state of this lineage, oldest first."""
    verdict: Verdict | None = None  # None from an older server
    training_paused_at: float | None = None
    """Since when training is paused on request, or `None`; of a job that has ended: as it ended."""
    training_paused_by: str | None = None
    protected: bool = False
    """Whether restores, pauses, ends and values need the approval of a second person."""
    total_iterations: int | None = None
    """Number of the last iteration, as the script or its loader says; `None` if unknown."""
    remaining_seconds: float | None = None
    """Estimated time to the last iteration at the rate of the newest ones; `None` unless the job trains."""
    tokens_per_second: float | None = None
    """Over the newest iterations, on all ranks; `None` unless the script reports tokens."""
    samples_per_second: float | None = None
    """The same for samples; `None` unless the loader knows them."""
    host: str = ""
    """Host of rank 0 of the newest attempt; empty if unknown."""

    @property
    def progress(self) -> float | None:
        """Share of the iterations that are done; `None` if their number is unknown."""
        total = self.total_iterations
        return min(1.0, self.iteration / total) if total else None

    @property
    def has_ended(self) -> bool:
        """Whether its last attempt ended and none follows by itself."""
        return self.status in ("finished", "stopped", "failed")

    @property
    def fixed_interval(self) -> int | timedelta | None:
        """The interval that an operator has fixed, in iterations or in time."""
        seconds = self.desired.interval_seconds
        return self.desired.every if seconds is None else timedelta(seconds=seconds)

    @property
    def interval_in_force(self) -> int | timedelta | None:
        """The interval in iterations, or in time if it is fixed in time."""
        return self.interval if self.interval_seconds is None else timedelta(seconds=self.interval_seconds)


class ForkSource(Struct, kw_only=True, frozen=True):
    """The checkpoint of another job that a fork copied."""

    job: str | None
    """Name of the job; `None` if the caller may not view it."""
    project: str | None
    """Project of the job; `None` if the job is unknown or may not be viewed."""
    checkpoint: str
    iteration: int
    lineage: int
    digest: str
    """Digest of its manifest, which has the digests of all its data."""


class ForkInfo(Struct, kw_only=True, frozen=True):
    """A fork of this job."""

    job: str
    project: str
    checkpoint: str
    """Id of the copied checkpoint, and of the copy."""
    iteration: int
    lineage: int
    """Lineage of the checkpoint."""
    at: float


class ForkFamily(Struct, kw_only=True, frozen=True):
    """The origin and the forks of a job."""

    origin: ForkSource | None
    forks: list[ForkInfo]
    """Newest first, at most 200."""


class DesiredChanges(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A change of settings. UNSET: unchanged. `None`: back to the script's setting."""

    budget: float | str | UnsetType | None = UNSET
    """Budget as a fraction, or text such as "2%"."""
    write_budget: float | str | UnsetType | None = UNSET
    """Write budget in bytes per second, or text such as "2TB/day"."""
    max_unsaved_work: float | str | UnsetType | None = UNSET
    """Maximum unsaved work in seconds, or text such as "10min"."""
    policy: str | UnsetType | None = UNSET
    every: int | str | UnsetType | None = UNSET
    """Fixed interval: a number of iterations, or a time as text such as "10min"."""
    every_seconds: float | UnsetType | None = UNSET
    """Time after which `every` expires. UNSET or `None`: never."""
    paused: bool | UnsetType = UNSET
    retention: str | UnsetType | None = UNSET
    """Retention rules, such as `last 5, every 1000`."""
    on_trouble: str | UnsetType | None = UNSET
    """Reaction to a wrong loss: `off`, `observe`, `restore`, or `restore 3 in 2000 then pause`."""
    checkpoint_request: bool | UnsetType = UNSET
    """Whether to take a checkpoint now."""
    probe_request: bool | UnsetType = UNSET
    """Whether to profile data loading now."""
