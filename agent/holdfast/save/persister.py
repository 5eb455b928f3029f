"""Phase 2: writes copied runs, several at a time, and settles each."""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from holdfast.errors import Fenced, HoldfastError, describe_error, is_full
from holdfast.format.manifest import LARGE_BYTES, File, FileSummary, raw_bytes, reused_bytes, written_bytes
from holdfast.protocol.field_types import RankCheckpointTimes
from holdfast.save.draft import Draft
from holdfast.save.run import SETTLED, NotPrepared, Run, RunState, WriteResult
from holdfast.save.writer import write_checkpoint
from holdfast.store import Store
from holdfast.system.io_pool import lower_cpu_priority

if TYPE_CHECKING:
    import torch

    from holdfast.incremental.planner import IncrementalPlanner
    from holdfast.save.two_phase_commit import RankCommit
    from holdfast.store.base import Pace

logger = logging.getLogger("holdfast")
PaceOf = Callable[[Run, Draft], "Pace | None"]
"""Returns the rate limiter of a write."""
MakeRoom = Callable[[Exception], bool]
"""Makes room in a full store, given the error; returns whether it did."""


class Persister:
    """Writes up to `max_in_flight` runs at the same time, in the order submitted, on threads of lower priority.

    `ranks` commits with the other ranks of the job, if there are any. `make_room` is called when the store is
    full; if it returns True, the run is written again. `make_planner` creates the planner that decides which
    tensors are written in part; it is called once there is a large one.
    """

    def __init__(
        self,
        store: Store,
        *,
        max_in_flight: int = 1,
        ranks: RankCommit | None = None,
        make_room: MakeRoom = lambda error: False,
        make_planner: Callable[[], IncrementalPlanner | None] = lambda: None,
        pace_of: PaceOf = lambda run, draft: None,
    ) -> None:
        self._store, self._max_in_flight, self._ranks = store, max_in_flight, ranks
        self._make_room, self._make_planner, self._pace_of = make_room, make_planner, pace_of
        self._planner: IncrementalPlanner | None = None
        self._threads: list[threading.Thread] = []
        self._work: queue.SimpleQueue[Run | tuple[int, str] | None] = queue.SimpleQueue()
        """Runs to write, and (number, reason) of those to decline; `None` ends one thread."""

    def submit(self, run: Run) -> None:
        """Write a run once it is copied. RuntimeError when no thread can be started."""
        if len(self._threads) < self._max_in_flight:
            self._start_thread()
        self._work.put(run)

    def decline(self, number: int, reason: str) -> None:
        """Fail checkpoint `number` on all ranks, because this rank has nothing to write for it."""
        self.prepare()
        self._work.put((number, reason))

    def prepare(self, lineage: int = 0, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """Start a thread early: none can be started at interpreter exit, when a final checkpoint is written.

        With the live `tensors` of the state, the planner compares the first checkpoint with samples of them.
        """
        if not self._threads:
            self._start_thread()
        planner = self._planner_for(each.nbytes for each in (tensors or {}).values())
        if planner is not None and tensors is not None:
            planner.observe(lineage, tensors)

    def close(self, timeout_seconds: float | None = None) -> bool:
        """Finish all submitted runs; `False` on timeout."""
        for _ in self._threads:
            self._work.put(None)
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _start_thread(self) -> None:
        name = f"holdfast-write-{len(self._threads)}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads are allowed: the existing ones do all the work
            if not self._threads:
                raise
        else:
            self._threads.append(thread)

    def _run(self) -> None:
        lower_cpu_priority()
        while (item := self._work.get()) is not None:
            if isinstance(item, tuple):
                self._decline(*item)
            else:
                self._settle(item)
            del item  # it holds references to the state

    def _settle(self, run: Run) -> None:
        try:
            run.wait_copied()
            if run.state in SETTLED:  # Ctrl-C interrupted `submit`
                return
            started = time.perf_counter()
            state, result, written = self._persist(run)
            settling = [each for each in (self._planner, run.image) if each is not None]
            is_durable = state is RunState.DURABLE
            changed = [tensor for each in settling for tensor in each.settle(run.id, is_durable=is_durable)]
            result = dataclasses.replace(result, changed=changed)
            run.end(state, dataclasses.replace(result, seconds=time.perf_counter() - started), written)
        except Exception:  # keep the thread alive: a defect must not stop later checkpoints
            logger.exception("checkpoint %s did not settle", run.id)

    def _persist(self, run: Run) -> tuple[RunState, WriteResult, Draft]:
        draft, spans, problem = run.draft, list[RankCheckpointTimes](), _problem(run)

        def write(unwritten: Draft) -> Draft:
            nonlocal draft
            assert run.arena is not None
            payload = run.arena.bytes(unwritten.size_bytes)
            planner = self._planner_for(slot.end - slot.start for slot in unwritten.slots)
            pace = self._pace_of(run, unwritten)
            draft = write_checkpoint(self._store, unwritten, payload, run.marker, planner, run.image, pace=pace)
            return draft

        try:
            if problem is None:
                draft = run.begin_write()
            elif self._ranks is None:
                raise problem
            if self._ranks is None:
                files: Sequence[File | FileSummary] = self._write_alone(draft, write).files
            else:
                files = self._ranks.commit(run.number, draft, problem, write, on_durable=spans.extend)
        except NotPrepared as error:
            return RunState.TORN if error.torn else RunState.FAILED, WriteResult(reason=str(error)), draft
        except Exception as error:  # training continues; the event reports the error
            if not isinstance(error, (HoldfastError, OSError)):
                logger.error("persisting checkpoint %s failed", run.id, exc_info=error)
            failed = WriteResult(reason=describe_error(error), fenced=isinstance(error, Fenced))
            return RunState.FAILED, failed, draft
        result = WriteResult(
            stored_bytes=sum(file.size_bytes for file in files),
            reused_bytes=reused_bytes(files),
            written_bytes=written_bytes(files),
            raw_bytes=raw_bytes(files),
            ranks=spans,
        )
        return RunState.DURABLE, result, draft

    def _planner_for(self, sizes: Iterable[int]) -> IncrementalPlanner | None:
        """Return the planner, which is created once a tensor can be written in part, given the sizes of all."""
        if self._planner is None and any(size >= LARGE_BYTES for size in sizes):
            self._planner = self._make_planner()  # two writers may each make one: later checkpoints have the last
        return self._planner

    def _write_alone(self, draft: Draft, write: Callable[[Draft], Draft]) -> Draft:
        while True:
            try:
                return write(draft)
            except OSError as error:
                if not (is_full(error) and self._make_room(error)):
                    raise

    def _decline(self, number: int, reason: str) -> None:
        assert self._ranks is not None
        try:
            self._ranks.decline(number, reason)
        except Exception as error:  # the next exchange with the other ranks fails the same way
            logger.debug("could not decline checkpoint %d: %s", number, error)


def _problem(run: Run) -> NotPrepared | None:
    """Return why the run cannot become durable; None if it can."""
    if (problem := run.copy.problem) is not None:
        return NotPrepared(problem, torn=run.copy.is_torn)
    if run.round_trip is None:
        return None
    draft = run.draft
    try:
        run.round_trip.require_same(draft.state, draft.slots, draft.views, draft.shards)
    except Exception as error:  # a resume would fail the same way
        return NotPrepared(f"a checkpoint of this state could not be loaded: {describe_error(error)}")
    return None
