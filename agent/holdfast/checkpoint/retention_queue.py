"""Retention of one job: deletes checkpoints that its rules do not keep, on the thread pool.

Neither checkpoints nor SIGTERM wait for deletions. Pinned checkpoints stay, as the server reports them, and as the
store records them for starts without a server.
"""

from __future__ import annotations

import collections
import enum
import errno
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from holdfast.checkpoint import restore
from holdfast.checkpoint.stored_manifest import has_other_format
from holdfast.errors import Fenced, HoldfastError, StoreFull
from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.protocol.wire import Desired
from holdfast.retention import BestRule, Retention, checkpoints_to_delete, first_to_delete
from holdfast.store import Lineage, Pins, Store, newest_pins
from holdfast.store.records import ASKED_FOR, held_checkpoints, protected_checkpoints
from holdfast.system import io_pool
from holdfast.telemetry.reporter import Reporter

logger = logging.getLogger("holdfast")
MIN_KEPT = 3
"""Number of newest sound checkpoints that server-sent rules never delete."""
NOT_REMOVABLE = (errno.EBUSY, errno.EACCES, errno.EPERM)
"""Errors of one checkpoint, after which others may still be removed."""
MOST_IN_VAIN = 2
"""Most checkpoints to remove while free space does not grow: an object store may count deleted objects for a
while, free space may be reported wrongly, and another program may use it.
"""
MOST_DESCRIBED = 500
"""Number of newest checkpoints whose manifests are read for a server that does not know them."""
MOST_NAMED = 10
"""Number of logged metrics that a notice names."""


