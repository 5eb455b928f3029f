"""Phase 2: writes copied runs, several at a time, and moves each to its end."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import threading
import time

from holdfast.distributed.error_transport import told
from holdfast.errors import Fenced, HoldfastError
from holdfast.persist.helper_process import Lost, ProcessBackend, refusal
from holdfast.persist.task import Task, Written
from holdfast.persist.two_phase_commit import NotPrepared, RankChannel, commit, decline
from holdfast.persist.writer import RateLimiter, write_checkpoint
from holdfast.protocol.messages import RankSpan
from holdfast.snapshot.checkpoint_run import CheckpointRun, RunState, WriteResult
from holdfast.store import Store
from holdfast.system.io_pool import lower_cpu_priority

logger = logging.getLogger("holdfast")


class Persister:
    """Writes up to `slots` runs at the same time, begun in the order submitted, on threads of lower priority.

    Args:
        backend: "thread" writes from this process; "process" from a helper that also survives a killed trainer.
        channel: leads to the other ranks of the job.
    """

    def __init__(
        self, store: Store, *, slots: int = 1, backend: str = "thread", channel: RankChannel | None = None
    ) -> None:
        self._store, self._slots, self._channel = store, slots, channel
        self.refusal = refusal(store) if backend == "process" else None
        """Why no helper process can write, where one was asked for; a thread writes then."""
        self._helpers = ProcessBackend(store) if backend == "process" and self.refusal is None else None
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        """Guards what follows; held for no I/O."""
        self._waiting: collections.deque[CheckpointRun | tuple[int, str]] = collections.deque()
        """Runs to write, and (number, reason) of those to decline."""
        self._open: list[CheckpointRun] = []
        """Those that threads are bringing to their end."""
        self._closing = False
        self._hurry = threading.Event()

    @property
    def shares_memory(self) -> bool:
        """Snapshots must lie where another process can map them."""
        return self._helpers is not None

    def submit(self, run: CheckpointRun) -> None:
        """Write a run once it is copied; RuntimeError where no thread can be started."""
        with self._changed:
            if len(self._threads) < min(len(self._open) + len(self._waiting) + 1, self._slots):
                self._start_thread()
            self._waiting.append(run)  # all in one: Ctrl-C may come before or after it
            self._changed.notify()

    def has(self, run: CheckpointRun) -> bool:
        """Whether it was submitted, and so is brought to its end here; also where Ctrl-C cut `submit` short."""
        with self._changed:
            self._changed.notify()
            return run in self._waiting or run in self._open

    def decline(self, number: int, reason: str) -> None:
        """Tell the other ranks that this one has nothing to write for the checkpoint of that number."""
        with self._changed:
            if not self._threads:
                self._start_thread()
            self._waiting.append((number, reason))
            self._changed.notify()

    def prepare(self) -> None:
        """Start a thread while that is possible: a script's only checkpoint may be the one at its exit."""
        with self._changed:
            if not self._threads:
                self._start_thread()

    def hurry(self) -> None:
        """Hold nothing back any more: somebody waits for the end."""
        self._hurry.set()
        if self._helpers is not None:
            self._helpers.hurry()

    def close(self, timeout_seconds: float | None = None) -> bool:
        """Finish what was submitted, at full speed; False when `timeout_seconds` was not enough.

        Helper processes finish what they have in hand even then.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self.hurry()
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if self._helpers is not None:
            self._helpers.close()
        return not any(thread.is_alive() for thread in self._threads)

    def _start_thread(self) -> None:
        name = f"holdfast-write-{len(self._threads)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # as many as there may be: those that there are do it all
            if not self._threads:
                raise
        else:
            self._threads.append(thread)

    def _work(self) -> None:
        lower_cpu_priority()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                item = self._waiting.popleft()
                if isinstance(item, CheckpointRun):
                    self._open.append(item)
            if isinstance(item, tuple):
                self._decline(*item)
            else:
                self._bring_to_end(item)
            del item  # it holds the objects' state

    def _bring_to_end(self, run: CheckpointRun) -> None:
        try:
            run.wait_copied()
            started = time.perf_counter()
            state, result = self._persist(run)
            run.end(state, dataclasses.replace(result, seconds=time.perf_counter() - started))
        except Exception:  # a defect of ours must not end the thread, or no further checkpoint would be written
            logger.exception("checkpoint %s has no end", run.id)
        finally:
            with self._changed:
                self._open.remove(run)

    def _persist(self, run: CheckpointRun) -> tuple[RunState, WriteResult]:
        backend: str | None = None
        spans: list[RankSpan] = []
        stored_bytes = 0
        problem = _problem(run)

        def write(task: Task) -> Written:
            nonlocal backend
            assert run.contents is not None
            arena, size_bytes = run.contents.arena, run.size_bytes
            if self._helpers is not None and arena.fd >= 0:
                backend = "process"
                return self._helpers.write(task, arena, size_bytes)
            backend = "thread"
            limiter = RateLimiter(task.origin.bytes_per_second, self._hurry.wait)
            return write_checkpoint(self._store, task, arena.bytes(size_bytes), pace=limiter)

        try:
            if problem is None:
                run.begin_write()
            elif self._channel is None:
                raise problem
            task = Task.of(run)
            if self._channel is None:
                write(task)
            else:
                number = run.request.number
                stored_bytes = commit(self._channel, number, self._store, task, problem, write, told=spans.extend)
        except NotPrepared as error:
            return RunState.TORN if error.torn else RunState.FAILED, WriteResult(reason=str(error))
        except Exception as error:  # the job trains on; the event says what broke
            if isinstance(error, Lost):  # nobody else clears away what it had half-done before the next attempt
                with contextlib.suppress(OSError):
                    self._store.forsake(run.request.origin.job, run.id, run.request.origin.attempt)
            elif not isinstance(error, (HoldfastError, OSError)):
                logger.error("persisting checkpoint %s failed", run.id, exc_info=error)
            reason = str(error) if isinstance(error, Lost) else told(error)
            return RunState.FAILED, WriteResult(reason=reason, backend=backend, fenced=isinstance(error, Fenced))
        return RunState.DURABLE, WriteResult(backend=backend, stored_bytes=stored_bytes, ranks=spans)

    def _decline(self, number: int, reason: str) -> None:
        assert self._channel is not None
        try:
            decline(self._channel, number, reason)
        except Exception as error:  # who talks to the other ranks next meets it again
            logger.debug("checkpoint %d was not declined: %s", number, error)


def _problem(run: CheckpointRun) -> NotPrepared | None:
    """Why it cannot become durable, if so."""
    if (problem := run.copy.problem) is not None:
        return NotPrepared(problem, torn=run.copy.is_torn)
    contents = run.contents
    if contents is None or contents.round_trip is None:
        return None
    try:
        contents.round_trip.require_same(contents.trees, contents.slots, contents.views, contents.shards)
    except Exception as error:  # whatever it is, a resume would meet it as well
        return NotPrepared(f"a checkpoint of this state could not be loaded: {told(error)}")
    return None
