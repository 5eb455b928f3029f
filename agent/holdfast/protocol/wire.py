"""The versioned messages between agent and server.

Agents send a `Batch` about once a second (msgpack, `POST /api/v1/ingest`) and receive an `Ack` once the server
has committed it. They long-poll `Desired` (`GET /api/v1/jobs/{job}/desired`). Both sides ignore unknown fields, so
that adjacent versions are compatible; an incompatible change increments `PROTOCOL`.

Times named `at` are seconds since the Unix epoch on the sender's clock, for display only: messages are ordered by
(attempt, sequence) and (lineage, iteration). One module, since adjacent versions of agent and server must agree
about all of it.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from holdfast.protocol.field_types import (
    MAX_HELD,
    Attempt,
    ChangedTensor,
    CheckpointId,
    Count,
    Figures,
    Fit,
    HeldSnapshot,
    Iteration,
    JobName,
    Lineage,
    MeasuredFigures,
    MeasuredNumber,
    MeasuredSeconds,
    MeasuredTime,
    Number,
    OptionalText,
    RankCheckpointTimes,
    Seconds,
    Text,
    Texts,
    Time,
    TwoTexts,
    texts_of,
)
from holdfast.protocol.orders import DataSkip as DataSkip
from holdfast.protocol.orders import HaltReport, TrainingOrder
from holdfast.protocol.store_shares import StoreReport, StoreShare
from holdfast.protocol.values import ValueChange, ValueReport

PROTOCOL = 2  # version 2 added columns as bytes, lanes and gaps
DEFAULT_PORT = 7117
MAX_PINS = 64  # per job
MOST_RANK_SPANS = 32  # reported per checkpoint, slowest first
MAX_LABELS = 16  # per job; each name and value has at most 64 characters
MAX_CHANGED_TENSORS = 100  # reported per checkpoint, those with most bytes first
MAX_OPEN_VERIFICATIONS = 8  # per job
MAX_REPORTED_TENSORS = 2000  # per verification, the largest ones
MAX_EVENTS = 5000  # per batch
MAX_GAPS = 1000  # per batch
MAX_UID = 100  # characters
MAX_CHECKPOINTS = 100_000  # of a store: every tenth of a million iterations
MAX_LEFT_OUT = 10_000  # per lineage
PLAUSIBLE_STEP = 1_000
"""Largest step of a reported attempt or lineage number above the largest known one."""
SUPERVISOR_RANK = 1 << 20
"""Rank number of the supervisor's reports."""
RESCUE_RANK = SUPERVISOR_RANK + 1
"""Rank number of reports on snapshots that were saved from memory after a crash."""
OUTPUT_RANK = SUPERVISOR_RANK + 2
"""Rank number of reports of output."""
MAX_CONFIGURATION_ENTRIES = 500
"""Most names of a configuration or an environment."""
MAX_CONFIGURATION_NAME, MAX_CONFIGURATION_VALUE = 120, 1000
"""Characters of a name and of a value."""
MAX_OUTPUT_LINES, MAX_OUTPUT_CHARACTERS = 1000, 1000
"""Lines of an attempt's output that are kept, and characters of each."""

Lane = Literal["control", "samples"]
"""Control: events, which are never dropped. Samples: measurements, which are thinned under overload."""
Numbers = list[float] | bytes
"""A column of numbers: a list, or faster, little-endian float64."""
IntegerColumn = list[int] | bytes
"""A column of integers: a list, or faster, little-endian int64."""

CheckpointKind = Literal["scheduled", "requested", "safety", "final"]
CheckpointState = Literal["snapshot", "persisting", "durable", "failed", "torn", "damaged", "missing"]
Verdict = Literal["sound", "damaged", "gone", "failed"]
"""Result of a verification. Gone: retention deleted the checkpoint. Failed: the store could not be read."""
StallKind = Literal["snapshot_wait", "data_fetch", "restore"]
OrderState = Literal[
    "requested", "delivered", "restoring", "unknown", "restored", "failed", "cancelled", "expired", "superseded"
]
"""Unknown: the attempt that was restoring stopped reporting; its next report decides."""
RestoreMode = Literal["in_place", "relaunch", "next_start"]
"""Relaunch: the supervisor restarts the script. Next start: an operator must restart it."""
OPEN_ORDER_STATES: tuple[OrderState, ...] = ("requested", "delivered", "restoring", "unknown")