class PinnedCheckpoints:
    """The checkpoints that retention always keeps. Used by the polling thread and by retention."""

    def __init__(self, store: Store, job: str, reporter: Reporter) -> None:
        self._store, self._job, self._reporter = store, job, reporter
        self._checkpoints: tuple[str, ...] | None = None
        """None until the server or the store has reported pins."""
        self._recorded: tuple[str, ...] | None = None
        """Pins that this attempt has recorded, including those that it loaded, so that a late write of an earlier
        attempt does not replace them.
        """
        self._is_loaded = self._has_failed = False
        self._reported: set[str] = set()
        self._lock = threading.Lock()

    @property
    def checkpoints(self) -> tuple[str, ...]:
        return self._checkpoints or ()

    def follow(self, wanted: tuple[str, ...] | None, attempt: int, *, for_alerts: Collection[str] = ()) -> None:
        """Apply the pins that the server reports, at once; None means that it reports none.

        A checkpoint that an alert pins may be gone: retention may have deleted it before. The server then pins an
        older one. Another thread records the pins in the store, since the calling thread also receives orders.
        """
        if wanted is not None:
            self._checkpoints = wanted
            io_pool.submit(lambda: self._record_and_report(attempt, set(wanted) - set(for_alerts)))

    def _record_and_report(self, attempt: int, expected: set[str]) -> None:
        self.record(attempt)
        self._report_missing(expected)

    def load(self) -> None:
        """Apply the pins of an earlier attempt, unless a server has reported pins. OSError when the store
        fails."""
        if self._is_loaded:
            return
        found = newest_pins(self._store, self._job)
        with self._lock:
            self._is_loaded = True
            if self._checkpoints is None:
                self._checkpoints = found.checkpoints if found is not None else ()
            if found is None and self._recorded is None:
                self._recorded = ()  # nothing to record while there are no pins

    def record(self, attempt: int) -> None:
        """Record the pins in the store. A failure is reported once, and the next call tries again."""
        with self._lock:
            wanted = self._checkpoints
            if wanted is None or wanted == self._recorded:
                return
            try:
                if not attempt:
                    raise OSError("it is not writable")
                self._store.append(self._job, Pins(attempt=attempt, checkpoints=wanted, at=time.time()))
            except Fenced as error:  # the newer attempt receives them from the server
                logger.debug("%s: pins are not recorded: %s", self._job, error)
            except OSError as error:
                self._report_failure(error)
            else:
                self._recorded, self._has_failed = wanted, False

    def _report_failure(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            what = f"pins cannot be recorded in store {self._store.url}: {error.strerror or error}"
            self._reporter.notice(
                "warning",
                "pins",
                f"{what}; they apply while this attempt runs, and the next checkpoint tries again",
            )

    def _report_missing(self, expected: set[str]) -> None:
        """Report each expected checkpoint that is not in the store once."""
        with self._lock:
            unknown = expected - self._reported
            if not unknown:
                return
            try:
                unknown -= set(self._store.checkpoints(self._job))
            except OSError:  # the store cannot be listed
                return
            self._reported |= unknown
        for checkpoint in sorted(unknown):
            message = f"{checkpoint} is pinned but not in the store"
            self._reporter.notice("warning", "pins", message)


class Protector(enum.Enum):
    """What protects a checkpoint from retention."""

    ORDER = "an open order to restore it"
    SCRIPT = "a restore that the script requested"
    RESTORE = "a restore under way"
    VERIFICATION = "a verification under way"
    DRAIN = "a copy under way"
    TROUBLE = "the rule that restores it when the loss is wrong"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingHead:
    """Attempt, lineage, newest durable checkpoint and known damage of the running job."""

    attempt: int
    lineage: int
    head: str | None
    damaged: Collection[str]


class RetentionQueue:
    """Runs retention once for all requests that arrive during the previous run. For any thread.

    Two runs never overlap, and one stops between two deletes once the queue closes.
    """

    def __init__(
        self, store: Store, job: str, rules: Retention, reporter: Reporter, head: Callable[[], TrainingHead]
    ) -> None:
        self._store, self._job, self._reporter, self._head = store, job, reporter, head
        self.rules = self._own_rules = rules
        """The rules in force, and those of the script."""
        self.pinned = PinnedCheckpoints(store, job, reporter)
        self._facts = restore.RetentionFacts(store, job)
        self._known_attempt = 0
        """Highest attempt that the server has known; the server's data may have been deleted since."""
        self._was_behind = False
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        """Protects the attributes below; never held during I/O."""
        self._requested = self._running = self._closing = False
        self._protected_by: dict[Protector, str | None] = {}
        self._requested_ids: collections.deque[str] = collections.deque(maxlen=ASKED_FOR)
        self._requested_loaded = False
        """Requested checkpoints of earlier attempts are loaded."""
        self._not_removable: set[str] = set()
        """Checkpoints that this process may not remove, that are mounted, or of another version of Holdfast."""
        self._has_made_room = self._full_reported = False
        self._removed_in_vain = 0
        """Number of checkpoints removed to make room since one became durable, or since free space last grew."""
        self._free_bytes: int | None = None
        """Free space when a write last asked for room; `None` if it did not say."""
        self._has_removed = False
        """A run has removed checkpoints since a write last asked for room."""
        self._last_reason: str | None = None
        self._unlogged: set[BestRule] = set()
        """Rules whose metric no checkpoint had when that was reported."""

    def change(self, rules: Retention) -> None:
        """Apply other rules from the next run on."""
        self.rules = rules

    def follow(self, desired: Desired, attempt: int) -> None:
        """Apply the pins that the server reports, and describe the checkpoints if it lacks their attempts."""
        self.pinned.follow(desired.pins, attempt, for_alerts=desired.alert_pins)
        is_behind = desired.latest_attempt < max(attempt - 1, self._known_attempt)
        self._known_attempt = max(desired.latest_attempt, self._known_attempt)
        if is_behind and not self._was_behind:
            io_pool.submit(self._describe)
        self._was_behind = is_behind

    def _describe(self) -> None:
        """Report time and size of the newest checkpoints, which an inventory lists by name alone."""
        try:
            for described in restore.described(self._store, self._job, most=MOST_DESCRIBED):
                self._reporter.event(described)
        except OSError as error:  # the pages lack these figures
            logger.debug("%s: the checkpoints in the store are not described: %s", self._job, error)

    def protect(self, protector: Protector, checkpoint: str | None) -> None:
        """Protect a checkpoint from retention, until `protector` protects another one or none."""
        with self._lock:
            self._protected_by[protector] = checkpoint

    def add_requested(self, checkpoint: str) -> None:
        """Keep a requested checkpoint, until newer requested ones replace it."""
        with self._lock:
            self._requested_ids.append(checkpoint)

    def load_requested(self) -> None:
        """Load the requested checkpoints and pins of earlier attempts. OSError: a later run tries again."""
        found = restore.of_kind(self._store, self._job, "requested", ASKED_FOR)
        with self._lock:
            newer = [each for each in self._requested_ids if each not in found]
            self._requested_ids = collections.deque([*found, *newer], maxlen=ASKED_FOR)
            self._requested_loaded = True
        self.pinned.load()

    def request(self) -> None:
        """Request a run, after a checkpoint became durable; returns at once."""
        with self._lock:
            self._removed_in_vain = 0
            if self._closing:
                return
            self._requested, starts = True, not self._running
            self._running = True
        if starts:
            io_pool.submit(self._run)

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until no run is requested or under way; `False` on timeout."""
        with self._lock:
            return self._changed.wait_for(lambda: not self._running, timeout_seconds)

    def close(self, timeout_seconds: float = 0.0) -> None:
        """Finish the requested run within `timeout_seconds`, then stop; the next start does the rest."""
        deadline = time.monotonic() + timeout_seconds
        self.wait_idle(timeout_seconds)
        with self._lock:
            self._closing = True
        self.wait_idle(max(0.0, deadline - time.monotonic()))

    def make_room(self, error: Exception) -> bool:
        """Remove what the rules do not keep, or else the least valuable checkpoints; return whether there is room.

        The thread that writes calls it when the store is full and the write failed with `error`. The
        checkpoint that a start would resume from stays. If a run has removed checkpoints during the write, that
        room may be enough.
        """
        with self._lock:
            self._changed.wait_for(lambda: not self._running)
            has_removed, self._has_removed = self._has_removed, False
            if self._closing or has_removed:
                return not self._closing
            self._running = True
        try:
            return self._remove_cheapest(error)
        except (OSError, HoldfastError) as failure:
            self._warn(f"could not remove old checkpoints: {failure}")
            return False
        finally:
            with self._lock:
                self._running = self._has_removed = False
                self._changed.notify_all()
                is_waiting = self._requested
            if is_waiting:
                self.request()

    def _remove_cheapest(self, error: Exception) -> bool:
        before, self._free_bytes = self._free_bytes, error.free_bytes if isinstance(error, StoreFull) else None
        if before is not None and self._free_bytes is not None and self._free_bytes > before:
            self._removed_in_vain = 0
        if self._removed_in_vain == MOST_IN_VAIN:
            return False
        self._load_kept()
        if self._head().head is not None and self._retire():
            return True
        at, committed, pins = self._head(), self._store.resident(self._job), self.pinned.checkpoints
        candidates = (each for each, _ in restore.candidates(self._store, self._job) if each not in at.damaged)
        never = self.protected() | held_checkpoints(self._store, self._job) | set(itertools.islice(candidates, 1))
        sizes, metrics = self._facts.read(committed)
        removable = [each for each in committed if each not in never and each not in pins]
        removable_bytes = sum(sizes.get(each, math.inf) for each in removable)
        if isinstance(error, StoreFull) and error.missing_bytes > removable_bytes:
            return False  # to remove them all would not be enough
        first = first_to_delete(
            *(committed, self.rules),
            protected=never, pinned=pins, damaged=at.damaged, sizes=sizes, metrics=metrics,
        )  # fmt: skip
        deleted = list(self._delete([first] if first is not None else []))
        if deleted:
            self._has_made_room = True
            self._removed_in_vain += 1
            self._report_deleted(committed, dict.fromkeys(deleted, "removed to make room: the store is full"))
        return bool(deleted)

    def _report_full(self, kept: int) -> None:
        """Report once that the store has no room for the checkpoints that the rules keep."""
        if self._has_made_room and not self._full_reported:
            self._full_reported = True
            most = self.rules.most_kept
            rules = f"'{self.rules}' keeps" + (f" {most}" if most is not None else " more")
            self._reporter.notice(
                "warning",
                "full",
                f"store {self._store.url} is full and has room for only {kept} checkpoints, while retention "
                f"{rules}: the least valuable ones are removed so that the newest can be saved. Free space, lower "
                "keep, change retention, or move the store",
            )

    def _run(self) -> None:
        while self._next():
            try:
                self._retire()
                self._last_reason = None
            except (OSError, HoldfastError) as error:
                self._warn(f"could not remove old checkpoints: {error}")
            except Exception:  # a defect must not leave retention marked as running
                logger.exception("retention failed; it runs again after the next checkpoint")

    def _next(self) -> bool:
        with self._lock:
            if self._requested and not self._closing:
                self._requested = False
                return True
            self._running = False
            self._changed.notify_all()
            return False

    def _retire(self) -> bool:
        """Delete what the rules do not keep, once a newer checkpoint is durable; return whether any was."""
        self._load_kept()
        at = self._head()
        self.pinned.record(at.attempt)
        committed = self._store.resident(self._job)
        pins = self.pinned.checkpoints
        rules = self.rules
        needs_manifests = rules.size_bytes is not None or bool(rules.best)
        sizes, metrics = self._facts.read(committed if needs_manifests else ())
        never = self.protected() | self._minimum_kept(committed, at.damaged)
        gone = checkpoints_to_delete(
            committed, rules, protected=never, pinned=pins, damaged=at.damaged, sizes=sizes, metrics=metrics
        )
        if gone:
            self._report_unlogged(rules, metrics)
        waits = held_checkpoints(self._store, self._job) if gone else set()
        deleted: dict[str, str] = {}
        try:
            for checkpoint in self._delete(each for each in gone if each not in waits):
                deleted[checkpoint] = gone[checkpoint]
        finally:  # also where the store failed in between
            if deleted:
                self._report_deleted(committed, deleted)
        self._report_full(len(committed) - len(deleted))
        return bool(deleted)

    def _report_deleted(self, committed: Collection[str], deleted: Mapping[str, str]) -> None:
        """Report the remaining checkpoints, here and elsewhere, and why the others are gone."""
        copies = self._store.copies(self._job)
        left = (set(committed) - deleted.keys()) | copies.keys()
        gone = {each: reason for each, reason in deleted.items() if each not in copies}
        pinned = self.pinned.checkpoints
        self._reporter.inventory(sorted(left, key=parse_checkpoint_id), pinned, gone, copies=copies)

    def _load_kept(self) -> None:
        """Load the pins and requests of earlier attempts, unless they were loaded when this attempt began."""
        if not self._requested_loaded:
            self.load_requested()
        self.pinned.load()

    def _delete(self, checkpoints: Iterable[str]) -> Iterator[str]:
        """Delete one by one, except those protected or pinned meanwhile; yield the deleted names."""
        for checkpoint in checkpoints:
            with self._lock:
                if self._closing:
                    break
                is_wanted = checkpoint in self._protected_by.values()
            if is_wanted or checkpoint in self.pinned.checkpoints:
                continue
            if has_other_format(self._store, self._job, checkpoint):
                self._keep(checkpoint, f"another version of Holdfast wrote {checkpoint}: it is kept")
                continue
            try:
                self._store.delete(self._job, checkpoint, self._head().attempt)
            except OSError as error:
                if error.errno not in NOT_REMOVABLE:
                    raise
                self._keep(checkpoint, f"{checkpoint} cannot be removed, and stays until the next start: {error}")
            else:
                self._has_removed = True
                yield checkpoint

    def _keep(self, checkpoint: str, reason: str) -> None:
        self._not_removable.add(checkpoint)
        self._reporter.notice("warning", "retention", reason)

    def protected(self) -> set[str]:
        """Return checkpoints that no rule deletes: lineage starts, safety checkpoints, restore targets.

        Also those that could not be deleted.
        """
        at = self._head()
        with self._lock:
            asked_for, wanted = list(self._requested_ids), list(self._protected_by.values())
        kept = protected_checkpoints(self._store.records(self._job, Lineage), at.lineage, asked_for)
        return kept | self._not_removable | {each for each in (at.head, *wanted) if each is not None}

    def _minimum_kept(self, committed: Iterable[str], damaged: Collection[str]) -> set[str]:
        """Return the newest checkpoints that server-sent rules keep; rules of the script may keep fewer."""
        if self.rules == self._own_rules:
            return set()
        sound = (each for each in committed if each not in damaged)
        return set(sorted(sound, key=lambda each: parse_checkpoint_id(each)[::-1])[-MIN_KEPT:])

    def _report_unlogged(self, rules: Retention, metrics: Mapping[str, Collection[str]]) -> None:
        """Report, once for each rule, that no checkpoint has its metric although others were logged."""
        logged = sorted({name for each in metrics.values() for name in each})
        for rule in rules.best:
            if logged and rule.metric not in logged and rule not in self._unlogged:
                self._unlogged.add(rule)
                names = ", ".join(logged[:MOST_NAMED]) + (", …" if len(logged) > MOST_NAMED else "")
                message = (
                    f"retention '{rule}': no checkpoint has the metric {rule.metric}; logged so far: {names}. "
                    f"Until it appears the newest {rule.count} stay"
                )
                self._reporter.notice("warning", "retention", message)

    def _warn(self, reason: str) -> None:
        if reason != self._last_reason:
            self._last_reason = reason
            self._reporter.notice("warning", "checkpoint", f"{reason}; training continues")
