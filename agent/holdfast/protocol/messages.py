"""The messages between agent and server: one schema, versioned.

Agents send a `Batch` about once a second (msgpack, `POST /api/v1/ingest`) and get an `Ack` once the server
has committed it. They hold a long poll on `Desired` (`GET /api/v1/jobs/{job}/desired`). Unknown fields are
ignored on both sides, so that neighbouring versions understand each other; a change that they could not
survive raises `PROTOCOL`.

Times named `at` are seconds since the Unix epoch on the clock of whoever wrote them, for display only:
order follows (attempt, sequence) and (lineage, iteration).
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec

PROTOCOL = 2
"""2: columns as bytes, two lanes, and gaps."""
DEFAULT_PORT = 7117
MOST_PINS = 64
"""Checkpoints of one job that people may pin at the same time."""
MOST_RANKS_TOLD = 32
"""Of one checkpoint: the slowest, however many wrote it."""
MOST_LABELS = 16
"""Of one job, each with at most 64 characters on either side."""
MOST_VERIFICATIONS = 8
"""Checkpoints of one job that may wait at the same time to be read back."""
MOST_TENSORS = 2000
"""Of which one verification tells; of a checkpoint with more, the largest."""
MAX_LINEAGE = 999_999_999
"""Largest lineage number: a checkpoint's name has room for nine digits."""
MAX_ATTEMPT = 2**31 - 1
"""Largest attempt number."""
MAX_ITERATION = 999_999_999_999
"""Largest iteration number: a checkpoint's name has room for twelve digits."""
MAX_INTEGER = 2**53
"""Largest whole number of any kind: JSON readers hold those up to here exactly."""
PLAUSIBLE_STEP = 1_000
"""How far an attempt or lineage number from outside may lie beyond the largest known one."""

SUPERVISOR_RANK = 1 << 20
"""As which a supervisor speaks for the attempt that it watches over: it trains nothing."""
RESCUE_RANK = SUPERVISOR_RANK + 1
"""As which the process speaks that saves what a dead attempt has left in memory."""

Lane = Literal["control", "samples"]
"""Control: what happened, which is never dropped. Samples: what was measured, which is thinned under pressure."""
Numbers = list[float] | bytes
"""A column: a list, or the quicker way, its numbers as float64, little-endian, one after the other."""
Counts = list[int] | bytes
"""A column of whole numbers: a list, or int64, little-endian."""

CheckpointKind = Literal["scheduled", "requested", "safety", "final"]
CheckpointState = Literal["snapshot", "persisting", "durable", "failed", "torn", "damaged", "missing"]
Verdict = Literal["sound", "damaged", "gone", "failed"]
"""Of reading a checkpoint back. Gone: retention was quicker. Failed: the store could not be read, which says
nothing of the checkpoint."""
StallKind = Literal["snapshot_wait", "persist_backpressure", "data_fetch", "data_prep", "barrier", "restore"]
OrderState = Literal[
    "requested", "delivered", "restoring", "unknown", "restored", "failed", "cancelled", "expired", "superseded"
]
"""Unknown: nothing is heard any more of the attempt that was restoring; the next contact tells."""
RestoreMode = Literal["in_place", "relaunch", "next_start"]
"""Relaunch: the script ends, and its supervisor starts it again. Next start: somebody has to."""
OPEN_ORDER_STATES: tuple[OrderState, ...] = ("requested", "delivered", "restoring", "unknown")

PLANNED_ENDS = ("finished", "interrupted", "preempted", "forked", "relaunched", "SystemExit")
"""Ends of an attempt, by its own word, that somebody wanted; any other is the exception that broke it."""
ASKED_TO_END = ("killed by SIGINT", "killed by SIGTERM", "exit status 143", "exit status 79", "exit status 0")
"""What a supervisor saw of an attempt that did not live to say more: it was told to go, by a scheduler mostly."""

_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_CHECKPOINT = re.compile(r"([0-9]{12})-([0-9]{1,9})")