ConfigurationSection = Literal["configuration", "environment"]
"""Configuration: what the script reports, such as hyper-parameters. Environment: what the agent collects."""
SupervisorState = Literal["restarting", "gave_up", "stopped", "ended"]
"""Stopped: by a signal to the supervisor. Ended: with the exit status 0 of the script."""

INTENDED_ENDS = ("finished", "interrupted", "preempted", "forked", "relaunched", "ended", "SystemExit")
"""Intended ends, as attempts report them; any other is the exception that ended the attempt."""
REQUESTED_EXITS = (
    "killed by SIGINT", "killed by SIGTERM", "exit status 143", "exit status 79", "exit status 77",
    "exit status 0",
)  # fmt: skip
"""Exits, as supervisors report them, of attempts that were asked to end, mostly by a scheduler."""


class Samples(msgspec.Struct, kw_only=True):
    """Measurements per iteration, as columns of equal length. NaN: not measured.

    Columns other than `iteration` may be empty: the batch's lineage and time apply, or nothing was measured.
    """

    iteration: IntegerColumn = []
    """Iterations; a rank of an attempt reports an iteration of a lineage once."""
    lineage: IntegerColumn = []
    at: Numbers = []
    seconds: Numbers = []
    """Wall time of the iteration, including stalls, without restores."""
    stall_seconds: Numbers = []
    """The part of `seconds` that training waited for checkpointing."""
    data_seconds: Numbers = []
    """The part of `seconds` that training waited for data."""
    metrics: dict[str, Numbers] = {}
    """`loss` and other values that the loop passed to `step`."""


class Gap(msgspec.Struct, kw_only=True, frozen=True):
    """Samples that were dropped while no server accepted them."""

    lineage: Lineage
    first_iteration: Iteration
    last_iteration: Iteration
    dropped: Count
    """Number of dropped iterations between the first and the last."""


class TrainingEvent(msgspec.Struct, kw_only=True):
    """An event at a point of training."""

    at: Time
    iteration: Iteration
    lineage: Lineage


class AttemptStarted(TrainingEvent, kw_only=True, tag="attempt_started"):
    resumed_from: OptionalText = None
    host: Text = ""
    pid: Count = 0
    world_size: Count = 1
    supervised: bool = False
    previous_exit: OptionalText = None
    """End of the previous attempt, as reported by the supervisor: `killed by SIGKILL`."""
    versions: Texts = {}
    owner: Text = ""
    labels: Texts = {}
    stores: TwoTexts = []
    """Addresses of the store and, where that is a drained directory, of the store behind it."""


class AttemptFinished(TrainingEvent, kw_only=True, tag="attempt_finished"):
    reason: Text
    """`finished`, `interrupted`, `ended` by an order, or the exception that ended the loop."""


class Origin(msgspec.Struct, kw_only=True, frozen=True):
    """The checkpoint of another job that a fork copied."""

    job: JobName
    checkpoint: CheckpointId
    digest: str
    """Digest of its manifest, which has the digests of all its data."""


class LeftOutData(msgspec.Struct, kw_only=True, frozen=True):
    """Batches that a restore left out of training."""

    iteration: Iteration
    """The restored iteration, after which they would have come."""
    batches: Count
    """Number of batches, on each rank."""
    loader: Count = 0
    """Number of their loader, in the order in which the script first used its loaders."""
    world_size: Count = 1
    """Number of ranks, each of which left out so many."""


