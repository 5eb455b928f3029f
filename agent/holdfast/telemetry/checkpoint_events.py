"""Telemetry of checkpoints: an event for each step of a run, and a warning once a reason."""

from __future__ import annotations

import threading
import time

from holdfast.protocol import messages
from holdfast.protocol.messages import PLAUSIBLE_STEP, CheckpointKind, CheckpointState, checkpoint_id
from holdfast.snapshot.checkpoint_run import SETTLED, CheckpointRun, RunState
from holdfast.store import Store
from holdfast.telemetry.reporter import Reporter, text

MOST_FREE_BYTES = 2**53
"""What a JSON number holds exactly; more room than that interests no reader."""
REPORTED: dict[RunState, CheckpointState] = {
    RunState.DURABLE: "durable",
    RunState.TORN: "torn",
    RunState.FAILED: "failed",
    RunState.ABANDONED: "failed",
}


class CheckpointEvents:
    """Listens to runs. For any thread."""

    def __init__(self, reporter: Reporter, store: Store) -> None:
        self._reporter, self._store = reporter, store
        self._lock = threading.Lock()
        """Guards `_last_reason`; held for no I/O."""
        self._last_reason: str | None = None
        self._disbelieved: set[str] = set()
        """Kinds of numbers that a server sent, and that were ignored and reported."""

    def run_changed(self, run: CheckpointRun, state: RunState) -> None:
        if state is RunState.COPYING and not run.request.survived:
            self._report(run, "snapshot")
        elif state is RunState.WRITING:
            self._report(run, "persisting", persist_started_at=run.write_started_at)
        elif state in SETTLED:
            self._report_settled(run, state)

    def fail(self, reason: str, kind: CheckpointKind) -> None:
        """Report a checkpoint that never became one: as an event each time, in the log once a reason."""
        self.warn(reason)
        standing = self._reporter.standing
        self._reporter.event(
            messages.Checkpoint(
                at=time.time(),
                id=checkpoint_id(standing.iteration, standing.lineage),
                iteration=standing.iteration,
                lineage=standing.lineage,
                kind=kind,
                state="failed",
                reason=text(reason),
            )
        )

    def warn(self, reason: str, consequence: str = "training goes on") -> None:
        with self._lock:
            is_new, self._last_reason = reason != self._last_reason, reason
        if is_new:
            self._reporter.notice("warning", "checkpoint", f"{reason}; {consequence}")

    def believed(self, what: str, told: int, known: int) -> int:
        """The highest number that a server has sent, or 0 where the store makes it implausible.

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
                f"the server has seen {said}, and the newest in store {self._store.url} is {known:,}: the "
                "server's number is ignored. Unless the store was emptied, a wrong number was reported",
            )
        return 0

    def _report_settled(self, run: CheckpointRun, state: RunState) -> None:
        result, is_durable = run.result, state is RunState.DURABLE
        if is_durable:
            with self._lock:
                was_warned, self._last_reason = self._last_reason is not None, None
            if was_warned:
                self._reporter.notice("info", "checkpoint", f"checkpoints are durable again, from {run.id}")
            self._reporter.durable(run.id, result.seconds)
        elif result.reason and state is not RunState.ABANDONED:
            self.warn(result.reason)
        self._report(
            run,
            REPORTED[state],
            persist_started_at=run.write_started_at or None,
            persist_seconds=result.seconds,
            durable_iteration=self._reporter.standing.iteration if is_durable else None,
            reason=text(result.reason) if result.reason else None,
            store_free_bytes=self._free_bytes() if is_durable else None,
            ranks=list(result.ranks),
        )

    def _report(self, run: CheckpointRun, state: CheckpointState, **more: object) -> None:
        request, copied = run.request, run.copy.seconds > 0
        self._reporter.event(
            messages.Checkpoint(
                at=time.time(),
                id=run.id,
                iteration=request.iteration,
                lineage=request.lineage,
                kind=request.kind,
                state=state,
                payload_bytes=run.result.stored_bytes or run.size_bytes,
                snapshot_started_at=request.started_at,
                snapshot_seconds=run.copy.seconds if copied else None,
                stall_seconds=run.stall_seconds if copied else None,
                **more,  # type: ignore[arg-type]
            )
        )

    def _free_bytes(self) -> int | None:
        """None where the store cannot say."""
        try:
            free = self._store.free_bytes()
        except OSError:
            return None
        return None if free is None else min(free, MOST_FREE_BYTES)


def not_writable(store: Store, error: Exception) -> str:
    reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return f"store {store.url} is not writable: {reason}"
