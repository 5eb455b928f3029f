"""A session's checkpoints from the decision to the durable end: snapshot, persist, events, retention."""

from __future__ import annotations

import collections
import contextlib
import importlib.metadata
import logging
import platform
import threading
import time
from collections.abc import Callable, Iterable

import msgspec
import torch

from holdfast import protocol, restore
from holdfast.errors import HoldfastError
from holdfast.fingerprint import fingerprint, of_thread
from holdfast.pacing.profile import SnapshotMode
from holdfast.persist import Origin, Persister, RetentionQueue, Settled
from holdfast.pins import Pinned
from holdfast.protocol import (
    PLAUSIBLE_STEP,
    CheckpointKind,
    CheckpointState,
    checkpoint_id,
    parse_checkpoint_id,
)
from holdfast.ranks import Ranks, SideGroup
from holdfast.remote import told
from holdfast.reports import Reporter, text
from holdfast.retention import Retention, expendable
from holdfast.snapshot import Snapshot, Snapshotter
from holdfast.state import Captured
from holdfast.store import Lineage, Store
from holdfast.store.records import ASKED_FOR, held, protected
from holdfast.tier import Tier

logger = logging.getLogger("holdfast")

FREE_SECONDS = 10.0
"""How long a rank waits for memory that the one that decides already had: far longer than that takes."""
LEAST_KEPT = 3
"""So many of the newest sound checkpoints stay under rules of retention that a server has sent."""
MOST_FREE_BYTES = 2**53
RETURN_SECONDS = 0.05
"""Training waits no longer to learn whether a store that was away is back."""