class LineageStarted(TrainingEvent, kw_only=True, tag="lineage_started"):
    parent: CheckpointId | None = None
    """Id of the restored checkpoint; `None` for a fresh start."""
    order: OptionalText = None
    """Id of the restore request that began it; `None` if the script did."""
    left: CheckpointId | None = None
    """Id of the safety checkpoint of the state before the restore."""
    origin: Origin | None = None
    """On the first lineage of a fork: the source of the copy `parent`."""
    inexact: CheckpointId | None = None
    """Id of the checkpoint whose degraded restore its state descends from; `None` if its state is exact."""
    left_out: Annotated[tuple[LeftOutData, ...], msgspec.Meta(max_length=MAX_LEFT_OUT)] = ()
    """Data that was left out on the way to its state, oldest first."""
    trouble: Iteration | None = None
    """First iteration with a wrong loss, where the job's rule `on_trouble` restored; `None` otherwise."""


class CheckpointFacts(TrainingEvent, kw_only=True):
    """The fields of a checkpoint that agents report and servers return."""

    id: CheckpointId
    kind: CheckpointKind
    state: CheckpointState
    payload_bytes: Count = 0
    reused_bytes: Count = 0
    """Part of `payload_bytes` that is in files of earlier checkpoints, and was not written again."""
    raw_bytes: Count = 0
    """Size of the files before compression, where that made `payload_bytes` of it; 0 without compression."""
    snapshot_started_at: MeasuredTime = None
    snapshot_seconds: MeasuredSeconds = None
    """Time to copy the state, from the end of the iteration."""
    stall_seconds: MeasuredSeconds = None
    """Time that training waited for the copy."""
    persist_started_at: MeasuredTime = None
    persist_seconds: MeasuredSeconds = None
    durable_iteration: Iteration | None = None
    """Last finished iteration when the checkpoint became durable."""
    reason: OptionalText = None
    """Why it is failed, torn or damaged."""
    store_free_bytes: Count | None = None
    """Free space in the store once it was durable; `None` if unknown, as for an object store."""
    ranks: Annotated[list[RankCheckpointTimes], Fit(lambda ranks: [each for each in ranks if each.is_valid])] = []
    """Times of the slowest ranks, at most `MOST_RANK_SPANS`, for a durable checkpoint of several ranks."""
    changed: Annotated[list[ChangedTensor], Fit(lambda changed: [each for each in changed if each.is_valid])] = []
    """Tensors of rank 0 of which it stores only rows; empty unless it is incremental, and for a base."""
    metrics: Figures = {}
    """`loss`, the newest one when it was taken; empty if the script logs none."""


class Checkpoint(CheckpointFacts, kw_only=True, tag="checkpoint"):
    """The state of a checkpoint; sent after each change."""


class Stall(TrainingEvent, kw_only=True, tag="stall"):
    """A single long wait of training."""

    kind: StallKind
    seconds: Seconds


class IntervalDecision(TrainingEvent, kw_only=True, tag="paced"):
    """The checkpoint interval in force, its figures, and in `pending` the condition of its next change."""

    policy: Text
    interval: Count | None
    """In iterations, an estimate for an interval that is fixed in time; `None` while paused or still profiling."""
    interval_seconds: MeasuredSeconds = None
    budget: Number
    predicted_overhead: MeasuredNumber
    measured_overhead: MeasuredNumber
    measured_window_iterations: Count = 0
    reason: Text = ""
    pending: Text = ""  # what a change of the interval waits for
    profile: MeasuredFigures = {}
    """The fields of `holdfast.pacing.Profile` that have been measured."""
    spread: Figures = {}  # median absolute deviation of these figures, by field
    mtbf_seconds: MeasuredSeconds = None  # mean time between failures, if the script states it
    write_bytes_per_second: MeasuredNumber = None  # the write budget in force
    max_unsaved_seconds: MeasuredSeconds = None
    """Maximum unsaved work, as far as both budgets allow it."""
    total_iterations: Count | None = None  # as the script or its loader says
    samples_per_iteration: MeasuredNumber = None  # of all ranks together
    epoch_iterations: Count | None = None  # iterations of an epoch, as the loader says


class DesiredStateApplied(TrainingEvent, kw_only=True, tag="applied"):
    """The agent applied version `version` of the desired state at the end of `iteration`."""

    version: Count


