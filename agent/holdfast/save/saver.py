"""A session's checkpoints, from the decision until they are durable."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from holdfast.checkpoint.retention_queue import RetentionQueue
from holdfast.distributed.ranks import Ranks
from holdfast.errors import HoldfastError, describe_error
from holdfast.format.encoding import CODEC
from holdfast.format.parity_file import ParityCode
from holdfast.pacing.policy import SnapshotMode
from holdfast.protocol.ids import checkpoint_id
from holdfast.protocol.wire import CheckpointKind
from holdfast.save.draft import Draft
from holdfast.save.history import History
from holdfast.save.host_buffers import Arena
from holdfast.save.persister import Persister
from holdfast.save.reports import CheckpointEvents
from holdfast.save.run import (
    SETTLED,
    CopyResult,
    MetricsReader,
    Run,
    RunListener,
    RunState,
    WriteResult,
)
from holdfast.save.snapshotter import Snapshotter
from holdfast.save.store_shares import StoreShares
from holdfast.state.registry import CapturedState
from holdfast.telemetry.fingerprint import fingerprint, of_thread, versions

logger = logging.getLogger("holdfast")

FREE_SECONDS = 10.0
"""Longest wait of a rank for a free buffer when rank 0 already had one, far longer than needed."""


class SnapshotMemory(Protocol):
    """Memory for snapshots that outlives this process, with those that an earlier attempt left there."""

    @property
    def is_sending(self) -> bool:
        """Return whether a snapshot is being sent to another host."""

    @property
    def is_receiving(self) -> bool:
        """Return whether a snapshot of another host is being received."""

    @property
    def parent(self) -> str | None:
        """The parent of the snapshot that this attempt resumed from."""

    def is_unsaved(self, committed: Sequence[str]) -> bool:
        """Return whether this attempt resumed from a snapshot that is not among the checkpoints `committed`."""

    def survivor(self) -> tuple[Arena, Draft]:
        """Return this rank's part of that snapshot, as its attempt described it."""

    def close(self, head: str | None) -> None:
        """Release the memory, but keep snapshots newer than the durable `head`."""

    def release(self) -> None:
        """Release the memory and keep all snapshots."""


