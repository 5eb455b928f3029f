"""A session's checkpoints from the decision to the durable end: snapshot, persist, events, retention.

One module, since one class follows a checkpoint through them.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.metadata
import logging
import platform
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import msgspec
import torch

from holdfast.checkpoint.retention_queue import RetentionQueue, TrainingHead
from holdfast.distributed.error_transport import describe_error
from holdfast.distributed.ranks import Ranks, SideGroup
from holdfast.errors import HoldfastError
from holdfast.format.parity_file import ParityCode
from holdfast.pacing.profile import SnapshotMode
from holdfast.protocol.ids import checkpoint_id, parse_checkpoint_id
from holdfast.protocol.messages import CheckpointKind
from holdfast.retention import Retention
from holdfast.save.draft import Draft
from holdfast.save.host_buffers import Arena
from holdfast.save.persister import Persister
from holdfast.save.reports import CheckpointEvents, not_writable
from holdfast.save.run import (
    SETTLED,
    CheckpointOutcome,
    CopyResult,
    MetricsReader,
    Run,
    RunListener,
    RunState,
    WriteResult,
)
from holdfast.save.snapshotter import Snapshotter
from holdfast.state.registry import CapturedState
from holdfast.store import Lineage, Store
from holdfast.system import io_pool
from holdfast.telemetry.fingerprint import fingerprint, of_thread
from holdfast.telemetry.reporter import Reporter

logger = logging.getLogger("holdfast")

FREE_SECONDS = 10.0
"""How long a rank waits for a free buffer when rank 0 already had one: far longer than that takes."""
RETURN_SECONDS = 0.05
"""How long training waits to learn whether an unavailable store is back."""
OUTCOMES_KEPT = 1000
"""How many outcomes are kept for a script that does not ask for them."""


class SnapshotMemory(Protocol):
    """Memory for snapshots that outlives this process, with those that an earlier attempt left there."""

    @property
    def arenas(self) -> Sequence[Arena]: ...

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

    `memory` holds snapshots that outlive this process; without it, each process has its own. `compresses` returns
    whether the checkpoint that begins is encoded.

    Its methods are for the training thread, except `head`, `mark_damaged` and `run_changed`. `_changed` guards
    what other threads change: the head, the runs, what is damaged. It is held for no I/O, and no other lock is
    taken under it.
    """

    def __init__(
        self,
        store: Store,
        job: str,
        uid: str,
        *,
        retention: Retention,
        max_in_flight: int = 1,
        debug: bool = False,
        parity: ParityCode | None = None,
        compress: bool = False,
        reporter: Reporter,
        ranks: Ranks,
        memory: SnapshotMemory | None = None,
        read_metrics: Callable[[], MetricsReader | None] = lambda: None,
        compresses: Callable[[], bool] = lambda: False,
    ) -> None:
        self._ranks = ranks
        self._number = 0  # of checkpoints that this attempt began, the same on all ranks
        self.store, self.job, self.uid, self.parity = store, job, uid, parity
        self.attempt = 0
        """0 while the store could not be written to."""
        self.lineage = Lineage(number=1, iteration=0, parent=None, order=None, attempt=0, created_at=0.0)
        self.latest_lineage = 0
        """The highest lineage number that the server reports."""
        self._reporter, self._position = reporter, reporter.position
        self.versions = {
            "holdfast": importlib.metadata.version("holdfast"),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        }
        self._minimum_attempt = 1
        """The lowest number that this attempt may have."""
        self._open_order: str | None = None
        """The order that was open when the attempt began."""
        self._unrecorded_order: str | None = None
        """A restore request that was carried out while the store could not be written to."""
        self._late_attempt: Future[tuple[int, Lineage] | None] | None = None
        """Attempt and lineage, acquired in the background once an unavailable store is back."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._head: str | None = None
        self._newest_durable = 0  # the number of the run that the head is from
        self._links_from = 0  # files of earlier runs are not linked: they may share a damaged file
        self._runs: list[Run] = []
        """Runs that have not settled."""
        self._settled: list[Run] = []
        """Runs that have settled since `drain`."""
        self._outcomes: collections.deque[CheckpointOutcome] = collections.deque(maxlen=OUTCOMES_KEPT)
        self._damaged: set[str] = set()
        self._events = CheckpointEvents(reporter, store, parity, compress)
        self.listeners: list[RunListener] = []
        """Listeners of integrations to the runs of this attempt."""
        self.retention_queue = RetentionQueue(store, job, retention, reporter, self._training_head)
        self._memory, self._read_metrics, self._compresses = memory, read_metrics, compresses
        arenas = memory.arenas if memory is not None else None
        self.snapshots = Snapshotter(max_in_flight, debug=debug, arenas=arenas)
        channel, room = ranks if isinstance(ranks, SideGroup) else None, self.retention_queue.make_room
        self.persister = Persister(store, max_in_flight=max_in_flight, channel=channel, make_room=room)
        self.unprepared = True  # `prepare` was not called yet

    @property
    def active(self) -> bool:
        """A copy or a write is under way."""
        return not self.snapshots.idle

    @property
    def under_way(self) -> int:
        """Number of runs that have not settled."""
        return len(self._runs)

    @property
    def head(self) -> str | None:
        """The newest durable checkpoint on this lineage."""
        with self._lock:
            return self._head

    def acquire_attempt(self, at_least: int, *, order: str | None = None) -> None:
        """Fence all earlier attempts, and record the open restore request; rank 0 does it for all ranks.

        Where the store cannot be written to, no checkpoints are taken for now.
        """
        self._minimum_attempt, self._open_order = at_least, order
        try:
            self.attempt = self._ranks.decide(lambda: self._acquire_number(at_least), int)
        except OSError as error:
            # training may still start, if the store can be read or is new
            self._events.warn(not_writable(self.store, error), "checkpoints start when it is")

    def begin_lineage(
        self, iteration: int, parent: str | None, order: str | None = None, *, left: str | None = None
    ) -> None:
        """Record a new lineage durably, then switch to it. OSError or Fenced when the store refuses."""

        def noted() -> Lineage:
            lineage = self._new_lineage(self.attempt, iteration, parent, order, left)
            if self.attempt:
                self.store.append(self.job, lineage)
            self._unrecorded_order = None if self.attempt else order
            return lineage

        self.continue_lineage(self._ranks.decide(noted, Lineage), parent)

    @property
    def fenced(self) -> bool:
        """A newer attempt of the job has begun; `False` where the store cannot be read."""
        try:
            return 0 < self.attempt < self.store.latest_attempt(self.job)
        except OSError:
            return False

    def continue_lineage(self, lineage: Lineage, head: str | None) -> None:
        """Continue a lineage from the checkpoint `head`."""
        with self._lock:
            self.lineage, self._head = lineage, head
        self._position.lineage = lineage.number

    def follow_lineage(self, number: int) -> None:
        """Switch to the lineage that rank 0 began when the store came back."""
        if number != self.lineage.number:
            self.continue_lineage(msgspec.structs.replace(self.lineage, number=number), self.head)

    def mark_damaged(self, checkpoint: str, *, damaged: bool = True) -> None:
        """Record that a checkpoint is damaged, so that a sound one may replace it. For any thread."""
        with self._lock:
            (self._damaged.add if damaged else self._damaged.discard)(checkpoint)
            self._links_from = self._number + 1 if damaged else self._links_from

    def update_lineage(self) -> None:
        """Switch to rank 0's lineage before an unannounced checkpoint: the store may be back."""

        def current() -> int:
            if not self.attempt:
                self._acquire_late()
            return self.lineage.number

        self.follow_lineage(self._ranks.decide(current, int))

    def prepare(self, capture: Callable[[], CapturedState]) -> None:
        """Allocate memory in the background, so that the first checkpoint does not wait for it."""
        if self.snapshots.free:
            self.unprepared = False
            try:
                captured = capture()
            except Exception as error:  # the checkpoints that are due fail the same way, without another report
                self._events.warn(_not_copied(error))
                return
            self.snapshots.prepare(captured)
            self._estimate_space(captured)
            self.persister.prepare()

    def _estimate_space(self, captured: CapturedState) -> None:
        if self._ranks.leads and self.attempt and not captured.precedes_updates:
            self._events.estimate_space(self.job, captured, self._ranks.world_size, self.retention_queue.rules)

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
        self._number += 1
        if self._ranks.leads and not self.attempt and not self._acquire_late():
            self._decline("the store is not writable")
            return None
        started = time.perf_counter()
        run = Run(
            self._draft(kind),
            self.snapshots,
            self._events,
            *self.listeners,
            self,
            number=self._number,
            mode=mode,
            at_once=at_once,
            metrics=self._read_metrics(),
        )
        is_submitted = False
        try:
            self._follow(run)
            if not self.snapshots.wait_free(FREE_SECONDS):  # another rank's was free a moment ago
                raise HoldfastError("the previous snapshot is still being written")
            captured = capture()
            self.snapshots.begin(run, captured)
            self._estimate_space(captured)
            run.add_stall(time.perf_counter() - started)
            self.persister.submit(run)
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

    def _draft(self, kind: CheckpointKind) -> Draft:
        iteration, lineage = self._position.iteration, self._position.lineage
        return Draft(
            job=self.job,
            iteration=iteration,
            lineage=lineage,
            attempt=self.attempt,
            uid=self.uid,
            kind=kind,
            created_at=time.time(),
            parent=self.head or self.lineage.parent,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            versions=self.versions,
            fingerprint=_fingerprint(),
            replaces=checkpoint_id(iteration, lineage) in self._damaged,
            may_link=self._newest_durable >= self._links_from,
            parity=self.parity,
            compress=self._compresses(),
        )

    def save_survivor(self, committed: list[str]) -> None:
        """Commit the snapshot in memory that this attempt resumed from, where the previous attempt had not.

        All ranks do it, each with its part, or none does. Only rank 0 needs `committed`.
        """

        if (memory := self._memory) is None:
            return

        def unsaved() -> tuple[bool, str | None]:
            return self.attempt > 0 and memory.is_unsaved(committed), memory.parent

        saves, parent = self._ranks.decide(unsaved, tuple[bool, str | None])
        if not saves:
            return
        self._number += 1
        self.continue_lineage(self.lineage, parent)  # until it is durable
        run: Run | None = None
        try:
            arena, draft = memory.survivor()
            draft = msgspec.structs.replace(
                draft, attempt=self.attempt, uid=self.uid, folder=None, replaces=draft.id in self._damaged
            )
            run = Run(draft, self.snapshots, self._events, self, number=self._number, survived=True)
            self._follow(run)
            self.snapshots.reserve(arena)
            run.begin_copy(arena, draft)
            run.end_copy(CopyResult(seconds=draft.timings.get("snapshot_seconds", 0.0)))
            self.persister.submit(run)
        except Exception as error:  # training continues without it; the other ranks wait for a message
            reason = f"the snapshot in memory is not saved: {describe_error(error)}"
            self._decline(describe_error(error))
            if run is None:
                self.fail(reason)
            else:
                run.end(RunState.FAILED, WriteResult(reason=reason))

    def wait_settled(self, timeout_seconds: float | None) -> bool:
        """Wait until all runs have settled; `False` on timeout."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        with self._lock:
            if not self._changed.wait_for(lambda: not self._runs, timeout_seconds):
                return False
        return self.snapshots.wait_idle(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def outcomes(self) -> list[CheckpointOutcome]:
        """Return what became of the checkpoints that settled since the last call, oldest first."""
        with self._lock:
            found = list(self._outcomes)
            self._outcomes.clear()
        return found

    def drain(self) -> list[Run]:
        """Return the runs that settled since the last call."""
        if not self._settled:  # as after most iterations
            return []
        with self._lock:
            found, self._settled = self._settled, []
        return found

    def close(self, timeout_seconds: float, *, finished: bool = True) -> None:
        """Release everything; unless training has `finished`, snapshots stay in the memory tier."""
        deadline = time.monotonic() + timeout_seconds
        settled = self.persister.close(timeout_seconds)
        if not settled:
            logger.warning("the final checkpoint was not durable after %g s; closing without it", timeout_seconds)
        self.retention_queue.close(max(0.0, deadline - time.monotonic()) if finished else 0.0)
        self.snapshots.close()
        if self._memory is not None and finished and settled:
            self._memory.close(self.head)
        elif self._memory is not None:
            self._memory.release()

    def fail(self, reason: str, kind: CheckpointKind = "scheduled") -> None:
        """Report a checkpoint that could not begin."""
        self._events.fail(reason, kind)
        iteration, lineage = self._position.iteration, self._position.lineage
        with self._lock:
            self._outcomes.append(
                CheckpointOutcome(checkpoint_id(iteration, lineage), iteration, RunState.FAILED, reason)
            )

    def run_changed(self, run: Run, state: RunState) -> None:
        """Move the head, request retention, and keep the run for `drain`, once it has settled."""
        if state not in SETTLED:
            return
        is_durable = state is RunState.DURABLE
        with self._lock:
            if is_durable and run.number > self._newest_durable:  # a slow one may settle after newer ones
                self._newest_durable, self._head = run.number, run.id
            self._runs = [each for each in self._runs if each is not run]
            self._settled.append(run)
            self._outcomes.append(run.outcome)
            self._changed.notify_all()
        if is_durable and run.draft.kind == "requested":
            self.retention_queue.add_requested(run.id)
        if is_durable and self._ranks.leads:
            self.retention_queue.request()

    def _follow(self, run: Run) -> None:
        with self._lock:
            self._runs.append(run)

    def _drop(self, run: Run, reason: str, state: RunState) -> None:
        """End a run that no writer has; the other ranks wait for a message about it."""
        self._decline(reason)
        run.end(state, WriteResult(reason=reason))

    def _decline(self, reason: str) -> None:
        if self._ranks.world_size > 1:
            self.persister.decline(self._number, reason)

    def _training_head(self) -> TrainingHead:
        with self._lock:
            return TrainingHead(
                attempt=self.attempt, lineage=self.lineage.number, head=self._head, damaged=set(self._damaged)
            )

    def _new_lineage(
        self, attempt: int, iteration: int, parent: str | None, order: str | None = None, left: str | None = None
    ) -> Lineage:
        known = [lineage.number for lineage in self.store.records(self.job, Lineage)]
        known += [parse_checkpoint_id(checkpoint)[1] for checkpoint in self.store.checkpoints(self.job)]
        newest = max(known, default=0)
        return Lineage(
            number=max(newest, self._events.plausible_number("lineage", self.latest_lineage, newest)) + 1,
            iteration=iteration,
            parent=parent,
            order=order,
            attempt=attempt,
            created_at=time.time(),
            left=left,
        )

    def _acquire_number(self, at_least: int) -> int:
        """Acquire the attempt number, and load the checkpoints that earlier attempts keep."""
        if at_least > 1:
            newest = self.store.latest_attempt(self.job)
            at_least = self._events.plausible_number("attempt", at_least - 1, newest) + 1
        number = self.store.acquire_attempt(self.job, self.uid, at_least, order=self._open_order).number
        with contextlib.suppress(OSError):  # asked again before anything is deleted
            self.retention_queue.load_requested()
        return number

    def _acquire_late(self) -> bool:
        """Begin an attempt and a lineage if the store is available again; it may hold another history.

        The pool asks, since an unavailable store may take half a minute to answer; a directory answers at once.
        """
        if self._late_attempt is None:
            self._late_attempt = io_pool.submit(self._acquire_in_background)
        try:
            found = self._late_attempt.result(RETURN_SECONDS)
        except TimeoutError:
            return False
        self._late_attempt = None
        if found is None:
            return False
        self.attempt, lineage = found
        self.continue_lineage(lineage, lineage.parent)
        self._reporter.lineage_began(self.lineage)
        return True

    def _acquire_in_background(self) -> tuple[int, Lineage] | None:
        try:
            attempt = self._acquire_number(self._minimum_attempt)
            head = self.head
            start = parse_checkpoint_id(head)[0] if head is not None else self.lineage.iteration
            lineage = self._new_lineage(attempt, start, head, self._unrecorded_order)
            self.store.append(self.job, lineage)
        except Exception as error:  # the next checkpoint that is due tries again
            self.fail(not_writable(self.store, error))
            return None
        return attempt, lineage


def _not_copied(error: Exception) -> str:
    return f"could not copy the state: {error}"


def _fingerprint() -> dict[str, str]:
    try:
        return fingerprint()
    except RuntimeError as error:  # a failed device; the other ranks still wait for this one
        logger.debug("no fingerprint of this process: %s", error)
        return of_thread()