class Checkpointer:
    """Takes checkpoints of one attempt. Its methods are for the training thread."""

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
        self.retention = self._own_retention = retention
        """The rules in force; and those of the script."""
        self.attempt = 0
        """0 while the store could not be written to."""
        self.lineage = Lineage(number=1, iteration=0, parent=None, order=None, attempt=0, created_at=0.0)
        self.latest_lineage = 0
        """The highest number a server says that it has seen."""
        self._disbelieved: set[str] = set()
        """Kinds of numbers that were told by a server, ignored, and reported so."""
        self.head: str | None = None
        """The newest durable checkpoint on this lineage."""
        self._reporter, self._standing = reporter, reporter.standing
        self.versions = {
            "holdfast": importlib.metadata.version("holdfast"),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        }
        """What writes them."""
        self._asked_for: collections.deque[str] = collections.deque(maxlen=ASKED_FOR)
        self._knows_asked_for = False
        """Those that attempts before this one took are among them."""
        self._asked_for_lock = threading.Lock()
        self.retiring = RetentionQueue(self._retire)
        self._in_flight: list[Snapshot] = []
        self._settled: collections.deque[Settled] = collections.deque()
        self.damaged: set[str] = set()
        """Found so by this attempt; a sound one may take their names."""
        self._wanted: dict[str, str | None] = {}
        """What must not be retired, by who wants it: the target of an open order, of a restore by the script."""
        self.pinned = Pinned(store, job, reporter)
        self._sizes = restore.Sizes(store, job)
        self._last_reason: str | None = None
        self.tier = Tier(job, uid, slots, ranks, reporter)
        self.snapshots = Snapshotter(slots, debug=debug, arenas=self.tier.arenas)
        self.persister = Persister(
            store,
            slots=slots,
            backend=backend,
            release=self.snapshots.release,
            began=self._began,
            settled=self._on_settled,
            line=ranks if isinstance(ranks, SideGroup) else None,
        )
        self.snapshots.shared = self.persister.shares_memory
        self._backend_told = self.persister.chosen
        self.unprepared = True
        """There is something for `prepare` to do."""
        self._at_least = 1
        """The number that this attempt must have at least."""
        self._open_order: str | None = None
        """When it began."""
        self._unnoted: str | None = None
        """An order that was carried out while the store could not be written to."""
        self._late: threading.Thread | None = None
        """Asks a store that was away whether it is back."""
        self._returned: tuple[int, Lineage] | None = None
        """The attempt and the lineage that it gave."""

    @property
    def active(self) -> bool:
        """A copy or a write is under way."""
        return not self.snapshots.idle

    @property
    def under_way(self) -> int:
        """How many copies and writes are."""
        return sum(not each.settled.is_set() for each in self._in_flight)

    def acquire_attempt(self, at_least: int, *, order: str | None = None) -> None:
        """Fence all earlier attempts, and note the order that is open; of several ranks, rank 0 does.

        Where the store cannot be written to, there are no checkpoints for now.
        """
        self._at_least, self._open_order = at_least, order
        try:
            self.attempt = self._ranks.decide(lambda: self._become_newest(at_least), int)
        except OSError as error:
            # whether training starts without it is not known yet: that takes a store that can be read, or is new
            self._last_reason = self._not_writable(error)
            self._reporter.notice(
                "warning", "checkpoint", f"{self._last_reason}; no checkpoint is taken until it is"
            )

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
        self.lineage, self.head = lineage, head
        self._standing.lineage = lineage.number

    def follow_lineage(self, number: int) -> None:
        """Rank 0 has begun another one since the store is back."""
        if number != self.lineage.number:
            self.continue_lineage(msgspec.structs.replace(self.lineage, number=number), self.head)

    def want(self, who: str, checkpoint: str | None) -> None:
        """Keep what somebody wants to go back to, until they want another one or none. For any thread."""
        self._wanted[who] = checkpoint

    def find_lineage(self) -> None:
        """Before a checkpoint that nobody announced: that which rank 0 is on, of a store that is back perhaps."""

        def current() -> int:
            if not self.attempt:
                self._acquire_late()
            return self.lineage.number

        self.follow_lineage(self._ranks.decide(current, int))

    def prepare(self, capture: Callable[[], Captured]) -> None:
        """Allocate memory in the background, so that the first checkpoint does not wait for it.

        Once more when a choice of "auto" asks for another kind of memory.
        """
        if self.snapshots.free:
            self.unprepared = False
            self.snapshots.prepare(capture())
            self.persister.prepare()

    def take(
        self,
        capture: Callable[[bool], Captured],
        kind: CheckpointKind,
        *,
        mode: SnapshotMode = "cpu",
        over_seconds: float = 0.0,
        at_once: bool = False,
    ) -> Snapshot | None:
        """Begin a checkpoint of this instant; None when it could not even begin, which is then an event.

        `capture` is told whether it may leave to a look during training what only that can change. The bytes are
        written over `over_seconds` rather than as fast as they can. Of several ranks all call it at
        the same boundary.
        """
        self._number += 1
        if self._ranks.leads and not self.attempt and not self._acquire_late():
            self._decline("the store is not writable")
            return None
        started, begun = time.perf_counter(), None

        def announce(snapshot: Snapshot) -> None:
            nonlocal begun
            begun = snapshot
            snapshot.number = self._number
            snapshot.fingerprint = of_thread()
            self._reporter.event(self._event(snapshot, "snapshot"))
            snapshot.stall_seconds = time.perf_counter() - started
            origin = self._origin(snapshot, over_seconds)
            in_flight = [each for each in self._in_flight if not each.settled.is_set()]
            snapshot.in_flight = len(in_flight) + 1
            self.persister.submit(snapshot, origin)
            self._in_flight = [*in_flight, snapshot]

        try:
            if not self.snapshots.wait_free(FREE_SECONDS):  # another rank's was free a moment ago
                raise HoldfastError("the snapshot before is still being written")
            snapshot = self.snapshots.begin(
                capture(not at_once),
                iteration=self._standing.iteration,
                lineage=self._standing.lineage,
                kind=kind,
                mode=mode,
                at_once=at_once,
                announce=announce,
            )
        except Exception as error:  # the loop's edge: a checkpoint that cannot be taken is not its problem
            if begun is None or not begun.submitted:
                self._decline(f"could not copy the state: {error}")
                self.fail(f"could not copy the state: {error}", kind)
            return None
        except BaseException:  # Ctrl-C: the other ranks wait for a word of this one
            if begun is None or not begun.submitted:
                self._decline("interrupted")
            raise
        return snapshot

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
        self.head = parent  # until it is durable
        held: Snapshot | None = None
        try:
            snapshot, origin = self.tier.survivor()
            snapshot.number = self._number
            origin = msgspec.structs.replace(
                origin,
                attempt=self.attempt,
                uid=self.uid,
                place=None,
                replaces=snapshot.id in self.damaged,
                bytes_per_second=None,
            )
            self.snapshots.hold(snapshot.arena)
            held = snapshot
            self.persister.submit(snapshot, origin)
            self._in_flight.append(snapshot)
        except Exception as error:  # training goes on without; the other ranks wait for a word of this one
            if held is not None:
                self.snapshots.release(held)
            self.fail(f"what lay in memory is not saved: {told(error)}")
            self._decline(told(error))

    def _decline(self, reason: str) -> None:
        if self._ranks.world_size > 1:
            self.persister.decline(self._number, reason)

    def _origin(self, snapshot: Snapshot, over_seconds: float) -> Origin:
        return Origin(
            job=self.job,
            attempt=self.attempt,
            uid=self.uid,
            parent=self.head or self.lineage.parent,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            versions=self.versions,
            replaces=snapshot.id in self.damaged,
            bytes_per_second=snapshot.size_bytes / over_seconds if over_seconds > 0 else None,
        )

    def wait_settled(self, timeout_seconds: float) -> bool:
        """Wait until nothing is under way and `head` is known; False when that takes too long."""
        deadline = time.monotonic() + timeout_seconds
        if not all(each.settled.wait(max(0.0, deadline - time.monotonic())) for each in self._in_flight):
            return False
        return self.snapshots.wait_idle(max(0.0, deadline - time.monotonic()))

    def drain(self) -> list[Settled]:
        """What settled since the last call."""
        found = []
        while self._settled:
            found.append(self._settled.popleft())
        if found:
            if (shared := self.persister.shares_memory) != self.snapshots.shared:
                self.snapshots.shared, self.unprepared = shared, True
            if (chosen := self.persister.chosen) not in (None, self._backend_told):
                self._backend_told = chosen
                self._reporter.notice("info", "backend", f"checkpoints are written by {self.persister.reason}")
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
                reason=text(reason),
            )
        )

    def _began(self, snapshot: Snapshot) -> None:
        if not snapshot.survived:
            with contextlib.suppress(Exception):  # of a device that has failed; other ranks wait for this one
                snapshot.fingerprint = fingerprint() | snapshot.fingerprint
        self._reporter.event(self._event(snapshot, "persisting", persist_started_at=time.time()))

    def _on_settled(self, settled: Settled) -> None:
        snapshot = settled.snapshot
        state: CheckpointState = "failed"
        if settled.state == "durable":
            state = "durable"
            if self._last_reason is not None:
                self._last_reason = None
                self._reporter.notice("info", "checkpoint", f"checkpoints are durable again, from {snapshot.id}")
            if snapshot.kind == "requested":
                with self._asked_for_lock:
                    self._asked_for.append(snapshot.id)
            self._reporter.durable(snapshot.id, settled.seconds)
            if settled.newest:  # one that took long may settle after those that were begun later
                self.head = snapshot.id
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
                reason=text(settled.reason) if settled.reason else None,
                store_free_bytes=self._free_bytes() if state == "durable" else None,
            )
        )
        self._settled.append(settled)
        if state == "durable" and self._ranks.leads:
            self.retiring.request()

    def _free_bytes(self) -> int | None:
        """As far as it can be told; beyond nine petabytes no message holds the number, and nobody asks."""
        try:
            free = self.store.free_bytes()
        except OSError:
            return None
        return None if free is None else min(free, MOST_FREE_BYTES)

    def _retire(self) -> None:
        """Delete what retention no longer wants; only ever after a newer checkpoint is durable."""
        try:
            if not self._knows_asked_for:
                self._learn_asked_for()
            self.pinned.learn()
            self.pinned.note(self.attempt)
            committed = self.store.checkpoints(self.job)
            pins = self.pinned.checkpoints
            sizes = self._sizes.of(committed) if self.retention.size_bytes is not None else {}
            never = self._protected() | self._least(committed)
            gone = expendable(committed, self.retention, never=never, pinned=pins, sizes=sizes)
            waits = held(self.store, self.job) if gone else set()
            gone = {each: why for each, why in gone.items() if each not in waits}
            deleted = self._delete(gone)
        except (OSError, HoldfastError) as error:
            self._warn(f"could not remove old checkpoints: {error}")
            return
        if deleted:
            left = [c for c in committed if c not in deleted]
            self._reporter.inventory(left, pins)

    def _delete(self, checkpoints: Iterable[str]) -> set[str]:
        """Delete one after the other, except what a restore or a pin asked for meanwhile; the names deleted."""
        deleted = set()
        for checkpoint in checkpoints:
            if self.retiring.closing:
                break
            if checkpoint not in list(self._wanted.values()) and checkpoint not in self.pinned.checkpoints:
                self.store.delete(self.job, checkpoint, self.attempt)
                deleted.add(checkpoint)
        return deleted

    def _protected(self) -> set[str]:
        """Where the lineages that training descends from began, the ways back, what is to be restored."""
        with self._asked_for_lock:
            asked_for = list(self._asked_for)
        kept = protected(self.store.records(self.job, Lineage), self.lineage.number, asked_for)
        return kept | {each for each in (self.head, *list(self._wanted.values())) if each is not None}

    def _least(self, committed: Iterable[str]) -> set[str]:
        """What rules from a server leave, whatever they say; the script's own may keep fewer."""
        if self.retention == self._own_retention:
            return set()
        sound = (each for each in committed if each not in self.damaged)
        return set(sorted(sound, key=lambda each: parse_checkpoint_id(each)[::-1])[-LEAST_KEPT:])

    def _new_lineage(
        self, attempt: int, iteration: int, parent: str | None, order: str | None = None, left: str | None = None
    ) -> Lineage:
        known = [lineage.number for lineage in self.store.records(self.job, Lineage)]
        known += [parse_checkpoint_id(checkpoint)[1] for checkpoint in self.store.checkpoints(self.job)]
        newest = max(known, default=0)
        return Lineage(
            number=max(newest, self._believed("lineage", self.latest_lineage, newest)) + 1,
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
            at_least = self._believed("attempt", at_least - 1, self.store.latest_attempt(self.job)) + 1
        number = self.store.acquire_attempt(self.job, self.uid, at_least, order=self._open_order).number
        with contextlib.suppress(OSError):  # asked again before anything is deleted
            self._learn_asked_for()
            self.pinned.learn()
        return number

    def _believed(self, what: str, told: int, known: int) -> int:
        """The highest number that a server has told, or 0 where the store makes it implausible.

        A number that is noted in the store holds for good: one mistaken report must not use all of them up.
        """
        if told <= known + PLAUSIBLE_STEP:
            return told
        if what not in self._disbelieved:
            self._disbelieved.add(what)
            said = f"{what} {told:,}" if told < 2**63 else f"a number of {what}s beyond all bounds"
            self._reporter.notice(
                "warning",
                "numbers",
                f"the server has seen {said}, and the newest in store {self.store.url} is {known:,}: the server's "
                "number is ignored. Unless the store was emptied, somebody has reported a wrong one",
            )
        return 0

    def _learn_asked_for(self) -> None:
        found = restore.of_kind(self.store, self.job, "requested")
        with self._asked_for_lock:
            newer = [each for each in self._asked_for if each not in found]
            self._asked_for = collections.deque([*found, *newer], maxlen=ASKED_FOR)
            self._knows_asked_for = True

    def _acquire_late(self) -> bool:
        """A store that was full or away may be back; what it holds is another history, so begin beside it.

        It is asked in the background, for one that is away may take half a minute to say so; a directory answers
        while this waits.
        """
        if self._late is None:
            self._late = threading.Thread(target=self._return, name="holdfast-return", daemon=True)
            self._late.start()
            self._late.join(RETURN_SECONDS)
        if self._late.is_alive():
            return False
        self._late = None
        if self._returned is None:
            return False
        (self.attempt, lineage), self._returned = self._returned, None
        self.continue_lineage(lineage, lineage.parent)
        self._reporter.lineage_began(self.lineage)
        return True

    def _return(self) -> None:
        try:
            attempt = self._become_newest(self._at_least)
            start = parse_checkpoint_id(self.head)[0] if self.head is not None else self.lineage.iteration
            lineage = self._new_lineage(attempt, start, self.head, self._unnoted)
            self.store.append(self.job, lineage)
        except Exception as error:  # a thread's edge: the next checkpoint that is due tries again
            self.fail(self._not_writable(error))
        else:
            self._returned = attempt, lineage

    def _event(self, snapshot: Snapshot, state: CheckpointState, **more: object) -> protocol.Checkpoint:
        copied = snapshot.copied.is_set()
        return protocol.Checkpoint(
            at=time.time(),
            id=snapshot.id,
            iteration=snapshot.iteration,
            lineage=snapshot.lineage,
            kind=snapshot.kind,  # type: ignore[arg-type]
            state=state,
            payload_bytes=snapshot.stored_bytes or snapshot.size_bytes,
            snapshot_started_at=snapshot.started_at,
            snapshot_seconds=snapshot.seconds if copied else None,
            stall_seconds=snapshot.stall_seconds if copied else None,
            ranks=snapshot.ranks if state == "durable" else [],
            **more,  # type: ignore[arg-type]
        )

    def _not_writable(self, error: Exception) -> str:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        return f"store {self.store.url} is not writable: {reason}"

    def _warn(self, reason: str) -> None:
        if reason != self._last_reason:
            self._last_reason = reason
            self._reporter.notice("warning", "checkpoint", f"{reason}; training goes on")
