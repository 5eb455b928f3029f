"""A checkpoint from the request to its end, as one explicit state. Imports no torch.

    requested → copying → copied → writing → durable
                                           ↘ failed | torn | abandoned

`CheckpointRun` is the only place that changes the state, under one lock. Listeners are called after each
transition, on the thread that made it and without the lock. Waits for a state end when they have returned.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from holdfast.format.manifest import Shard, TensorRange
from holdfast.protocol.messages import CheckpointKind, RankSpan, checkpoint_id

if TYPE_CHECKING:
    from holdfast.pacing.profile import SnapshotMode
    from holdfast.snapshot.host_buffers import Arena
    from holdfast.state.round_trip import RoundTrip

logger = logging.getLogger("holdfast")


class RunState(enum.StrEnum):
    REQUESTED = "requested"
    COPYING = "copying"
    """What the forward pass changes is copied; the rest follows on the thread that copies."""
    COPIED = "copied"
    """The copy is over; `CopyResult.problem` says why it cannot become durable, if so."""
    WRITING = "writing"
    DURABLE = "durable"
    FAILED = "failed"
    TORN = "torn"
    """Training changed tensors while they were copied; nothing was written."""
    ABANDONED = "abandoned"
    """Interrupted before a writer had it."""


SETTLED = frozenset({RunState.DURABLE, RunState.FAILED, RunState.TORN, RunState.ABANDONED})
BEFORE_COPIED = frozenset({RunState.REQUESTED, RunState.COPYING})
NEXT: Mapping[RunState, frozenset[RunState]] = {
    RunState.REQUESTED: frozenset({RunState.COPYING, RunState.FAILED, RunState.ABANDONED}),
    RunState.COPYING: frozenset({RunState.COPIED, RunState.FAILED, RunState.ABANDONED}),
    RunState.COPIED: frozenset({RunState.WRITING, RunState.FAILED, RunState.TORN}),
    RunState.WRITING: frozenset({RunState.DURABLE, RunState.FAILED, RunState.TORN}),
} | dict.fromkeys(SETTLED, frozenset())


class IllegalTransition(RuntimeError):
    """A defect of ours. The edges of the threads that checkpoint catch and log it; training goes on."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Who writes a checkpoint, and after which one."""

    job: str
    attempt: int
    uid: str = ""
    """The attempt's identifier in its own store."""
    parent: str | None
    rank: int = 0
    world_size: int = 1
    place: str | None = None
    """Where in the store rank 0 has begun the checkpoint; None for one that this process writes alone."""
    versions: dict[str, str]
    replaces: bool = False
    """A checkpoint of the same name was found to be damaged."""
    bytes_per_second: float | None = None
    """Write no faster than this, so that training goes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What is to be saved and how; fixed before anything is copied."""

    iteration: int
    lineage: int
    kind: CheckpointKind
    origin: Origin
    number: int = 0
    """Which checkpoint of the attempt it is: the same on all ranks."""
    mode: SnapshotMode = "cpu"
    at_once: bool = False
    """Copy everything while training waits."""
    over_seconds: float = 0.0
    """Spread the writing over this time; 0 writes at full speed."""
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    """Where and how the state was trained."""
    started_at: float = field(default_factory=time.time)
    survived: bool = False
    """An earlier attempt copied it into the memory tier, and ended before it was durable."""

    @property
    def id(self) -> str:
        return checkpoint_id(self.iteration, self.lineage)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotContents:
    """A state and where in host memory its tensors lie."""

    arena: Arena
    trees: dict[str, Any] = field(default_factory=dict)
    slots: list[TensorRange] = field(default_factory=list)
    views: dict[str, str] = field(default_factory=dict)
    shards: dict[str, Shard] = field(default_factory=dict)
    """Tensors that are parts of larger ones."""
    own: set[str] = field(default_factory=set)
    """Names of tensors that may differ between ranks."""
    alike: dict[str, str] = field(default_factory=dict)
    """Values that other ranks must agree on."""
    round_trip: RoundTrip | None = None
    """Checks that what is written decodes to what was captured; None where that is known."""

    @property
    def size_bytes(self) -> int:
        return self.slots[-1].end if self.slots else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyResult:
    """What the copy took, and what went wrong with it."""

    seconds: float = 0.0
    device_copy_seconds: float | None = None
    """Tg, of this copy or of the last one that was first made within a device's memory."""
    device_memory: tuple[int, int] = (0, 0)
    """(M, Mmax) in bytes of the device with the least room; zeros where there is none."""
    torn: Sequence[str] = ()
    """Names of the tensors that changed while they were copied."""
    failure: BaseException | None = None

    @property
    def problem(self) -> str | None:
        """Why the copy cannot become durable; None where it can."""
        if self.failure is not None:
            return f"the copy failed: {self.failure}"
        if self.torn:
            return f"{len(self.torn)} tensors changed while they were copied: {', '.join(self.torn[:3])}"
        return None

    @property
    def is_torn(self) -> bool:
        return self.failure is None and bool(self.torn)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult:
    """What the writing took, and why it ended as it did."""

    reason: str | None = None
    """None for a durable checkpoint."""
    seconds: float = 0.0
    """From the end of the copy, or the start of a writer if that was later."""
    backend: str | None = None
    """`thread` or `process`; None when nothing was written."""
    fenced: bool = False
    """It failed because a newer attempt of the job has begun."""
    stored_bytes: int = 0
    """Size of all ranks' files; 0 where that is not known."""
    ranks: Sequence[RankSpan] = ()
    """What the slowest of several ranks took, on rank 0 once it is durable."""