class OrderStateChange(TrainingEvent, kw_only=True, tag="order"):
    """The state of a restore. `iteration` is the current one; for `restored`, the restored one."""

    order: Text
    state: OrderState
    reason: OptionalText = None
    seconds: MeasuredSeconds = None
    """Duration of the restore, while the loop waited."""
    safety_checkpoint: OptionalText = None


class RestoreModeReport(TrainingEvent, kw_only=True, tag="restores"):
    """How this attempt would carry out a restore; sent after each change."""

    mode: RestoreMode
    reason: Text = ""
    """Why it cannot restore in place."""
    start_seconds: MeasuredSeconds = None
    """Time from the start of the processes to the first iteration, if measured: the cost of a restart."""
    on_trouble: Text = ""
    """The rule about wrong losses in force."""
    batches_an_iteration: Count = 0
    """Batches that each iteration takes; 0: not known, or they differ."""


CopyPlace = Literal["both", "behind"]
"""`both`: in the directory and in the store behind it. `behind`: only there."""


class Inventory(msgspec.Struct, kw_only=True, tag="inventory"):
    """All durable checkpoints in the store; others that the server knows are gone."""

    at: Time
    checkpoints: Annotated[list[CheckpointId], msgspec.Meta(max_length=MAX_CHECKPOINTS)]
    pinned: list[CheckpointId] = []
    """Ids of pinned checkpoints, so that a server whose data was deleted learns them."""
    deleted: Annotated[dict[CheckpointId, str], texts_of(MAX_CHECKPOINTS)] = {}
    """Ids of the checkpoints that retention has just deleted, and why."""
    copies: Annotated[dict[CheckpointId, CopyPlace], msgspec.Meta(max_length=MAX_CHECKPOINTS)] = {}
    """Where those are that the store behind a drained directory has."""


class TensorNorms(msgspec.Struct, kw_only=True):
    """The floating-point tensors of a checkpoint, as columns. Norms are over finite values.

    A tensor that each rank has is listed per rank, as `rng.torch [rank 3]`.
    """

    name: list[str] = []
    elements: IntegerColumn = []
    norm: Numbers = []  # L2 norm
    largest: Numbers = []  # largest absolute value
    nan: IntegerColumn = []
    inf: IntegerColumn = []
    other_norm: Numbers = []
    """L2 norm in the other checkpoint; this column and the next are empty without one."""
    distance: Numbers = []
    """Norm of the difference; NaN if the other checkpoint has no such tensor, or one of another shape."""
    left_out: int = 0
    """Number of tensors beyond `MAX_REPORTED_TENSORS`."""


class VerificationReport(msgspec.Struct, kw_only=True, tag="verified"):
    """The progress or result of a verification; sent after each change."""

    at: Time
    request: Count
    checkpoint: CheckpointId
    verdict: Verdict | None = None
    """Result; `None` while the checkpoint is read."""
    against: CheckpointId | None = None
    """Id of the checkpoint that its tensors were compared with."""
    host: Text = ""
    read_bytes: Count = 0
    total_bytes: Count = 0
    seconds: MeasuredSeconds = None
    reason: OptionalText = None
    """The damaged file and tensor, or why the checkpoint could not be read."""
    tensors: TensorNorms | None = None


class ConfigurationReport(msgspec.Struct, kw_only=True, tag="configuration"):
    """One section of an attempt's configuration; it replaces an earlier report of that section."""

    at: Time
    section: ConfigurationSection
    values: Annotated[dict[str, str], texts_of(MAX_CONFIGURATION_ENTRIES)] = {}
    """Values by name, with the names of nested values joined by dots; secrets are masked."""


class OutputReport(msgspec.Struct, kw_only=True, tag="output"):
    """Lines of an attempt's output, without escape sequences; secrets are masked."""

    at: Time
    first: Count
    """Number of the first line, from 0 at the start of the processes; lines between two reports may be missing."""
    lines: list[str] = []


