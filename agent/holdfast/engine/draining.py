"""Copies checkpoints to the store behind the directory, while training goes on.

A process of its own copies the newest checkpoint when a copy is due; see `holdfast.checkpoint.draining`. A copy
that failed is tried again, with the newest checkpoint then, after the next one that becomes durable.
"""

from __future__ import annotations

import concurrent.futures
import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from holdfast.checkpoint.draining import DrainResult
from holdfast.checkpoint.restore import RetentionFacts
from holdfast.checkpoint.retention_queue import Protector, RetentionQueue
from holdfast.checkpoint.stored_manifest import has_other_format
from holdfast.errors import HoldfastError
from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.retention import Retention, checkpoints_to_delete
from holdfast.save.run import Run, RunState
from holdfast.store import Store
from holdfast.store.tiers import TieredStore
from holdfast.system import io_pool
from holdfast.telemetry.reporter import Reporter
from holdfast.units import FixedInterval, format_bytes

logger = logging.getLogger("holdfast")

BYTES_PER_SECOND = 200e6
"""Rate of reading and sending that leaves the disk and the network to training."""
RETRY_SECONDS = 30.0
"""Shortest time between two tries, so that a store that does not answer is not asked after each checkpoint."""


class DrainQueue:
    """Listens to runs on rank 0. Any thread calls `run_changed`, the training thread `close`.

    Args:
        every: a copy is due after this many checkpoints, or this time.
        rules: which copies stay behind.
    """

    def __init__(
        self,
        store: Store,
        job: str,
        retention: RetentionQueue,
        reporter: Reporter,
        every: FixedInterval,
        rules: Retention,
    ) -> None:
        assert isinstance(store, TieredStore)
        self._store, self._job, self._retention, self._reporter = store, job, retention, reporter
        self._every, self._rules = every, rules
        self._facts = RetentionFacts(store.far, job)
        self._lock = threading.Lock()
        self._newest: str | None = None
        self._copied: str | None = None
        self._waiting = 0
        """Checkpoints since the last copy began."""
        self._began_at = -math.inf
        self._process: subprocess.Popen[bytes] | None = None
        self._running: Future[None] | None = None
        self._problem: str | None = None
        self._is_running = self._closed = self._ended = False

    def run_changed(self, run: Run, state: RunState) -> None:
        if state is RunState.DURABLE:
            with self._lock:
                self._newest = run.id
                self._waiting += 1
            self._begin(self._is_due)

    def close(self, timeout_seconds: float, *, finished: bool) -> None:
        """Copy the newest checkpoint if the loop finished, for at most this long; otherwise abandon the copy."""
        deadline = time.monotonic() + timeout_seconds if finished else 0.0
        self._wait(deadline)
        if finished and self._begin(self._is_last_missing):
            logger.info("%s: copying the last checkpoint to %s", self._job, self._store.far.url)
        self._wait(deadline)
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()
            left = self._newest if self._newest != self._copied else None
        if left is not None:
            logger.warning(
                "%s: the newest checkpoint, %s, is only in %s: the next start copies it to %s",
                *(self._job, left, self._store.near.url, self._store.far.url),
            )

    def _wait(self, deadline: float) -> None:
        if self._running is not None:
            concurrent.futures.wait([self._running], max(0.0, deadline - time.monotonic()))

    def _is_last_missing(self) -> bool:
        return not self._ended and self._newest != self._copied

    def _begin(self, is_wanted: Callable[[], bool]) -> bool:
        """Start a copy if it is wanted, unless one runs, which looks again when it ends."""
        with self._lock:
            starts = is_wanted() and not self._is_running
            self._is_running |= starts
        if starts:  # not under the lock: runs on this thread where none can be started
            self._running = io_pool.submit(self._run)
        return starts

    def _is_due(self) -> bool:
        if self._closed or self._ended or self._newest in (None, self._copied):
            return False
        seconds = time.monotonic() - self._began_at
        if self._problem is not None:
            return seconds >= RETRY_SECONDS
        if isinstance(self._every, int):
            return self._waiting >= self._every
        return seconds >= self._every.total_seconds()

    def _run(self) -> None:
        """Copy the newest checkpoint, and again if another copy became due meanwhile."""
        is_due = True
        while is_due:
            with self._lock:
                checkpoint, self._began_at, self._waiting = self._newest, time.monotonic(), 0
            assert checkpoint is not None
            self._retention.protect(Protector.DRAIN, checkpoint)
            try:
                self._copy_and_retire(checkpoint)
            except Exception:  # a defect must not end the copies of later checkpoints
                logger.exception("%s: copying %s to %s failed", self._job, checkpoint, self._store.far.url)
            self._retention.protect(Protector.DRAIN, None)
            with self._lock:
                is_due = self._is_due()
                self._is_running = is_due

    def _copy_and_retire(self, checkpoint: str) -> None:
        result = self._copy(checkpoint)
        if result is None:
            return
        if result.problem is not None:
            self._report_failure(checkpoint, result)
            return
        self._report_copied(checkpoint, result)
        self._retire(checkpoint)

    def _copy(self, checkpoint: str) -> DrainResult | None:
        """Run the process that copies; None where it was abandoned."""
        words = [self._store.url, self._job, checkpoint, str(BYTES_PER_SECOND)]
        with self._lock:
            if self._closed:
                return None
            self._process = subprocess.Popen(  # noqa: S603  this interpreter, and no text from users
                [sys.executable, "-P", "-m", "holdfast.checkpoint.draining", *words],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the trainer only
            )
        output, errors = self._process.communicate()
        with self._lock:
            status, self._process = self._process.returncode, None
            if self._closed:
                return None
        if status:
            last = errors.decode(errors="replace").strip().splitlines()[-1:]
            return DrainResult(
                problem=f"the process ended with status {status}" + "".join(f": {each}" for each in last)
            )
        return msgspec.json.decode(output, type=DrainResult)

    def _report_failure(self, checkpoint: str, result: DrainResult) -> None:
        with self._lock:
            is_known, self._problem, self._ended = result.problem == self._problem, result.problem, result.is_final
        if is_known:
            return
        follows = "no more are copied" if result.is_final else "it is tried again with the next ones"
        self._reporter.notice(
            "error" if result.is_final else "warning",
            "drain",
            f"{checkpoint} was not copied to {self._store.far.url}: {result.problem}. Checkpoints stay in "
            f"{self._store.near.url}; {follows}",
        )

    def _report_copied(self, checkpoint: str, result: DrainResult) -> None:
        self._store.note_copied(self._job, checkpoint)
        with self._lock:
            had_failed, self._problem = self._problem is not None, None
            self._copied = checkpoint
        logger.info(
            "%s: %s is in %s as well: %s sent in %.1f s",
            *(self._job, checkpoint, self._store.far.url, format_bytes(result.sent_bytes), result.seconds),
        )
        if had_failed:
            self._reporter.notice("info", "drain", f"checkpoints are copied to {self._store.far.url} again")

    def _retire(self, newest: str) -> None:
        """Delete the copies that the rules do not keep, now that a newer one is there."""
        store, job = self._store, self._job
        try:
            there = sorted(store.copied(job) | {newest}, key=parse_checkpoint_id)
            needs_manifests = self._rules.size_bytes is not None or bool(self._rules.best)
            sizes, metrics = self._facts.read(there if needs_manifests else ())
            gone = checkpoints_to_delete(
                there, self._rules,
                protected=self._retention.protected() | {newest}, pinned=self._retention.pinned.checkpoints,
                damaged=(), sizes=sizes, metrics=metrics,
            )  # fmt: skip
            gone = {each: why for each, why in gone.items() if not has_other_format(store.far, job, each)}
            for checkpoint in gone:
                store.far.delete(job, checkpoint, store.near.latest_attempt(job))
                store.note_copied(job, checkpoint, copied=False)
            left, pins = store.checkpoints(job), self._retention.pinned.checkpoints
            deleted = {each: reason for each, reason in gone.items() if each not in left}
            self._reporter.inventory(left, pins, deleted, copies=store.copies(job))
        except (OSError, HoldfastError) as error:  # the next copy tries again
            logger.warning("%s: old copies in %s could not be removed: %s", job, store.far.url, error)
