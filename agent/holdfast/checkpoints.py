"""A session's checkpoints from the decision to the durable end: snapshot, persist, events, retention."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable

from holdfast import protocol, restore
from holdfast.errors import DamagedCheckpoint, HoldfastError
from holdfast.persist import Origin, Persister, Settled
from holdfast.protocol import CheckpointKind, CheckpointState, checkpoint_id
from holdfast.reports import Reporter
from holdfast.snapshot import Snapshot, Snapshotter
from holdfast.state import Captured
from holdfast.store import Lineage, Store
from holdfast.store.retention import expendable

logger = logging.getLogger("holdfast")

PROTECTED_SAFETY = 3
"""The newest safety checkpoints outlive retention, so that the last restores can be undone."""


class Checkpointer:
    """Takes checkpoints of one attempt. Its methods are for the training thread."""

    def __init__(
        self,
        store: Store,
        job: str,
        uid: str,
        *,
        keep: int,
        versions: dict[str, str],
        reporter: Reporter,
    ) -> None:
        self.store, self.job, self.uid, self.keep = store, job, uid, keep
        self.attempt = 0
        """0 while the store could not be written to."""
        self.lineage = Lineage(number=1, iteration=0, parent=None, order=None, attempt=0, created_at=0.0)
        self.head: str | None = None
        """The newest durable checkpoint on this lineage."""
        self.versions, self._reporter, self._standing = versions, reporter, reporter.standing
        self._last: Snapshot | None = None
        self._settled: collections.deque[Settled] = collections.deque()
        self._safety: collections.deque[str] = collections.deque(maxlen=PROTECTED_SAFETY)
        self._last_reason: str | None = None
        self.snapshots = Snapshotter()
        self._persister = Persister(
            store, release=self.snapshots.release, began=self._began, settled=self._on_settled
        )

    @property
    def active(self) -> bool:
        """A copy or a write is under way."""
        return not self.snapshots.free

    def acquire_attempt(self, at_least: int) -> None:
        """Fence all earlier attempts. Where the store cannot be written to, training goes on without it."""
        try:
            self.attempt = self.store.acquire_attempt(self.job, self.uid, at_least).number
        except OSError as error:
            self.fail(f"store {self.store.url} is not writable: {error.strerror or error}")

    def begin_lineage(self, iteration: int, parent: str | None, order: str | None, at_least: int) -> None:
        """Note a new lineage durably. OSError or Fenced when the store refuses."""
        known = [lineage.number for lineage in self.store.lineages(self.job)]
        number = max([*known, at_least - 1]) + 1
        self.lineage = Lineage(
            number=number,
            iteration=iteration,
            parent=parent,
            order=order,
            attempt=self.attempt,
            created_at=time.time(),
        )
        self._standing.lineage = number
        self.head = parent
        if self.attempt:
            self.store.begin_lineage(self.job, self.lineage)

    def continue_lineage(self, lineage: Lineage, head: str) -> None:
        """Go on along a lineage of an earlier attempt, from its checkpoint `head`."""
        self.lineage, self.head = lineage, head
        self._standing.lineage = lineage.number

    def prepare(self, capture: Callable[[], Captured]) -> None:
        """Allocate the arena in the background, so that the first checkpoint does not wait for it."""
        self.snapshots.prepare(capture())

    def take(
        self, capture: Callable[[], Captured], kind: CheckpointKind, *, at_once: bool = False
    ) -> Snapshot | None:
        """Begin a checkpoint of this instant; None when it could not even begin, which is then an event."""
        if not self.attempt:
            self.acquire_attempt(1)  # a store that was full or away may be back
            if not self.attempt:
                return None
        started = time.perf_counter()
        try:
            snapshot = self.snapshots.begin(
                capture(),
                iteration=self._standing.iteration,
                lineage=self._standing.lineage,
                kind=kind,
                at_once=at_once,
            )
        except (
            Exception
        ) as error:  # the training loop's edge: a checkpoint that cannot be taken is not its problem
            self.fail(f"could not copy the state: {error}", kind)
            return None
        snapshot.stall_seconds += time.perf_counter() - started
        self._last = snapshot
        self._reporter.event(self._event(snapshot, "snapshot"))
        parent = self.head or self.lineage.parent
        self._persister.submit(
            snapshot,
            Origin(job=self.job, attempt=self.attempt, parent=parent, world_size=1, versions=self.versions),
        )
        return snapshot

    def wait_settled(self, timeout_seconds: float) -> bool:
        """Wait until nothing is under way and `head` is known; False when that takes too long."""
        if self._last is not None and not self._last.settled.wait(timeout_seconds):
            return False
        return self.snapshots.wait_free(timeout_seconds)

    def drain(self) -> list[Settled]:
        """What settled since the last call."""
        found = []
        while self._settled:
            found.append(self._settled.popleft())
        return found

    def close(self, timeout_seconds: float) -> None:
        if not self._persister.close(timeout_seconds):
            logger.warning("gave up waiting for the last checkpoint after %g s", timeout_seconds)
        self.snapshots.close()

    def fail(self, reason: str, kind: CheckpointKind = "scheduled") -> None:
        """A checkpoint that never became one: on the timeline each time, in the log once a reason."""
        self._warn(reason)
        iteration, lineage = self._standing.iteration, self._standing.lineage
        self._reporter.event(
            protocol.Checkpoint(
                at=time.time(),
                id=checkpoint_id(iteration, lineage),
                iteration=iteration,
                lineage=lineage,
                kind=kind,
                state="failed",
                reason=reason,
            )
        )

    def _began(self, snapshot: Snapshot) -> None:
        self._reporter.event(self._event(snapshot, "persisting", persist_started_at=time.time()))

    def _on_settled(self, settled: Settled) -> None:
        snapshot = settled.snapshot
        identity = checkpoint_id(snapshot.iteration, snapshot.lineage)
        state: CheckpointState = "failed"
        if settled.state == "durable":
            state = "durable"
            self._last_reason = None
            if snapshot.lineage == self._standing.lineage:
                self.head = identity
            if snapshot.kind == "safety":
                self._safety.append(identity)
        elif settled.state == "torn":
            state = "torn"
        if settled.reason:
            self._warn(settled.reason)
        self._reporter.event(
            self._event(
                snapshot,
                state,
                persist_started_at=settled.started_at,
                persist_seconds=settled.seconds,
                durable_iteration=self._standing.iteration if state == "durable" else None,
                reason=settled.reason,
            )
        )
        self._settled.append(settled)
        if state == "durable":
            self._retire()

    def _retire(self) -> None:
        """Delete what retention no longer wants; only ever after a newer checkpoint is durable."""
        try:
            lineages = self.store.lineages(self.job)
            protected = {lineage.parent for lineage in lineages[-PROTECTED_SAFETY:] if lineage.parent}
            protected |= {*self._safety, *([self.head] if self.head else [])}
            committed = self.store.checkpoints(self.job)
            gone = expendable(committed, self.keep, protected)
            for checkpoint in gone:
                self.store.delete(self.job, checkpoint, self.attempt)
        except (OSError, HoldfastError) as error:
            self._warn(f"could not remove old checkpoints: {error}")
            return
        if gone:
            left = [c for c in committed if c not in gone]
            self._reporter.event(protocol.Inventory(at=time.time(), checkpoints=left))

    def _event(self, snapshot: Snapshot, state: CheckpointState, **more: object) -> protocol.Checkpoint:
        copied = snapshot.copied.is_set()
        return protocol.Checkpoint(
            at=time.time(),
            id=checkpoint_id(snapshot.iteration, snapshot.lineage),
            iteration=snapshot.iteration,
            lineage=snapshot.lineage,
            kind=snapshot.kind,  # type: ignore[arg-type]
            state=state,
            payload_bytes=snapshot.size_bytes,
            snapshot_started_at=snapshot.started_at,
            snapshot_seconds=snapshot.seconds if copied else None,
            stall_seconds=snapshot.stall_seconds if copied else None,
            **more,  # type: ignore[arg-type]
        )

    def _warn(self, reason: str) -> None:
        if reason != self._last_reason:
            self._last_reason = reason
            logger.warning("%s: %s; training goes on", self.job, reason)


def newest_sound(store: Store, job: str, damaged: Callable[[str, HoldfastError], None]) -> restore.Loaded | None:
    """The newest checkpoint that verifies, loaded; each one passed over is told to `damaged`."""
    for checkpoint in restore.candidates(store, job):
        try:
            return restore.load(store, job, checkpoint)
        except DamagedCheckpoint as error:
            damaged(checkpoint, error)
    return None