class SupervisorReport(msgspec.Struct, kw_only=True, omit_defaults=True, tag="supervisor"):
    """State of the supervisor after a start has ended; repeated until the next start has begun its attempt."""

    at: Time
    state: SupervisorState
    reason: Text
    """Why the start ended: its exception, or as in `killed by SIGKILL`."""
    start: Count = 0
    """Number of the next start in a row without a new iteration, or of the last one when it gave up; 0: starts are
    not counted, as for a restore."""
    limit: Count = 0
    """Number of such starts after which the supervisor gives up."""
    delay_seconds: Seconds = 0.0
    """Time until the next start."""
    waits: bool = False
    """Whether the supervisor that gave up waits for a restore request."""


class RankTotals(msgspec.Struct, kw_only=True, tag="rank_work"):
    """Totals of one of several ranks since its last report.

    Of rank 0 only the barrier counts: it also sends samples per iteration.
    """

    at: Time
    """Time at which the last of these iterations ended."""
    lineage: Lineage
    first_iteration: Iteration
    last_iteration: Iteration
    iterations: Iteration
    seconds: Seconds
    longest_seconds: Seconds
    stall_seconds: Seconds = 0.0
    data_seconds: Seconds = 0.0
    barrier_iterations: Iteration = 0
    """Number of iterations whose barrier was measured."""
    barrier_seconds: Seconds = 0.0
    """Time from the rank's last gradient to the update: gradient exchange and waiting for other ranks."""


class MachineSample(msgspec.Struct, kw_only=True, omit_defaults=True, tag="machine"):
    """Use of a rank's machine since its sample before; `None`: not measured.

    Disk and network: the largest value of a single disk or network interface, because the system lists a disk
    array and its disks, or a bridge and its interfaces, side by side.
    """

    at: Time
    lineage: Lineage
    iteration: Iteration
    gpu_share: MeasuredNumber = None
    """Share of the last second or less in which the rank's GPU was busy; 1 is all of it."""
    gpu_memory_bytes: MeasuredNumber = None  # memory of the GPU in use, by all processes
    cpu_share: MeasuredNumber = None
    """Use of the CPUs of the host; 1 is all of them."""
    process_cpu_cores: MeasuredNumber = None
    """CPU time of the rank's process per second: the number of cores that it used."""
    memory_bytes: MeasuredNumber = None
    """Memory of the host that is not available."""
    process_memory_bytes: MeasuredNumber = None
    """Resident memory of the rank's process."""
    disk_read_bytes_per_second: MeasuredNumber = None
    disk_write_bytes_per_second: MeasuredNumber = None
    disk_busy_share: MeasuredNumber = None
    """Share of the time in which the busiest disk had requests; 1 is all of it."""
    network_received_bytes_per_second: MeasuredNumber = None
    network_sent_bytes_per_second: MeasuredNumber = None


MACHINE_METRICS = tuple(field.name for field in msgspec.structs.fields(MachineSample) if field.default is None)
"""Names of the measured fields of a `MachineSample`."""


class MemoryReport(msgspec.Struct, kw_only=True, tag="memory"):
    """Snapshots in the memory of a host; sent by the first rank there after each change."""

    at: Time
    host: Text
    snapshots: Annotated[list[HeldSnapshot], msgspec.Meta(max_length=MAX_HELD)] = []


class RankPlace(msgspec.Struct, kw_only=True, tag="rank_place"):
    """Where a rank runs, with its device and its scheduler's job in words; sent at the start of an attempt."""

    at: Time
    host: Text
    device: Text = ""
    scheduler_job: Text = ""


class AnnotationReport(TrainingEvent, kw_only=True, tag="annotation"):
    """An annotation of the script at an iteration, such as the end of an epoch, which the timeline shows."""

    text: Text


class Notice(TrainingEvent, kw_only=True, tag="notice"):
    """A message for operators: a full disk, a damaged checkpoint, a rejected restore."""

    level: Literal["info", "warning", "error"]
    code: Text
    message: Text


Event = (
    AttemptStarted
    | AttemptFinished
    | LineageStarted
    | Checkpoint
    | Stall
    | IntervalDecision
    | DesiredStateApplied
    | OrderStateChange
    | RestoreModeReport
    | Inventory
    | VerificationReport
    | RankTotals
    | MachineSample
    | ConfigurationReport
    | OutputReport
    | SupervisorReport
    | MemoryReport
    | RankPlace
    | StoreReport
    | AnnotationReport
    | HaltReport
    | ValueReport
    | Notice
)