def validate_job(job: str) -> str:
    """Return `job` unchanged, or raise ValueError: its name is a directory, a URL segment and a table key."""
    if not isinstance(job, str) or not _JOB.fullmatch(job):
        raise ValueError(
            f"job name {job!r}: use 1 to 100 letters, digits, '.', '_' or '-', starting with a letter or digit"
        )
    return job


def checkpoint_id(iteration: int, lineage: int) -> str:
    """The name of a checkpoint, in a store and in every message: `000000001200-3`."""
    return f"{iteration:012d}-{lineage}"


def parse_checkpoint_id(checkpoint: str) -> tuple[int, int]:
    """(iteration, lineage) of a checkpoint's name; ValueError when it is not one."""
    match = _CHECKPOINT.fullmatch(checkpoint)
    if match is None:
        raise ValueError(
            f"checkpoint id {checkpoint!r}: expected <iteration, 12 digits>-<lineage>, as in 000000001200-3"
        )
    return int(match[1]), int(match[2])


def is_checkpoint_id(name: str) -> bool:
    """Whether something in a store has a checkpoint's name; there may be other things beside them."""
    return _CHECKPOINT.fullmatch(name) is not None


class Samples(msgspec.Struct, kw_only=True):
    """What was measured at each iteration, by column; all columns have the same length. NaN: not measured.

    A column other than `iteration` may be left empty: the batch's lineage and time stand for it, or nothing was
    measured.
    """

    iteration: Counts = []
    """Each once, in the whole of what a rank of an attempt reports of a lineage."""
    lineage: Counts = []
    at: Numbers = []
    seconds: Numbers = []
    """Wall time of the iteration, stalls included, restores left out."""
    stall_seconds: Numbers = []
    """Of these, waits that checkpointing caused."""
    data_seconds: Numbers = []
    """Of these, waits for the next batch."""
    metrics: dict[str, Numbers] = {}
    """`loss` and whatever else the loop gave to `step`."""


class Gap(msgspec.Struct, kw_only=True, frozen=True):
    """Samples that were thinned away, for want of room while no server took them."""

    lineage: int
    first_iteration: int
    last_iteration: int
    dropped: int
    """How many of the iterations from first to last."""


class Occurrence(msgspec.Struct, kw_only=True):
    """Something that happened at a point of training."""

    at: float
    iteration: int
    lineage: int


class AttemptStarted(Occurrence, kw_only=True, tag="attempt_started"):
    resumed_from: str | None = None
    host: str = ""
    pid: int = 0
    world_size: int = 1
    supervised: bool = False
    previous_exit: str | None = None
    """How the attempt before ended, as its supervisor saw it: `killed by SIGKILL`."""
    versions: dict[str, str] = {}
    owner: str = ""
    labels: dict[str, str] = {}


class AttemptFinished(Occurrence, kw_only=True, tag="attempt_finished"):
    reason: str
    """`finished`, `interrupted` or the exception that ended the loop."""


class Origin(msgspec.Struct, kw_only=True, frozen=True):
    """The checkpoint of another job that a fork began with a copy of."""

    job: str
    checkpoint: str
    digest: str
    """Of its manifest, and so of all that it holds."""


class LineageStarted(Occurrence, kw_only=True, tag="lineage_started"):
    parent: str | None = None
    """The checkpoint restored; None for a fresh start."""
    order: str | None = None
    """The restore order that began it; None when the script itself did."""
    left: str | None = None
    """The safety checkpoint of the state that was left for it."""
    origin: Origin | None = None
    """Of the first lineage of a fork: what `parent` is a copy of."""


class RankSpan(msgspec.Struct, kw_only=True, frozen=True):
    """What one of several ranks took for its own part of a checkpoint."""

    rank: int
    snapshot_seconds: float
    stall_seconds: float
    persist_seconds: float
    """Writing its part, without the wait for the parts of others."""


