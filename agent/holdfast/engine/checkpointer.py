"""A session's checkpoints from the decision to the durable end: snapshot, persist, events, retention."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import platform
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import msgspec
import torch

from holdfast.checkpoint.retention_queue import Protector, RetentionQueue, TrainingHead
from holdfast.distributed.error_transport import told
from holdfast.distributed.ranks import Ranks, SideGroup
from holdfast.errors import HoldfastError
from holdfast.memory_tier.tier import MemoryTier
from holdfast.pacing.profile import SnapshotMode
from holdfast.persist.persister import Persister
from holdfast.protocol.messages import CheckpointKind, checkpoint_id, parse_checkpoint_id
from holdfast.protocol.retention import Retention
from holdfast.snapshot.checkpoint_run import SETTLED, CheckpointRun, Origin, RunRequest, RunState, WriteResult
from holdfast.snapshot.snapshotter import Snapshotter
from holdfast.state.registry import Captured
from holdfast.store import Lineage, Store
from holdfast.system import io_pool
from holdfast.telemetry.checkpoint_events import CheckpointEvents, not_writable
from holdfast.telemetry.fingerprint import fingerprint, of_thread
from holdfast.telemetry.reporter import Reporter

logger = logging.getLogger("holdfast")

FREE_SECONDS = 10.0
"""How long a rank waits for memory that the one that decides already had: far longer than that takes."""
RETURN_SECONDS = 0.05
"""Training waits no longer to learn whether a store that was away is back."""


class Checkpointer:
    """Takes checkpoints of one attempt, and listens to their runs.

    Its methods are for the training thread, except `want`, `mark_damaged` and `run_changed`. `_changed` guards
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
        slots: int = 1,
        backend: str = "thread",
        debug: bool = False,
        reporter: Reporter,
        ranks: Ranks,
    ) -> None:
        self._ranks = ranks
        self._number = 0
        """How many were begun by this attempt: the same on all ranks."""
        self.store, self.job, self.uid = store, job, uid
        self.attempt = 0
        """0 while the store could not be written to."""
        self.lineage = Lineage(number=1, iteration=0, parent=None, order=None, attempt=0, created_at=0.0)
        self.latest_lineage = 0
        """The highest number a server says that it has seen."""
        self._reporter, self._standing = reporter, reporter.standing
        self.versions = {
            "holdfast": importlib.metadata.version("holdfast"),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        }
        self._at_least = 1
        """The number that this attempt must have at least."""
        self._open_order: str | None = None
        """The order that was open when the attempt began."""
        self._unnoted: str | None = None
        """An order that was carried out while the store could not be written to."""
        self._late: Future[tuple[int, Lineage] | None] | None = None
        """Asks a store that was away whether it is back, for an attempt and a lineage."""
        self._changed = threading.Condition()
        self._head: str | None = None
        self._newest_durable = 0
        """The number of the run that the head is from."""
        self._runs: list[CheckpointRun] = []
        """Runs that have not settled."""
        self._settled: list[CheckpointRun] = []
        """Runs that have, since `drain`."""
        self._damaged: set[str] = set()
        self._events = CheckpointEvents(reporter, store)
        self.retiring = RetentionQueue(store, job, retention, reporter, self._training_head)
        self.pinned = self.retiring.pinned
        self.tier = MemoryTier(job, uid, slots, ranks, reporter)
        self.snapshots = Snapshotter(slots, debug=debug, arenas=self.tier.arenas)
        channel = ranks if isinstance(ranks, SideGroup) else None
        self.persister = Persister(store, slots=slots, backend=backend, channel=channel)
        self.snapshots.shared = self.persister.shares_memory
        self.unprepared = True
        """`prepare` was not called yet."""

    @property
    def active(self) -> bool:
        """A copy or a write is under way."""
        return not self.snapshots.idle

    @property
    def under_way(self) -> int:
        """How many copies and writes are."""
        with self._changed:
            return len(self._runs)

    @property
    def head(self) -> str | None:
        """The newest durable checkpoint on this lineage."""
        with self._changed:
            return self._head

    @property
    def retention(self) -> Retention:
        """The rules in force."""
        return self.retiring.rules

    @retention.setter
    def retention(self, rules: Retention) -> None:
        self.retiring.rules = rules

    def acquire_attempt(self, at_least: int, *, order: str | None = None) -> None:
        """Fence all earlier attempts, and note the order that is open; of several ranks, rank 0 does.

        Where the store cannot be written to, there are no checkpoints for now.
        """
        self._at_least, self._open_order = at_least, order
        try:
            self.attempt = self._ranks.decide(lambda: self._become_newest(at_least), int)
        except OSError as error:
            # whether training starts without it is not known yet: that takes a store that can be read, or is new
            self._events.warn(not_writable(self.store, error), "no checkpoint is taken until it is")

    def begin_lineage(
        self, iteration: int, parent: str | None, order: str | None = None, *, left: str | None = None
    ) -> None:
        """Note a new lineage durably; only then is training on it. OSError or Fenced when the store refuses."""

        def noted() -> Lineage:
            lineage = self._new_lineage(self.attempt, iteration, parent, order, left)
            if self.attempt:
                self.store.append(self.job, lineage)
            self._unnoted = None if self.attempt else order
            return lineage

        self.continue_lineage(self._ranks.decide(noted, Lineage), parent)

    @property
    def fenced(self) -> bool:
        """A newer attempt of the job has begun, as far as the store can be asked."""
        try:
            return 0 < self.attempt < self.store.latest_attempt(self.job)
        except OSError:
            return False

    def continue_lineage(self, lineage: Lineage, head: str | None) -> None:
        """Go on along a lineage, from the checkpoint `head`."""
        with self._changed:
            self.lineage, self._head = lineage, head
        self._standing.lineage = lineage.number

    def follow_lineage(self, number: int) -> None:
        """Rank 0 has begun another one since the store is back."""
        if number != self.lineage.number:
            self.continue_lineage(msgspec.structs.replace(self.lineage, number=number), self.head)

    def want(self, protector: Protector, checkpoint: str | None) -> None:
        """Protect a checkpoint from retention, until `protector` protects another one or none. For any thread."""
        self.retiring.want(protector, checkpoint)

    def mark_damaged(self, checkpoint: str, *, damaged: bool = True) -> None:
        """Note what a reading found; a sound checkpoint may take the name of a damaged one. For any thread."""
        with self._changed:
            (self._damaged.add if damaged else self._damaged.discard)(checkpoint)

    def find_lineage(self) -> None:
        """Before a checkpoint that nobody announced: that which rank 0 is on, of a store that is back perhaps."""

        def current() -> int:
            if not self.attempt:
                self._acquire_late()
            return self.lineage.number

        self.follow_lineage(self._ranks.decide(current, int))

    def prepare(self, capture: Callable[[], Captured]) -> None:
        """Allocate memory in the background, so that the first checkpoint does not wait for it."""
        if self.snapshots.free:
            self.unprepared = False
            self.snapshots.prepare(capture())
            self.persister.prepare()
            if self.persister.refusal is not None:
                self._reporter.notice("info", "backend", f"a thread writes checkpoints: {self.persister.refusal}")

    def take(
        self,
        capture: Callable[[], Captured],
        kind: CheckpointKind,
        *,
        mode: SnapshotMode = "cpu",
        over_seconds: float = 0.0,
        at_once: bool = False,
    ) -> CheckpointRun | None:
        """Begin a checkpoint of this instant; None when it could not even begin, which is then an event.

        The bytes are written over `over_seconds` rather than as fast as they can. Of several ranks all call it at
        the same boundary.
        """
        self._number += 1
        if self._ranks.leads and not self.attempt and not self._acquire_late():
            self._decline("the store is not writable")
            return None
        started = time.perf_counter()
        iteration, lineage = self._standing.iteration, self._standing.lineage
        request = RunRequest(
            iteration=iteration,
            lineage=lineage,
            kind=kind,
            origin=Origin(
                job=self.job,
                attempt=self.attempt,
                uid=self.uid,
                parent=self.head or self.lineage.parent,
                rank=self._ranks.rank,
                world_size=self._ranks.world_size,
                versions=self.versions,
                replaces=checkpoint_id(iteration, lineage) in self._damaged,
            ),
            number=self._number,
            mode=mode,
            at_once=at_once,
            over_seconds=over_seconds,
            fingerprint=_fingerprint(),
        )
        run = CheckpointRun(request, self.snapshots, self._events, self)
        try:
            self._follow(run)
            if not self.snapshots.wait_free(FREE_SECONDS):  # another rank's was free a moment ago
                raise HoldfastError("the snapshot before is still being written")
            self.snapshots.begin(run, capture())
            run.add_stall(time.perf_counter() - started)
            self.persister.submit(run)
            self.snapshots.copy(run)
        except Exception as error:  # a checkpoint that cannot be taken must not end training
            self._drop(run, type(error).__name__, f"could not copy the state: {error}", RunState.FAILED)
            return None
        except BaseException as error:  # Ctrl-C: the other ranks wait for a word of this one
            self._drop(run, type(error).__name__, "interrupted", RunState.ABANDONED)
            raise
        return run

    def save_survivor(self, committed: list[str]) -> None:
        """Make durable what this attempt goes on from, where the one before it did not live to.

        All ranks do it, each with its part, or none does. `committed` is rank 0's to know.
        """

        def unsaved() -> tuple[bool, str | None]:
            return self.attempt > 0 and self.tier.is_unsaved(committed), self.tier.parent

        saves, parent = self._ranks.decide(unsaved, tuple[bool, str | None])
        if not saves:
            return
        self._number += 1
        self.continue_lineage(self.lineage, parent)  # until it is durable
        run: CheckpointRun | None = None
        try:
            request, contents, copied = self.tier.survivor(
                number=self._number, attempt=self.attempt, uid=self.uid, damaged=self._damaged
            )
            run = CheckpointRun(request, self.snapshots, self._events, self)
            self._follow(run)
            self.snapshots.hold(contents.arena)
            run.begin_copy(contents)
            run.end_copy(copied)
            self.persister.submit(run)
        except Exception as error:  # training goes on without; the other ranks wait for a word of this one
            reason = f"what lay in memory is not saved: {told(error)}"
            self._decline(told(error))
            if run is None:
                self.fail(reason)
            else:
                run.end(RunState.FAILED, WriteResult(reason=reason))

    def wait_settled(self, timeout_seconds: float) -> bool:
        """Wait until nothing is under way and `head` is known; False when that takes too long."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            if not self._changed.wait_for(lambda: not self._runs, timeout_seconds):
                return False
        return self.snapshots.wait_idle(max(0.0, deadline - time.monotonic()))

    def drain(self) -> list[CheckpointRun]:
        """What settled since the last call."""
        with self._changed:
            found, self._settled = self._settled, []
        return found

    def close(self, timeout_seconds: float, *, finished: bool = True) -> None:
        """Let go of everything; unless training has `finished`, what lies in the memory tier stays there."""
        deadline = time.monotonic() + timeout_seconds
        settled = self.persister.close(timeout_seconds)
        if not settled:
            logger.warning("gave up waiting for the last checkpoint after %g s", timeout_seconds)
        self.retiring.close(max(0.0, deadline - time.monotonic()) if finished else 0.0)
        self.snapshots.close()
        if finished and settled:
            self.tier.close(self.head)
        else:
            self.tier.release()

    def fail(self, reason: str, kind: CheckpointKind = "scheduled") -> None:
        """Report a checkpoint that never became one."""
        self._events.fail(reason, kind)

    def run_changed(self, run: CheckpointRun, state: RunState) -> None:
        """A settled run moves the head, asks for retention and waits for `drain`."""
        if state not in SETTLED:
            return
        is_durable = state is RunState.DURABLE
        with self._changed:
            if is_durable and run.request.number > self._newest_durable:  # a slow one may settle after newer ones
                self._newest_durable, self._head = run.request.number, run.id
            self._runs = [each for each in self._runs if each is not run]
            self._settled.append(run)
            self._changed.notify_all()
        if is_durable and run.request.kind == "requested":
            self.retiring.add_asked_for(run.id)
        if is_durable and self._ranks.leads:
            self.retiring.request()

    def _follow(self, run: CheckpointRun) -> None:
        with self._changed:
            self._runs.append(run)

    def _drop(self, run: CheckpointRun, error: str, reason: str, state: RunState) -> None:
        """End a run that could not begin; one that the persister has is brought to its end there."""
        if self.persister.has(run):
            self.snapshots.give_up(run, error)
        else:
            self._decline(reason)
            run.end(state, WriteResult(reason=reason))

    def _decline(self, reason: str) -> None:
        if self._ranks.world_size > 1:
            self.persister.decline(self._number, reason)

    def _training_head(self) -> TrainingHead:
        with self._changed:
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
            number=max(newest, self._events.believed("lineage", self.latest_lineage, newest)) + 1,
            iteration=iteration,
            parent=parent,
            order=order,
            attempt=attempt,
            created_at=time.time(),
            left=left,
        )

    def _become_newest(self, at_least: int) -> int:
        """The number of this attempt, which from now on keeps what was asked for before it."""
        if at_least > 1:
            at_least = self._events.believed("attempt", at_least - 1, self.store.latest_attempt(self.job)) + 1
        number = self.store.acquire_attempt(self.job, self.uid, at_least, order=self._open_order).number
        with contextlib.suppress(OSError):  # asked again before anything is deleted
            self.retiring.learn()
        return number

    def _acquire_late(self) -> bool:
        """A store that was full or away may be back; what it holds is another history, so begin beside it.

        It is asked in the background, for one that is away may take half a minute to say so; a directory answers
        while this waits.
        """
        if self._late is None:
            self._late = io_pool.submit(self._return)
        try:
            found = self._late.result(RETURN_SECONDS)
        except TimeoutError:
            return False
        self._late = None
        if found is None:
            return False
        self.attempt, lineage = found
        self.continue_lineage(lineage, lineage.parent)
        self._reporter.lineage_began(self.lineage)
        return True

    def _return(self) -> tuple[int, Lineage] | None:
        try:
            attempt = self._become_newest(self._at_least)
            head = self.head
            start = parse_checkpoint_id(head)[0] if head is not None else self.lineage.iteration
            lineage = self._new_lineage(attempt, start, head, self._unnoted)
            self.store.append(self.job, lineage)
        except Exception as error:  # the next checkpoint that is due tries again
            self.fail(not_writable(self.store, error))
            return None
        return attempt, lineage


def _fingerprint() -> dict[str, str]:
    try:
        return fingerprint()
    except RuntimeError as error:  # a device that has failed: the other ranks wait for this one all the same
        logger.debug("no fingerprint of this process: %s", error)
        return of_thread()