class Batch(msgspec.Struct, kw_only=True):
    """The reports of one rank. (job, uid, rank, lane, sequence) identifies it: sent twice, it is stored once.

    Batches of a lane are sent in order, each once the previous one was acknowledged or rejected.
    """

    protocol: int = PROTOCOL
    job: str
    uid: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_UID)]
    """Random name of the attempt; unlike its number, it is not reused when a store is deleted."""
    attempt: Attempt
    rank: Count
    lane: Lane = "control"
    sequence: Count
    sent_at: float
    iteration: Iteration
    lineage: Lineage
    samples: Samples | None = None
    events: Annotated[list[Event], msgspec.Meta(max_length=MAX_EVENTS)] = []
    gaps: Annotated[list[Gap], msgspec.Meta(max_length=MAX_GAPS)] = []
    """Samples dropped since the previous batch."""


class Ack(msgspec.Struct, kw_only=True):
    acked: int
    """Sequence number of the committed batch."""
    version: int
    """Version of the desired state, for agents behind a proxy that cuts long polls."""


class RestoreOrder(msgspec.Struct, kw_only=True, frozen=True):
    id: str
    checkpoint: str
    fence: Count
    """Lowest attempt number that may carry it out."""
    expires_in_seconds: float | None = None
    """Time until it expires, on the server's clock, when this was sent; `None` if unknown."""
    degraded: bool = False
    """Replace what is lost where only the important bytes of the checkpoint are left."""
    skip: DataSkip | None = None
    """Data to leave out; `None`: training repeats the same data."""


class VerifyRequest(msgspec.Struct, kw_only=True, frozen=True):
    """A request to read a checkpoint and compare every byte with its digests."""

    id: Count
    """Version of the desired state that added it."""
    checkpoint: str
    against: str | None = None
    """Id of another checkpoint to compare the tensors with."""


class Desired(msgspec.Struct, kw_only=True, frozen=True):
    """The settings and requests of operators for a job. `None`: the script's setting applies."""

    version: Count = 0
    budget: float | None = None
    write_bytes_per_second: float | None = None  # the write budget
    max_unsaved_seconds: float | None = None
    """Maximum unsaved work, as far as both budgets allow it."""
    policy: str | None = None
    every: int | None = None
    interval_seconds: float | None = None
    """A fixed interval in wall-clock time, instead of `every` in iterations."""
    paused: bool = False
    retention: str | None = None
    """Retention rules, as `holdfast.retention` parses them."""
    on_trouble: str | None = None
    """Reaction to wrong losses, as `holdfast.protocol.orders` parses it."""
    checkpoint_request: Count = 0  # number of requests for a checkpoint so far
    probe_request: Count = 0  # number of requests to profile data loading so far
    restore: RestoreOrder | None = None  # the open restore request
    training: TrainingOrder | None = None
    """The newest order to pause, continue or end training."""
    pins: tuple[str, ...] | None = None
    """Ids of pinned checkpoints, at most `MAX_PINS`; `None`: not set here, and the store's pins apply."""
    alert_pins: tuple[str, ...] = ()
    """Those of `pins` that only open alerts keep. They change without a new version, as they are no settings."""
    verify: tuple[VerifyRequest, ...] = ()
    """Open verification requests, oldest first, at most `MAX_OPEN_VERIFICATIONS`; processed one at a time."""
    values: tuple[ValueChange, ...] = ()
    """Changes of values that the agent has not applied yet, oldest first."""
    shares: tuple[StoreShare, ...] | None = None
    """The job's shares of stores that operators limit; `None`: the server knows no limits of stores."""
    share_number: Count = 0  # increases whenever `shares` change, which makes no version
    latest_attempt: int = 0
    latest_lineage: int = 0
    """Highest numbers that the server knows: not reused where the store was deleted; see `PLAUSIBLE_STEP`."""
