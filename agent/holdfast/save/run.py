"""The state machine of one checkpoint. Imports no torch.

    requested → copying → copied → writing → durable
        ↓          ↓        ↓         ↓
    failed | abandoned      failed | torn

`Run` is the only place that changes the state, under one lock. Listeners are called after each
transition, on the thread that made it and without the lock. Waits for a state end when they have returned.
"""

from __future__ import annotations

import enum
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from holdfast.errors import HoldfastError
from holdfast.pacing.policy import Profile, SnapshotMode
from holdfast.protocol.field_types import ChangedTensor, RankCheckpointTimes
from holdfast.retention import LoggedMetric
from holdfast.save.draft import Draft

if TYPE_CHECKING:
    from holdfast.save.host_buffers import Arena
    from holdfast.save.host_state import HostImage
    from holdfast.state.round_trip import RoundTrip

logger = logging.getLogger("holdfast")


class RunState(enum.StrEnum):
    REQUESTED = "requested"
    COPYING = "copying"
    """State that the forward pass changes is copied; a thread copies the rest."""
    COPIED = "copied"
    """The copy has ended; `CopyResult.problem` is the reason if it cannot become durable."""
    WRITING = "writing"
    DURABLE = "durable"
    FAILED = "failed"
    TORN = "torn"
    """Training changed tensors while they were copied; nothing was written."""
    ABANDONED = "abandoned"
    """Interrupted before it was submitted to a writer."""


SETTLED = frozenset({RunState.DURABLE, RunState.FAILED, RunState.TORN, RunState.ABANDONED})
BEFORE_COPIED = frozenset({RunState.REQUESTED, RunState.COPYING})
NEXT: Mapping[RunState, frozenset[RunState]] = {
    RunState.REQUESTED: frozenset({RunState.COPYING, RunState.FAILED, RunState.ABANDONED}),
    RunState.COPYING: frozenset({RunState.COPIED, RunState.FAILED, RunState.ABANDONED}),
    RunState.COPIED: frozenset({RunState.WRITING, RunState.FAILED, RunState.TORN}),
    RunState.WRITING: frozenset({RunState.DURABLE, RunState.FAILED, RunState.TORN}),
} | dict.fromkeys(SETTLED, frozenset())


@dataclass(frozen=True, slots=True)
class CheckpointOutcome:
    """Outcome of one checkpoint on this rank, as `Session.wait` returns it."""

    checkpoint: str
    """Its name in the store, such as `000000001200-1`."""
    iteration: int
    state: RunState
    """`durable`, `failed`, `torn` or `abandoned`."""
    reason: str | None = None
    """Why it is not durable."""

    @property
    def is_durable(self) -> bool:
        return self.state is RunState.DURABLE


class NotPrepared(HoldfastError):
    """A rank has nothing to commit; `torn` when tensors changed while they were copied."""

    def __init__(self, reason: str, *, torn: bool = False) -> None:
        super().__init__(reason)
        self.torn = torn


class IllegalTransition(RuntimeError):
    """A defect of Holdfast. The checkpoint threads catch and log it; training continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyResult:
    """Duration and outcome of the copy."""

    seconds: float = 0.0
    device_copy_seconds: float | None = None
    """Tg: duration of the last copy within a device's memory."""
    device_memory: tuple[int, int] = (0, 0)
    """(M, Mmax) in bytes of the device with the least free memory; zeros without a device."""
    torn: Sequence[str] = ()
    """Names of the tensors that changed while they were copied."""
    versions: Mapping[str, int] = field(default_factory=dict)
    """Version counters of the tensors that only an optimizer step changes, by name."""
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
    """Duration and outcome of the write."""

    reason: str | None = None
    """Why the checkpoint is not durable; None if it is."""
    seconds: float = 0.0
    """Time since the end of the copy, or since a writer became free if that was later."""
    fenced: bool = False
    """The write failed because a newer attempt of the job has begun."""
    stored_bytes: int = 0
    """Size of all ranks' files; 0 if unknown."""
    reused_bytes: int = 0
    """Size of the files among them that earlier checkpoints wrote."""
    written_bytes: int = 0
    """Size of the others with their parity: what was sent to the store."""
    raw_bytes: int = 0
    """Size of all ranks' files before they were encoded; 0 if none was."""
    ranks: Sequence[RankCheckpointTimes] = ()
    """Durations of the slowest ranks, on rank 0 once the checkpoint is durable."""
    changed: Sequence[ChangedTensor] = ()
    """Tensors of which this rank wrote only rows."""


MetricsReader = Callable[[], Mapping[str, LoggedMetric]]


class RunListener(Protocol):
    """Telemetry, pacing, retention and buffers listen to runs."""

    def run_changed(self, run: Run, state: RunState) -> None: ...


