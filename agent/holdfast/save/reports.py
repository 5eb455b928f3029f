"""Reports of checkpoints: events, one warning for each new reason, and the outcomes for the script."""

from __future__ import annotations

import collections
import errno
import logging
import threading
import time

from holdfast.errors import printable
from holdfast.format.parity_file import ParityCode
from holdfast.protocol import wire
from holdfast.protocol.ids import checkpoint_id
from holdfast.protocol.wire import PLAUSIBLE_STEP, CheckpointKind, CheckpointState
from holdfast.retention import Retention
from holdfast.save.layout import estimate_checkpoint_bytes
from holdfast.save.reuse import is_worth_sharing
from holdfast.save.run import SETTLED, CheckpointOutcome, Run, RunState
from holdfast.state.registry import CapturedState
from holdfast.store import LocalStore, Store
from holdfast.system import io_pool
from holdfast.telemetry.reporter import Reporter
from holdfast.units import duration, format_bytes

logger = logging.getLogger("holdfast")

DAY = 86400.0
MAX_FREE_BYTES = 2**53
"""Largest integer that a JSON number holds exactly."""
OUTCOMES_KEPT = 1000
"""Number of outcomes that are kept for a script that does not ask for them."""
REPORTED_METRICS = ("loss",)
REPORTED: dict[RunState, CheckpointState] = {
    RunState.DURABLE: "durable",
    RunState.TORN: "torn",
    RunState.FAILED: "failed",
    RunState.ABANDONED: "failed",
}