class Saver:
    """Takes checkpoints of one attempt, and listens to their runs.

    Its methods are for the training thread, except `run_changed`. `_changed` guards the runs. It is never held
    during I/O, and no other lock is taken under it.

    Args:
        memory: holds snapshots that outlive this process; without it, none do.
        read_metrics: returns what reads the newest metrics once the state is copied.
        compresses: returns whether the checkpoint that begins is encoded.
        transform: name of the file transform that encodes it.
    """

    def __init__(
        self,
        history: History,
        snapshots: Snapshotter,
        persister: Persister,
        retention: RetentionQueue,
        reports: CheckpointEvents,
        ranks: Ranks,
        shares: StoreShares,
        *,
        memory: SnapshotMemory | None = None,
        parity: ParityCode | None = None,
        read_metrics: Callable[[], MetricsReader | None] = lambda: None,
        compresses: Callable[[], bool] = lambda: False,
        transform: str = CODEC,
    ) -> None:
        self.history, self.retention, self.reports = history, retention, reports
        self.snapshots, self._persister = snapshots, persister
        self._ranks, self._memory, self._parity, self.shares = ranks, memory, parity, shares
        self._read_metrics, self._compresses, self._transform = read_metrics, compresses, transform
        self._listeners: list[RunListener] = []
        """Listeners of integrations to the runs of this attempt."""
        self.versions = versions()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._runs: list[Run] = []
        """Runs that have not settled."""
        self._settled: list[Run] = []
        """Runs that have settled since `settle`."""
        self.unprepared = True  # `prepare` was not called yet

    def observe(self, listener: RunListener) -> None:
        """Add a listener to the runs that begin from now on."""
        self._listeners.append(listener)

    @property
    def active(self) -> bool:
        """A copy or a write is under way, or a snapshot is being sent to another host or received from one."""
        return not self.snapshots.idle or self.is_sending or self.is_receiving

    @property
    def is_sending(self) -> bool:
        """A snapshot is being sent to another host."""
        return self._memory is not None and self._memory.is_sending

    @property
    def is_receiving(self) -> bool:
        """A snapshot of another host is being received."""
        return self._memory is not None and self._memory.is_receiving

    @property
    def under_way(self) -> int:
        """Number of runs that have not settled."""
        return len(self._runs)

    def prepare(self, capture: Callable[[], CapturedState]) -> None:
        """Allocate memory in the background, so that the first checkpoint does not wait for it."""
        if self.snapshots.free:
            self.unprepared = False
            try:
                captured = capture()
            except Exception as error:  # the checkpoints that are due fail the same way, without another report
                self.reports.warn(_not_copied(error))
                return
            self.snapshots.prepare(captured)
            self._estimate_space(captured)
            self._persister.prepare(self.history.position.lineage, captured.tensors)

    def _estimate_space(self, captured: CapturedState) -> None:
        if self._ranks.leads and self.history.attempt and not captured.precedes_updates:
            self.reports.estimate_space(self.history.job, captured, self._ranks.world_size, self.retention.rules)

    def take(
        self,
        capture: Callable[[], CapturedState],
        kind: CheckpointKind,
        *,
        mode: SnapshotMode = "cpu",
        at_once: bool = False,
    ) -> Run | None:
        """Begin a checkpoint of this instant; `None` when it could not begin, which is reported.

        All ranks call it at the same boundary.
        """
        history, number = self.history, self.history.next_number()
        if self._ranks.leads and not history.attempt and not history.acquire_late():
            self._decline(number, "the store is not writable")
            return None
        started, (iteration, lineage) = time.perf_counter(), (history.position.iteration, history.position.lineage)
        draft = Draft(
            job=history.job,
            iteration=iteration,
            lineage=lineage,
            attempt=history.attempt,
            uid=history.uid,
            kind=kind,
            created_at=time.time(),
            parent=history.head or history.lineage.parent,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            versions=self.versions,
            fingerprint=_fingerprint(),
            replaces=history.is_damaged(checkpoint_id(iteration, lineage)),
            may_link=history.may_link,
            parity=self._parity,
            compress=self._compresses(),
            transform=self._transform,
            bytes_per_second=self.shares.rank_rate(kind),
            inexact=history.lineage.inexact,
            left_out=tuple(each for each in history.lineage.left_out if each.iteration <= iteration),
        )
        listeners: list[RunListener] = [self.snapshots, self.reports, self.shares, *self._listeners, self]
        run = Run(draft, listeners, number=number, mode=mode, at_once=at_once, read_metrics=self._read_metrics())
        is_submitted = False
        try:
            self._follow(run)
            if not self.snapshots.wait_free(FREE_SECONDS):  # another rank's was free a moment ago
                raise HoldfastError("the previous snapshot is still being written")
            captured = capture()
            self.snapshots.begin(run, captured)
            self._estimate_space(captured)
            run.add_stall(time.perf_counter() - started)
            self._persister.submit(run)
            is_submitted = True
            self.snapshots.copy(run)
        except BaseException as error:
            if is_submitted:  # the persister settles it
                self.snapshots.fail_copy(run, type(error).__name__)
            elif isinstance(error, Exception):
                self._drop(run, _not_copied(error), RunState.FAILED)
            else:  # Ctrl-C; also where the persister has it already, which then leaves it as it is
                self._drop(run, "interrupted", RunState.ABANDONED)
            if not isinstance(error, Exception):
                raise
            return None  # a checkpoint that cannot be taken must not end training
        return run

    def save_survivor(self, committed: list[str]) -> None:
        """Commit the snapshot in memory that this attempt resumed from, where the previous attempt had not.

        All ranks do it, each with its part, or none does. Only rank 0 needs `committed`.
        """
        if (memory := self._memory) is None:
            return

        def unsaved() -> tuple[bool, str | None]:
            return self.history.attempt > 0 and memory.is_unsaved(committed), memory.parent

        saves, parent = self._ranks.decide(unsaved, tuple[bool, str | None])
        if not saves:
            return
        history, number = self.history, self.history.next_number()
        history.continue_lineage(history.lineage, parent)  # until it is durable
        run: Run | None = None
        try:
            arena, draft = memory.survivor()
            draft = msgspec.structs.replace(
                draft,
                attempt=history.attempt,
                uid=history.uid,
                folder=None,
                replaces=history.is_damaged(draft.id),
            )
            run = Run(draft, (self.snapshots, self.reports, self), number=number, survived=True)
            self._follow(run)
            self.snapshots.reserve(arena)
            run.begin_copy(arena, draft)
            run.end_copy(CopyResult(seconds=draft.timings.get("snapshot_seconds", 0.0)))
            self._persister.submit(run)
        except Exception as error:  # training continues without it; the other ranks wait for a message
            reason = f"the snapshot in memory is not saved: {describe_error(error)}"
            self._decline(number, describe_error(error))
            if run is None:
                self.reports.fail(reason)
            else:
                run.end(RunState.FAILED, WriteResult(reason=reason))

    def wait_settled(self, timeout_seconds: float | None) -> bool:
        """Make all runs urgent, and wait until they have settled; `False` on timeout."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        with self._lock:
            for run in self._runs:
                run.is_urgent = True
            if not self._changed.wait_for(lambda: not self._runs, timeout_seconds):
                return False
        return self.snapshots.wait_idle(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def settle(self) -> list[Run]:
        """Return the runs that settled since the last call."""
        if not self._settled:  # as after most iterations
            return []
        with self._lock:
            found, self._settled = self._settled, []
        return found

    def close(self, timeout_seconds: float, *, finished: bool = True) -> None:
        """Release everything; unless training has `finished`, snapshots stay in the memory tier."""
        deadline = time.monotonic() + timeout_seconds
        for run in list(self._runs):
            run.is_urgent = True
        settled = self._persister.close(timeout_seconds)
        if not settled:
            logger.warning("the final checkpoint was not durable after %g s; closing without it", timeout_seconds)
        self.retention.close(max(0.0, deadline - time.monotonic()) if finished else 0.0)
        self.snapshots.close()
        if self._memory is not None and finished and settled:
            self._memory.close(self.history.head)
        elif self._memory is not None:
            self._memory.release()

    def run_changed(self, run: Run, state: RunState) -> None:
        """Move the head, request retention, and keep the run for `drain`, once it has settled."""
        if state not in SETTLED:
            return
        is_durable = state is RunState.DURABLE
        if is_durable:
            self.history.advance(run.number, run.id)
        with self._lock:
            self._runs = [each for each in self._runs if each is not run]
            self._settled.append(run)
            self._changed.notify_all()
        if is_durable and run.draft.kind == "requested":
            self.retention.add_requested(run.id)
        if is_durable and self._ranks.leads:
            self.retention.request()

    def _follow(self, run: Run) -> None:
        with self._lock:
            self._runs.append(run)

    def _drop(self, run: Run, reason: str, state: RunState) -> None:
        """End a run that no writer has; the other ranks wait for a message about it."""
        self._decline(run.number, reason)
        run.end(state, WriteResult(reason=reason))

    def _decline(self, number: int, reason: str) -> None:
        if self._ranks.world_size > 1:
            self._persister.decline(number, reason)


def _not_copied(error: Exception) -> str:
    return f"could not copy the state: {error}"


def _fingerprint() -> dict[str, str]:
    try:
        return fingerprint()
    except RuntimeError as error:  # a failed device; the other ranks still wait for this one
        logger.debug("no fingerprint of this process: %s", error)
        return of_thread()