class CheckpointFacts(Occurrence, kw_only=True):
    """What an agent reports of a checkpoint, and a server answers."""

    id: str
    kind: CheckpointKind
    state: CheckpointState
    payload_bytes: int = 0
    snapshot_started_at: float | None = None
    snapshot_seconds: float | None = None
    """Copying, from the end of the iteration to the last tensor."""
    stall_seconds: float | None = None
    """Training's own wait for the copy."""
    persist_started_at: float | None = None
    persist_seconds: float | None = None
    durable_iteration: int | None = None
    """The last finished iteration when the checkpoint became durable."""
    reason: str | None = None
    """Why it failed, tore or is damaged."""
    store_free_bytes: int | None = None
    """Room left in the store once it was durable; None where that cannot be told, as of an object store."""
    ranks: list[RankSpan] = []
    """Of a durable one that several ranks wrote: at most `MOST_RANKS_TOLD`, the slowest first."""


class Checkpoint(CheckpointFacts, kw_only=True, tag="checkpoint"):
    """What is known of a checkpoint so far; sent again as it moves on, the newest word wins."""


class Stall(Occurrence, kw_only=True, tag="stall"):
    """A wait long enough to be worth a row of its own."""

    kind: StallKind
    seconds: float


class Paced(Occurrence, kw_only=True, tag="paced"):
    """The interval now in force and the figures it follows from."""

    policy: str
    interval: int | None
    """None: no checkpoints for now (paused, or still profiling)."""
    budget: float
    predicted_overhead: float | None
    measured_overhead: float | None
    measured_window_iterations: int = 0
    reason: str = ""
    profile: dict[str, float] = {}
    """The fields of `holdfast.pacing.Profile` that have been measured."""
    spread: dict[str, float] = {}
    """By how much these scatter: the median deviation from the median, by field."""
    mtbf_seconds: float | None = None
    """Mean time between failures, where the script states it."""


class Applied(Occurrence, kw_only=True, tag="applied"):
    """The agent acts on version `version` of what is desired, from the end of `iteration` on."""

    version: int


class OrderMoved(Occurrence, kw_only=True, tag="order"):
    """`iteration` is where training stood when the order got here; for `restored`, where it goes on from."""

    order: str
    state: OrderState
    reason: str | None = None
    seconds: float | None = None
    """From the boundary at which the loop stopped to the state being back."""
    safety_checkpoint: str | None = None


class Restores(Occurrence, kw_only=True, tag="restores"):
    """How this attempt would carry out an order to restore; told again when that changes."""

    mode: RestoreMode
    reason: str = ""
    """Why not in place."""
    start_seconds: float | None = None
    """From the start of this attempt's processes to the end of its first iteration, where somebody measured it:
    what another start costs."""


class Inventory(msgspec.Struct, kw_only=True, tag="inventory"):
    """All durable checkpoints in the store; what the server knows beyond these is gone."""

    at: float
    checkpoints: list[str]
    pinned: list[str] = []
    """What the store keeps whatever retention says, so that a server whose data was deleted learns of it."""


class TensorNorms(msgspec.Struct, kw_only=True):
    """The floating-point tensors of a checkpoint, by column. Norms are over what is finite.

    One that each rank has of its own is told for each, as `rng.torch [rank 3]`.
    """

    name: list[str] = []
    elements: Counts = []
    norm: Numbers = []
    """L2."""
    largest: Numbers = []
    """Of the absolute values."""
    nan: Counts = []
    inf: Counts = []
    other_norm: Numbers = []
    """In the checkpoint that it was compared with; this column and the next are empty without one."""
    distance: Numbers = []
    """The norm of the difference; NaN for a tensor that the other checkpoint has not, or laid out otherwise."""
    left_out: int = 0
    """Tensors beyond `MOST_TENSORS`."""


class Verified(msgspec.Struct, kw_only=True, tag="verified"):
    """How far the reading back of a checkpoint has come that somebody asked for; the newest word wins."""

    at: float
    request: int
    checkpoint: str
    verdict: Verdict | None = None
    """None: it is being read."""
    against: str | None = None
    """The checkpoint that its tensors were compared with."""
    host: str = ""
    read_bytes: int = 0
    total_bytes: int = 0
    seconds: float | None = None
    reason: str | None = None
    """Which file, and which tensor in it, is not what was written; or why it could not be read."""
    tensors: TensorNorms | None = None