class RunListener(Protocol):
    """Telemetry, pacing, retention, buffers: whatever follows runs."""

    def run_changed(self, run: CheckpointRun, state: RunState) -> None: ...


class CheckpointRun:
    """One checkpoint on this rank. Thread-safe: training, copying and writing threads share it."""

    def __init__(self, request: RunRequest, *listeners: RunListener) -> None:
        self.request = request
        self._listeners = listeners
        self._changed = threading.Condition()
        self._state = self._reported = RunState.REQUESTED
        """The state, and the last one that all listeners know of."""
        # set with the transition that they belong to, and only read by others
        self.contents: SnapshotContents | None = None
        self.copy, self.result = CopyResult(), WriteResult()
        self.write_started_at = 0.0
        self.stall_seconds = 0.0
        """How long training has waited for the copy so far."""

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def state(self) -> RunState:
        with self._changed:
            return self._state

    @property
    def size_bytes(self) -> int:
        return self.contents.size_bytes if self.contents is not None else 0

    def add_stall(self, seconds: float) -> None:
        with self._changed:
            self.stall_seconds += seconds

    def begin_copy(self, contents: SnapshotContents) -> None:
        self._move(RunState.COPYING, contents=contents)

    def end_copy(self, result: CopyResult) -> None:
        self._move(RunState.COPIED, copy=result)

    def begin_write(self) -> None:
        self._move(RunState.WRITING, write_started_at=time.time())

    def end(self, state: RunState, result: WriteResult) -> None:
        self._move(state, result=result)

    def wait_copied(self, timeout_seconds: float | None = None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._reported not in BEFORE_COPIED, timeout_seconds)

    def wait_settled(self, timeout_seconds: float | None = None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._reported in SETTLED, timeout_seconds)

    def _move(self, to: RunState, **measured: Any) -> None:
        with self._changed:
            if to not in NEXT[self._state]:
                raise IllegalTransition(f"checkpoint {self.id} cannot go from {self._state} to {to}")
            for name, value in measured.items():
                setattr(self, name, value)
            self._state = to
        for listener in self._listeners:
            try:
                listener.run_changed(self, to)
            except Exception:  # a listener that fails must not stop the run, nor the runs after it
                logger.exception("could not report checkpoint %s as %s", self.id, to)
        with self._changed:
            self._reported = to
            self._changed.notify_all()