class Run:
    """One checkpoint on this rank. Thread-safe: training, copying and writing threads share it.

    Args:
        draft: what is known at the decision. Transitions complete it.
        listeners: called in this order.
        number: sequence number within the attempt, the same on all ranks.
        mode: how tensors on a device are copied.
        at_once: copy everything while training waits.
        read_metrics: returns the newest value of each metric once the state is copied; for any thread.
        survived: an earlier attempt copied it into memory that outlives a process and ended before it was durable.
    """

    def __init__(
        self,
        draft: Draft,
        listeners: Sequence[RunListener] = (),
        *,
        number: int = 0,
        mode: SnapshotMode = "cpu",
        at_once: bool = False,
        read_metrics: MetricsReader | None = None,
        survived: bool = False,
    ) -> None:
        self._listeners = listeners
        self._read_metrics = read_metrics
        self.id = draft.id
        self.number, self.mode, self.at_once, self.survived = number, mode, at_once, survived
        self.is_urgent = False
        """Whether something waits for its end, so that the rate limit of the store no longer applies."""
        self._lock = threading.Lock()
        self.state = RunState.REQUESTED
        self._copied, self._settled = threading.Event(), threading.Event()
        """Event that is set when the listeners have returned from the transition."""
        # set by transitions only
        self.draft = draft
        self.arena: Arena | None = None
        """Where the copied state is."""
        self.image: HostImage | None = None
        """The arrays that a forked child writes; None if all are in the arena."""
        self.round_trip: RoundTrip | None = None
        """Check that the written state decodes to the captured one; None once one check has passed."""
        self.copy, self.result = CopyResult(), WriteResult()
        self.write_started_at = 0.0
        self.stall_seconds = 0.0
        """Time that training has waited for the copy so far."""

    @property
    def outcome(self) -> CheckpointOutcome:
        return CheckpointOutcome(self.id, self.draft.iteration, self.state, self.result.reason)

    @property
    def size_bytes(self) -> int:
        return self.draft.size_bytes + (self.image.size_bytes if self.image is not None else 0)

    @property
    def marker(self) -> Path | None:
        """Path of the completion marker to write; None if the memory does not outlive the process.

        The memory of a forked child does not. A survivor keeps its marker: if ranks rewrote theirs one by one, the
        set would be incomplete.
        """
        has_none = self.survived or self.arena is None or self.image is not None
        return None if has_none or self.arena is None else self.arena.marker

    @property
    def cost(self) -> Profile | None:
        """Cost of this checkpoint for pacing; None if it does not predict the cost of others.

        Safety and final checkpoints are copied while training waits.
        """
        copied, result = self.copy, self.result
        is_alike = self.draft.kind in ("scheduled", "requested") and not self.survived
        if self.state is not RunState.DURABLE or not is_alike:
            return None
        return Profile(
            iteration_seconds=math.nan,
            snapshot_seconds=copied.seconds,
            persist_seconds=result.seconds,
            checkpoint_bytes=self.size_bytes,
            state_bytes=result.raw_bytes or result.stored_bytes,
            written_bytes=result.written_bytes,
            device_copy_seconds=math.inf if copied.device_copy_seconds is None else copied.device_copy_seconds,
            memory_used_bytes=copied.device_memory[0],
            memory_total_bytes=copied.device_memory[1],
        )

    def add_stall(self, seconds: float) -> None:
        with self._lock:
            self.stall_seconds += seconds

    def begin_copy(
        self, arena: Arena, draft: Draft, round_trip: RoundTrip | None = None, image: HostImage | None = None
    ) -> None:
        self._move(RunState.COPYING, arena=arena, draft=draft, round_trip=round_trip, image=image)

    def end_copy(self, result: CopyResult, unchanged: Collection[str] = ()) -> None:
        draft = msgspec.structs.replace(self.draft, unchanged=set(unchanged)) if unchanged else self.draft
        self._move(RunState.COPIED, copy=result, draft=draft)

    def begin_write(self) -> Draft:
        """Return the draft, completed with the results of the copy."""
        self._move(RunState.WRITING, write_started_at=time.time())
        timings = {"snapshot_seconds": self.copy.seconds, "stall_seconds": self.stall_seconds}
        metrics = (
            self.draft.metrics if self._read_metrics is None else dict(self._read_metrics())
        )  # may wait for a device
        self.draft = msgspec.structs.replace(self.draft, timings=timings, metrics=metrics)
        return self.draft

    def end(self, state: RunState, result: WriteResult, written: Draft | None = None) -> None:
        self._move(state, result=result, draft=written or self.draft)

    def wait_copied(self, timeout_seconds: float | None = None) -> bool:
        return self._copied.wait(timeout_seconds)

    def wait_settled(self, timeout_seconds: float | None = None) -> bool:
        return self._settled.wait(timeout_seconds)

    def _move(self, to: RunState, **measured: Any) -> None:
        with self._lock:
            if to not in NEXT[self.state]:
                raise IllegalTransition(f"checkpoint {self.id} cannot go from {self.state} to {to}")
            for name, value in measured.items():
                setattr(self, name, value)
            self.state = to
        for listener in self._listeners:
            try:
                listener.run_changed(self, to)
            except Exception:  # a failed listener must not stop this run or later ones
                logger.exception("could not report checkpoint %s as %s", self.id, to)
        if to not in BEFORE_COPIED:
            self._copied.set()
        if to in SETTLED:
            self._settled.set()
