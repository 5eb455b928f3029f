"""Retention of one job: deletes what its rules no longer want, on the thread pool.

No checkpoint, and no SIGTERM, waits for a store's deletes.
"""

from __future__ import annotations

import collections
import enum
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from holdfast.checkpoint import restore
from holdfast.checkpoint.pins import Pinned
from holdfast.errors import HoldfastError
from holdfast.protocol.messages import parse_checkpoint_id
from holdfast.protocol.retention import Retention, expendable
from holdfast.store import Lineage, Store
from holdfast.store.records import ASKED_FOR, held, protected
from holdfast.system import io_pool
from holdfast.telemetry.reporter import Reporter

logger = logging.getLogger("holdfast")

LEAST_KEPT = 3
"""So many of the newest sound checkpoints stay under rules of retention that a server has sent."""


class Protector(enum.Enum):
    """What protects a checkpoint from retention."""

    ORDER = "an open order to restore it"
    SCRIPT = "a restore that the script requested"
    RESTORE = "a restore under way"
    VERIFICATION = "a verification under way"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingHead:
    """Where an attempt stands among the checkpoints of its job."""

    attempt: int
    lineage: int
    head: str | None
    damaged: Collection[str]


class RetentionQueue:
    """Runs retention once for all requests that arrive while the run before is going on. For any thread.

    Two runs never overlap, and one stops between two deletes once the queue closes.
    """

    def __init__(
        self, store: Store, job: str, rules: Retention, reporter: Reporter, head: Callable[[], TrainingHead]
    ) -> None:
        self._store, self._job, self._reporter, self._head = store, job, reporter, head
        self.rules = self._own_rules = rules
        """The rules in force, and those of the script."""
        self.pinned = Pinned(store, job, reporter)
        self._sizes = restore.Sizes(store, job)
        self._changed = threading.Condition()
        """Guards what follows; held for no I/O."""
        self._requested = self._running = self._closing = False
        self._wanted: dict[Protector, str | None] = {}
        self._asked_for: collections.deque[str] = collections.deque(maxlen=ASKED_FOR)
        self._knows_asked_for = False
        """Those that attempts before this one took are among them."""
        self._last_reason: str | None = None

    def want(self, protector: Protector, checkpoint: str | None) -> None:
        """Protect a checkpoint from retention, until `protector` protects another one or none."""
        with self._changed:
            self._wanted[protector] = checkpoint

    def add_asked_for(self, checkpoint: str) -> None:
        """Keep a checkpoint that was taken on request, until newer ones were."""
        with self._changed:
            self._asked_for.append(checkpoint)

    def learn(self) -> None:
        """Look up what attempts before this one keep. OSError: the store cannot say; a later run asks again."""
        found = restore.of_kind(self._store, self._job, "requested")
        with self._changed:
            newer = [each for each in self._asked_for if each not in found]
            self._asked_for = collections.deque([*found, *newer], maxlen=ASKED_FOR)
            self._knows_asked_for = True
        self.pinned.learn()

    def request(self) -> None:
        """Ask for retention; returns at once."""
        with self._changed:
            if self._closing:
                return
            self._requested, starts = True, not self._running
            self._running = True
        if starts:
            io_pool.submit(self._run)

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until every request so far is carried out; False when that takes too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, timeout_seconds)

    def close(self, timeout_seconds: float = 0.0) -> None:
        """Finish what was requested if `timeout_seconds` is enough, then stop; the next start resumes the rest."""
        deadline = time.monotonic() + timeout_seconds
        self.wait_idle(timeout_seconds)
        with self._changed:
            self._closing = True
        self.wait_idle(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while self._next():
            try:
                self._retire()
                self._last_reason = None
            except (OSError, HoldfastError) as error:
                self._warn(f"could not remove old checkpoints: {error}")
            except Exception:  # a defect of ours must not mark retention as running for ever
                logger.exception("retention failed; it runs again after the next checkpoint")

    def _next(self) -> bool:
        with self._changed:
            if self._requested and not self._closing:
                self._requested = False
                return True
            self._running = False
            self._changed.notify_all()
            return False

    def _retire(self) -> None:
        """Delete what retention no longer wants; only ever after a newer checkpoint is durable."""
        if not self._knows_asked_for:
            self.learn()
        self.pinned.learn()
        at = self._head()
        self.pinned.note(at.attempt)
        committed = self._store.checkpoints(self._job)
        pins = self.pinned.checkpoints
        sizes = self._sizes.of(committed) if self.rules.size_bytes is not None else {}
        never = self._protected() | self._least(committed, at.damaged)
        gone = expendable(committed, self.rules, never=never, pinned=pins, sizes=sizes)
        waits = held(self._store, self._job) if gone else set()
        deleted = self._delete(each for each in gone if each not in waits)
        if deleted:
            self._reporter.inventory([each for each in committed if each not in deleted], pins)

    def _delete(self, checkpoints: Iterable[str]) -> set[str]:
        """Delete one after the other, except what a restore or a pin asked for meanwhile; the names deleted."""
        deleted = set()
        for checkpoint in checkpoints:
            with self._changed:
                if self._closing:
                    break
                is_wanted = checkpoint in self._wanted.values()
            if not is_wanted and checkpoint not in self.pinned.checkpoints:
                self._store.delete(self._job, checkpoint, self._head().attempt)
                deleted.add(checkpoint)
        return deleted

    def _protected(self) -> set[str]:
        """Where the lineages that training descends from began, the ways back, what is to be restored."""
        at = self._head()
        with self._changed:
            asked_for, wanted = list(self._asked_for), list(self._wanted.values())
        kept = protected(self._store.records(self._job, Lineage), at.lineage, asked_for)
        return kept | {each for each in (at.head, *wanted) if each is not None}

    def _least(self, committed: Iterable[str], damaged: Collection[str]) -> set[str]:
        """What rules from a server leave, whatever they say; the script's own may keep fewer."""
        if self.rules == self._own_rules:
            return set()
        sound = (each for each in committed if each not in damaged)
        return set(sorted(sound, key=lambda each: parse_checkpoint_id(each)[::-1])[-LEAST_KEPT:])

    def _warn(self, reason: str) -> None:
        if reason != self._last_reason:
            self._last_reason = reason
            self._reporter.notice("warning", "checkpoint", f"{reason}; training goes on")