class CheckpointEvents:
    """Listens to runs. For any thread."""

    def __init__(
        self, reporter: Reporter, store: Store, parity: ParityCode | None = None, compress: bool = False
    ) -> None:
        self._reporter, self._store = reporter, store
        self._parity, self._compress = parity, compress
        self._lock = threading.Lock()
        """Guards `_outcomes` and `_last_reason`; never held during I/O."""
        self._outcomes: collections.deque[CheckpointOutcome] = collections.deque(maxlen=OUTCOMES_KEPT)
        self._last_reason: str | None = None
        self._space_estimated = False
        self._keeps_every: int | None = None
        """Iterations of which retention keeps a checkpoint forever; `None` where its rules set a limit."""
        self._last_durable: tuple[int, float] | None = None
        """Iteration and time of the newest durable checkpoint, until the growth of the store was reported."""
        self._growth_reported = False
        self._link_failure_reported = False
        self._implausible: set[str] = set()
        """Kinds of server numbers that were reported as implausible."""

    def run_changed(self, run: Run, state: RunState) -> None:
        if state is RunState.COPYING and not run.survived:
            self._report(run, "snapshot")
        elif state is RunState.WRITING:
            self._report(run, "persisting", persist_started_at=run.write_started_at)
        elif state in SETTLED:
            with self._lock:
                self._outcomes.append(run.outcome)
            self._report_settled(run, state)

    def outcomes(self) -> list[CheckpointOutcome]:
        """Return the outcomes of the checkpoints that settled since the last call, oldest first."""
        with self._lock:
            found = list(self._outcomes)
            self._outcomes.clear()
        return found

    def fail(self, reason: str, kind: CheckpointKind = "scheduled") -> None:
        """Report a checkpoint that could not begin: an event each time, a log line for each new reason."""
        self.warn(reason)
        iteration, lineage = self._reporter.position.iteration, self._reporter.position.lineage
        checkpoint = checkpoint_id(iteration, lineage)
        with self._lock:
            self._outcomes.append(CheckpointOutcome(checkpoint, iteration, RunState.FAILED, reason))
        self._reporter.event(
            wire.Checkpoint(
                at=time.time(),
                id=checkpoint,
                iteration=iteration,
                lineage=lineage,
                kind=kind,
                state="failed",
                reason=printable(reason),
            )
        )

    def warn(self, reason: str, consequence: str = "training continues") -> None:
        with self._lock:
            is_new, self._last_reason = reason != self._last_reason, reason
        if is_new:
            self._reporter.notice("warning", "checkpoint", f"{reason}; {consequence}")

    def estimate_space(self, job: str, captured: CapturedState, world_size: int, rules: Retention) -> None:
        """Report once, on a background thread, how much space the checkpoints will take."""
        self._keeps_every = rules.every if _kept_bytes(1, 0, rules) is None else None
        if self._space_estimated:
            return
        self._space_estimated = True

        def report() -> None:
            try:
                size_bytes, frozen_bytes = estimate_checkpoint_bytes(captured, world_size)
                if not isinstance(self._store, LocalStore) or not is_worth_sharing(frozen_bytes, size_bytes):
                    frozen_bytes = 0
                if self._parity is not None:
                    from holdfast.format.parity_stripes import parity_bytes  # few jobs have parity

                    size_bytes += parity_bytes(self._parity, size_bytes)
                    frozen_bytes += parity_bytes(self._parity, frozen_bytes)
                self.report_space(job, size_bytes, rules, shared_bytes=frozen_bytes)
            except Exception as error:  # an estimate must not fail anything
                logger.debug("%s: the space for checkpoints is not estimated: %s", job, error)

        io_pool.submit(report)

    def report_space(self, job: str, checkpoint_bytes: int, rules: Retention, *, shared_bytes: int = 0) -> None:
        """Log how much space the checkpoints will take, and warn if the store has less. For any thread.

        Those in the store already count as large as the next one.

        Args:
            checkpoint_bytes: size of one, before compression.
            shared_bytes: how much of it all of them share.
        """
        free_bytes, url, most = self._free_bytes(), self._store.url, rules.most_kept
        kept_bytes = _kept_bytes(checkpoint_bytes, shared_bytes, rules)
        one, free = format_bytes(checkpoint_bytes), "an unknown amount"
        if free_bytes is not None:
            free = format_bytes(free_bytes)
        keeps = "sets no limit" if kept_bytes is None else f"keeps up to {format_bytes(kept_bytes)}"
        count = f" ({most} checkpoints)" if most is not None and most > 1 else ""
        shared = f", {format_bytes(shared_bytes)} of which all of them share" if shared_bytes else ""
        before = " before compression" if self._compress else ""
        message = "%s: a checkpoint takes about %s%s%s; retention '%s' %s%s; %s has %s free"
        logger.info(message, job, one, before, shared, rules, keeps, count, url, free)
        if free_bytes is None:
            return
        least_bytes = kept_bytes or checkpoint_bytes
        present_bytes = min(
            least_bytes, _bytes_of(len(self._store.checkpoints(job)), checkpoint_bytes, shared_bytes)
        )
        peak_bytes = least_bytes + checkpoint_bytes - shared_bytes
        if peak_bytes - present_bytes > free_bytes:
            one += before + shared
            kept = f"{most} checkpoints of {one}" if count else f"checkpoints of {one}"
            present = f", {format_bytes(present_bytes)} of which is in use," if present_bytes else ""
            self._reporter.notice(
                "warning",
                "space",
                f"{kept} and one being written need about {format_bytes(peak_bytes)}{present} and {url} has "
                f"{free} free: lower keep, change retention, or move the store",
            )

    def plausible_number(self, what: str, reported: int, known: int) -> int:
        """Return the highest number that a server has reported, or 0 where the store makes it implausible.

        A number recorded in the store is permanent: one wrong report must not exhaust the range.
        """
        if reported <= known + PLAUSIBLE_STEP:
            return reported
        if what not in self._implausible:
            self._implausible.add(what)
            number = f"{what} {reported:,}" if reported < 2**63 else f"an impossible {what} number"
            self._reporter.notice(
                "warning",
                "numbers",
                f"the server reports {number}, but the newest in store {self._store.url} is {known:,}: the "
                "server's number is ignored. If the store was not emptied, an agent reported a wrong number",
            )
        return 0

    def _report_settled(self, run: Run, state: RunState) -> None:
        result, is_durable = run.result, state is RunState.DURABLE
        free_bytes = self._free_bytes() if is_durable else None
        if is_durable:
            self._report_growth(run, free_bytes)
            with self._lock:
                was_warned, self._last_reason = self._last_reason is not None, None
            if was_warned:
                self._reporter.notice("info", "checkpoint", f"checkpoints are durable again, from {run.id}")
            self._reporter.durable(run.id, result.seconds)
            if run.draft.not_linked and not self._link_failure_reported:
                self._link_failure_reported = True
                self._reporter.notice(
                    "info", "reuse", f"unchanged tensors were written again: {run.draft.not_linked}"
                )
        elif result.reason and state is RunState.FAILED and not result.fenced:  # the session logs the others
            self.warn(result.reason)
        self._report(
            run,
            REPORTED[state],
            persist_started_at=run.write_started_at or None,
            persist_seconds=result.seconds,
            durable_iteration=self._reporter.position.iteration if is_durable else None,
            reason=printable(result.reason) if result.reason else None,
            store_free_bytes=free_bytes,
            ranks=list(result.ranks),
            changed=list(result.changed),
        )

    def _report_growth(self, run: Run, free_bytes: int | None) -> None:
        """Warn once if the checkpoints that retention keeps forever would fill the store within a day."""
        iteration, started_at = run.draft.iteration, run.draft.created_at
        before, self._last_durable = self._last_durable, (iteration, started_at)
        every, kept_bytes = self._keeps_every, run.result.written_bytes
        if self._growth_reported or before is None or every is None or not free_bytes or not kept_bytes:
            return
        iterations, seconds = iteration - before[0], started_at - before[1]
        if iterations <= 0 or seconds <= 0:
            return  # a restore went back
        kept_seconds = max(every, iterations) * seconds / iterations
        full_seconds = free_bytes / kept_bytes * kept_seconds
        if full_seconds > DAY:
            return
        self._growth_reported = True
        self._reporter.notice(
            "warning",
            "space",
            f"{self._store.url} is full in about {duration(full_seconds)}: retention keeps a checkpoint of "
            f"{format_bytes(kept_bytes)} for good every {duration(kept_seconds)}, and {format_bytes(free_bytes)} "
            f"are free: raise 'every {every}', or add a limit such as 'size 1TB'",
        )

    def _report(self, run: Run, state: CheckpointState, **more: object) -> None:
        draft, copied = run.draft, run.copy.seconds > 0
        self._reporter.event(
            wire.Checkpoint(
                at=time.time(),
                id=run.id,
                iteration=draft.iteration,
                lineage=draft.lineage,
                kind=draft.kind,
                state=state,
                payload_bytes=run.result.stored_bytes or run.size_bytes,
                reused_bytes=run.result.reused_bytes,
                raw_bytes=run.result.raw_bytes,
                snapshot_started_at=draft.created_at,
                snapshot_seconds=run.copy.seconds if copied else None,
                stall_seconds=run.stall_seconds if copied else None,
                metrics={name: draft.metrics[name].value for name in REPORTED_METRICS if name in draft.metrics},
                **more,  # type: ignore[arg-type]
            )
        )

    def _free_bytes(self) -> int | None:
        """Return the free space of the store; `None` if the store does not report it."""
        try:
            free = self._store.free_bytes()
        except OSError:
            return None
        return None if free is None else min(free, MAX_FREE_BYTES)


def _kept_bytes(checkpoint_bytes: int, shared_bytes: int, rules: Retention) -> int | None:
    """Return the most bytes that the rules keep; `None` if they set no limit."""
    limits = [] if rules.size_bytes is None else [round(rules.size_bytes)]
    if rules.most_kept is not None:
        limits.append(_bytes_of(rules.most_kept, checkpoint_bytes, shared_bytes))
    return min(limits, default=None)


def _bytes_of(count: int, checkpoint_bytes: int, shared_bytes: int) -> int:
    return min(count, 1) * shared_bytes + count * (checkpoint_bytes - shared_bytes)


def not_writable(store: Store, error: Exception) -> str:
    reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    where = getattr(error, "filename", None)
    reason = f"{where} {reason}" if where and getattr(error, "errno", None) == errno.ELOOP else reason
    return f"store {store.url} is not writable: {reason}"
