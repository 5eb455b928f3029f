"""An attempt's position in the history of its job: number, lineage, newest durable checkpoint, known damage."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future

import msgspec

from holdfast.checkpoint.retention_queue import TrainingHead
from holdfast.checkpoint.stored_manifest import has_other_format, read_root
from holdfast.distributed.ranks import Ranks
from holdfast.format.manifest_files import ManifestFile
from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.protocol.wire import LeftOutData
from holdfast.save.reports import CheckpointEvents, not_writable
from holdfast.store import Lineage, RecordedValue, Store
from holdfast.store.records import FOLDERS, HaltNote
from holdfast.system import io_pool
from holdfast.telemetry.reporter import Reporter

RETURN_SECONDS = 0.05
"""Longest wait of training for the answer whether an unavailable store is back."""


class History:
    """The attempt of this process. Its methods are for the training thread, unless they say otherwise.

    `_lock` guards the head and the damaged checkpoints, which other threads change. It is never held during I/O,
    and no other lock is taken under it.
    """

    def __init__(
        self, store: Store, job: str, uid: str, *, ranks: Ranks, reporter: Reporter, reports: CheckpointEvents
    ) -> None:
        self.store, self.job, self.uid = store, job, uid
        self._ranks, self._reporter, self._reports = ranks, reporter, reports
        self.position = reporter.position
        self.attempt = 0
        """0 while the store could not be written to."""
        self.lineage = Lineage(number=1, iteration=0, parent=None, order=None, attempt=0, created_at=0.0)
        self._latest_lineage = 0
        """The highest lineage number that the server reports."""
        self._minimum_attempt = 1
        """The lowest number that this attempt may have."""
        self._open_order: str | None = None
        """The order that was open when the attempt began."""
        self._unrecorded_order: str | None = None
        """An order that was carried out while the store could not be written to."""
        self._late_attempt: Future[tuple[int, Lineage] | None] | None = None
        """Attempt and lineage, acquired in the background once an unavailable store is back."""
        self._lock = threading.Lock()
        self._head: str | None = None
        self._damaged: set[str] = set()
        self._number = 0
        """Number of checkpoints that this attempt has begun, the same on all ranks."""
        self._newest_durable = 0
        """Number of the checkpoint at the head."""
        self._links_from = 0
        """Files of checkpoints before this number are not linked: they may share a damaged file."""

    # The attempt

    def acquire_attempt(self, at_least: int, *, latest_lineage: int = 0, order: str | None = None) -> None:
        """Fence all earlier attempts, and record the open order; rank 0 does it for all ranks.

        If the store cannot be written to, no checkpoints are taken for now. UnknownFormat, without any change, if
        another version of Holdfast wrote the newest checkpoint.
        """
        self._minimum_attempt, self._latest_lineage, self._open_order = at_least, latest_lineage, order
        try:
            self.attempt = self._ranks.decide(self._acquire_number, int)
        except OSError as error:
            # training may still start, if the store can be read or is new
            self._reports.warn(not_writable(self.store, error), "checkpoints start when it is")

    @property
    def fenced(self) -> bool:
        """A newer attempt of the job has begun; `False` where the store cannot be read."""
        try:
            return 0 < self.attempt < self.store.latest_attempt(self.job)
        except OSError:
            return False

    @property
    def has_halts(self) -> bool:
        """Whether training of the job was ever paused or ended on request; `False` where it cannot be read."""
        try:
            return any(self.store.record_files(self.job, FOLDERS[HaltNote]))
        except OSError:
            return False

    @property
    def has_values(self) -> bool:
        """Whether changes of values are recorded."""
        try:
            return any(self.store.record_files(self.job, FOLDERS[RecordedValue]))
        except OSError:  # reading them says what is wrong
            return True

    def acquire_late(self) -> bool:
        """Begin an attempt and a lineage if the store is available again; it may hold another history.

        The pool makes the call, since an unavailable store may take half a minute to answer; a directory answers
        at once.
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
            attempt = self._acquire_number()
            head = self.head
            start = parse_checkpoint_id(head)[0] if head is not None else self.lineage.iteration
            before = self.lineage
            lineage = self._new_lineage(
                attempt, start, head, self._unrecorded_order, inexact=before.inexact, left_out=before.left_out
            )
            self.store.append(self.job, lineage)
        except Exception as error:  # the next checkpoint that is due tries again
            self._reports.fail(not_writable(self.store, error))
            return None
        return attempt, lineage

    def _acquire_number(self) -> int:
        self._require_known_format()
        at_least = self._minimum_attempt
        if at_least > 1:
            newest = self.store.latest_attempt(self.job)
            at_least = self._reports.plausible_number("attempt", at_least - 1, newest) + 1
        return self.store.acquire_attempt(self.job, self.uid, at_least, order=self._open_order).number

    def _require_known_format(self) -> None:
        """Raise UnknownFormat when another version of Holdfast wrote the newest checkpoint, before any change."""
        with contextlib.suppress(OSError):  # a store that does not answer now may still take an attempt
            names = self.store.checkpoints(self.job)
            newest = max(names, key=lambda each: parse_checkpoint_id(each)[::-1], default=None)
            if newest is not None and has_other_format(self.store, self.job, newest):
                read_root(ManifestFile, self.store, self.job, newest)

    # The lineage

    def begin_lineage(
        self,
        iteration: int,
        parent: str | None,
        order: str | None = None,
        *,
        left: str | None = None,
        inexact: str | None = None,
        left_out: tuple[LeftOutData, ...] = (),
        trouble: int | None = None,
    ) -> None:
        """Record a new lineage durably, then switch to it. OSError or Fenced when the store refuses."""

        def noted() -> Lineage:
            lineage = self._new_lineage(
                self.attempt, iteration, parent, order, left=left, inexact=inexact, left_out=left_out,
                trouble=trouble,
            )  # fmt: skip
            if self.attempt:
                self.store.append(self.job, lineage)
            self._unrecorded_order = None if self.attempt else order
            return lineage

        self.continue_lineage(self._ranks.decide(noted, Lineage), parent)

    def continue_lineage(self, lineage: Lineage, head: str | None) -> None:
        """Continue a lineage from the checkpoint `head`."""
        with self._lock:
            self.lineage, self._head = lineage, head
        self.position.lineage = lineage.number

    def follow_lineage(self, number: int) -> None:
        """Switch to the lineage that rank 0 began when the store came back."""
        if number > self.lineage.number:  # a decision may be from before this rank began a lineage
            self.continue_lineage(msgspec.structs.replace(self.lineage, number=number), self.head)

    def update_lineage(self) -> None:
        """Switch to rank 0's lineage before an unannounced checkpoint: the store may be back."""

        def current() -> int:
            if not self.attempt:
                self.acquire_late()
            return self.lineage.number

        self.follow_lineage(self._ranks.decide(current, int))

    def _new_lineage(
        self,
        attempt: int,
        iteration: int,
        parent: str | None,
        order: str | None = None,
        *,
        left: str | None = None,
        inexact: str | None = None,
        left_out: tuple[LeftOutData, ...] = (),
        trouble: int | None = None,
    ) -> Lineage:
        known = [lineage.number for lineage in self.store.records(self.job, Lineage)]
        known += [parse_checkpoint_id(checkpoint)[1] for checkpoint in self.store.checkpoints(self.job)]
        newest = max(known, default=0)
        return Lineage(
            number=max(newest, self._reports.plausible_number("lineage", self._latest_lineage, newest)) + 1,
            iteration=iteration,
            parent=parent,
            order=order,
            attempt=attempt,
            created_at=time.time(),
            left=left,
            inexact=inexact,
            left_out=left_out,
            trouble=trouble,
        )

    # The checkpoints

    def next_number(self) -> int:
        """Count a checkpoint that begins."""
        self._number += 1
        return self._number

    @property
    def head(self) -> str | None:
        """The newest durable checkpoint on this lineage. For any thread."""
        with self._lock:
            return self._head

    def advance(self, number: int, checkpoint: str) -> None:
        """Move the head to a durable checkpoint, unless a newer one settled first. For any thread."""
        with self._lock:
            if number > self._newest_durable:
                self._newest_durable, self._head = number, checkpoint

    def mark_damaged(self, checkpoint: str, *, damaged: bool = True) -> None:
        """Record that a checkpoint is damaged, so that a sound one may replace it. For any thread."""
        with self._lock:
            (self._damaged.add if damaged else self._damaged.discard)(checkpoint)
            self._links_from = self._number + 1 if damaged else self._links_from

    def is_damaged(self, checkpoint: str) -> bool:
        return checkpoint in self._damaged

    @property
    def may_link(self) -> bool:
        """Files of the head may be linked: it was written in full since damage was found."""
        return self._newest_durable >= self._links_from

    def training_head(self) -> TrainingHead:
        """Return attempt, lineage, head and damage for retention. For any thread."""
        with self._lock:
            return TrainingHead(
                attempt=self.attempt, lineage=self.lineage.number, head=self._head, damaged=set(self._damaged)
            )