class RankWork(msgspec.Struct, kw_only=True, tag="rank_work"):
    """What one of several ranks did since it last said so, as sums. Each rank tells its own.

    Of rank 0 only the barrier counts: the rest of it comes iteration by iteration, as samples.
    """

    at: float
    """When the last of these iterations ended."""
    lineage: int
    first_iteration: int
    last_iteration: int
    iterations: int
    seconds: float
    longest_seconds: float
    stall_seconds: float = 0.0
    data_seconds: float = 0.0
    barrier_iterations: int = 0
    """Of how many the barrier was measured."""
    barrier_seconds: float = 0.0
    """From the rank's own last gradient to the update: exchanging gradients, and waiting for the other ranks."""


class Notice(Occurrence, kw_only=True, tag="notice"):
    """Something an operator should see: a full disk, a damaged checkpoint, a refused order."""

    level: Literal["info", "warning", "error"]
    code: str
    message: str


Event = (
    AttemptStarted
    | AttemptFinished
    | LineageStarted
    | Checkpoint
    | Stall
    | Paced
    | Applied
    | OrderMoved
    | Restores
    | Inventory
    | Verified
    | RankWork
    | Notice
)


class Batch(msgspec.Struct, kw_only=True):
    """What one rank has to say. (job, uid, rank, lane, sequence) names it for ever: sent twice, it is kept once.

    Those of a lane are sent in the order of their sequence, each when the one before was acknowledged or refused.
    """

    protocol: int = PROTOCOL
    job: str
    uid: str
    """Random name of the attempt; unlike its number it cannot come back when a store is deleted."""
    attempt: int
    rank: int
    lane: Lane = "control"
    sequence: int
    sent_at: float
    iteration: int
    lineage: int
    samples: Samples | None = None
    events: list[Event] = []
    gaps: list[Gap] = []
    """What was thinned away since the batch before."""


class Ack(msgspec.Struct, kw_only=True):
    acked: int
    """The sequence that is now committed."""
    version: int
    """Of what is desired, so that an agent behind a proxy that cuts long polls still learns of a change."""


_Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]
"""A count that a message can hold: an answer with another number is not decoded."""


class RestoreOrder(msgspec.Struct, kw_only=True, frozen=True):
    id: str
    checkpoint: str
    fence: _Number
    """The lowest attempt that may act on it."""
    expires_in_seconds: float | None = None
    """What was left of its time, on the server's clock, when this was sent. None: it does not say."""


class VerifyRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Read a checkpoint back, from where it is kept, and compare every byte with its digests."""

    id: _Number
    """The version of what is desired that it came with."""
    checkpoint: str
    against: str | None = None
    """Another one, to tell how far each tensor is from it."""


class Desired(msgspec.Struct, kw_only=True, frozen=True):
    """What people want a job to be. None: no order of theirs, the script's own setting stands."""

    version: _Number = 0
    budget: float | None = None
    policy: str | None = None
    every: int | None = None
    paused: bool = False
    retention: str | None = None
    """Which checkpoints stay, as `holdfast.protocol.retention` reads it."""
    checkpoint_request: _Number = 0
    """Counts the clicks on "checkpoint now"."""
    probe_request: _Number = 0
    """Counts the clicks on "probe data loading"."""
    restore: RestoreOrder | None = None
    """The open order, if there is one."""
    pins: tuple[str, ...] | None = None
    """Checkpoints that retention must leave, at most `MOST_PINS`; None: nobody has said anything of pins here, and
    those that the store has noted stay."""
    verify: tuple[VerifyRequest, ...] = ()
    """The first first, one at a time; at most `MOST_VERIFICATIONS`. One that has its verdict is not among them."""
    latest_attempt: int = 0
    latest_lineage: int = 0
    """The highest numbers the server has seen, so that a job whose store was deleted does not reuse them. An agent
    ignores one that lies more than `PLAUSIBLE_STEP` beyond what its store knows."""
