"""Phase 1: a consistent copy of the state of one instant, made while training continues.

After iteration i, what forward mutates (buffers, random state, counters) is copied at once. What only an
optimizer's step mutates is copied by a thread while the forward and backward pass of iteration i+1 run; the
step of i+1 waits for it (CheckFreq, FAST'21, figure 4c: the stall is max(0, Tc - (Ti - Tw))).

The copy goes into an arena that is allocated once and laid out as the data section of the payload file. There
are as many arenas as snapshots may be in flight.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from holdfast.errors import HoldfastError
from holdfast.save.host_buffers import Arena
from holdfast.save.layout import Layout
from holdfast.save.reuse import worth_sharing
from holdfast.save.run import SETTLED, CopyResult, Run, RunState
from holdfast.state.registry import CapturedState

if TYPE_CHECKING:
    from holdfast.save.host_state import HostStateForks

logger = logging.getLogger("holdfast")


@dataclass(slots=True)
class _Copy:
    """The copy under way."""

    run: Run
    layout: Layout
    started: float
    frozen: Collection[str]
    """Names of parameters that no optimizer trains."""
    parent_versions: Mapping[str, int] | None
    """`CopyResult.versions` of the parent; None if this session did not take it."""
    hold_failure: Exception | None = None
    """Why the next update on a device could not be delayed."""
    update_may_begin: threading.Event = field(default_factory=threading.Event)
    """Host tensors are copied, and devices delay the next update until theirs are."""


class Snapshotter:
    """Takes snapshots, one at a time, into arenas that are released when their checkpoint settles.

    Args:
        max_in_flight: how many snapshots may be held at the same time, each in host memory of the state's size.
        debug: digest every tensor before and after it is copied, while training waits.
        arenas: memory to use instead of the process's own.
        make_forks: makes what keeps large arrays of host state in a forked process, once there are any.
        kept: how many of these keep the newest complete snapshots while a later one is taken.
    """

    def __init__(
        self,
        max_in_flight: int = 1,
        *,
        debug: bool = False,
        arenas: Sequence[Arena] | None = None,
        kept: int = 0,
        make_forks: Callable[[], HostStateForks | None] | None = None,
    ) -> None:
        self._debug, self._kept = debug, kept
        self._make_forks = make_forks
        self._forks: HostStateForks | None = None
        self._layouts = [Layout(arena) for arena in arenas or [Arena() for _ in range(max_in_flight)]]
        self._free = list(self._layouts)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._tried_on_device = False
        self._copy: _Copy | None = None
        """The last copy that began."""
        self._durable: dict[str, Mapping[str, int]] = {}
        """`CopyResult.versions` of the newest durable checkpoint, by its id."""
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def free(self) -> bool:
        """A snapshot can begin: an arena is free, and the previous copy is complete."""
        return self.has_room and not self.copying

    @property
    def has_room(self) -> bool:
        """An arena is free: a snapshot can begin when the previous copy is complete."""
        return len(self._free) > self._kept

    @property
    def idle(self) -> bool:
        """All arenas are free."""
        return len(self._free) == len(self._layouts)

    @property
    def copying(self) -> bool:
        return self._copy is not None and self._copy.run.state is RunState.COPYING

    def wait_idle(self, timeout_seconds: float | None) -> bool:
        with self._lock:
            return self._changed.wait_for(lambda: self.idle, timeout_seconds)

    def wait_free(self, timeout_seconds: float) -> bool:
        """Wait until a snapshot can begin; `False` on timeout."""
        with self._lock:
            return self._changed.wait_for(lambda: self.free, timeout_seconds)

    def prepare(self, captured: CapturedState) -> None:
        """Allocate memory for snapshots of a state in the background, and check that it could be loaded."""
        taken = list(self._free)
        if (forks := self._forks_for(captured)) is not None:
            captured, _ = forks.split(captured)

        def reserve() -> None:
            for layout in taken:
                try:
                    layout.fit(captured)
                    if (check := captured.round_trip) is not None and not check.holds:
                        check.require_same(captured.trees, layout.slots, layout.views, captured.shards)
                # keep the copying thread alive; the first checkpoint fails the same way and reports it
                except Exception as error:
                    logger.debug("could not prepare the first checkpoint: %s", error)
                finally:
                    self._release(layout)

        self._start_thread()
        del self._free[: len(taken)]
        self._work.put(reserve)

    def begin(self, run: Run, captured: CapturedState) -> None:
        """Copy what forward may change, and move `run` to copying; `copy` then copies the rest.

        With the mode "gpu" tensors on a device are first copied within its memory, if there is room.

        Raises:
            MemoryError: there is no room for an arena.
            TypeError: a tensor of a kind that cannot be stored.
        """
        assert self.free, "every arena still holds a snapshot, or the previous copy is not complete"
        started, mode = time.perf_counter(), run.mode
        layout = self._free[0]  # in turn: a layout that is rarely used would keep the tensors of an old state
        image = None
        if (forks := self._forks_for(captured)) is not None:
            captured, image = forks.take(captured, layout.arena.size_bytes)
        try:
            del self._free[0]
            layout.arena.remove_marker()
            layout.fit(captured)
            if not (layout.copied_on_device or self._tried_on_device) and self._copy is not None:
                mode = "gpu"  # once, to measure Tg for CheckFreq's Algorithm 1
                self._tried_on_device = True
            layout.start(captured, mode, digests=self._debug)
            self._start_thread()
            parent_versions = self._durable.get(run.draft.parent or "")
            self._copy = _Copy(run, layout, started, captured.frozen, parent_versions)
            draft = msgspec.structs.replace(
                run.draft,
                state=captured.trees,
                slots=layout.slots,
                image_bytes=0 if image is None else image.size_bytes,
                views=layout.views if image is None else layout.views | image.views,
                shards=captured.shards,
                rank_local=captured.rank_local,
                must_match=captured.must_match,
            )
            run.begin_copy(layout.arena, draft, captured.round_trip, image)
        except BaseException:
            layout.quiesce()
            if image is not None and run.image is None:  # otherwise the settled run closes it
                image.close()
            if run.arena is None and layout not in self._free:  # otherwise the settled run releases it
                self._release(layout)
            raise

    def copy(self, run: Run) -> None:
        """Copy the rest in the background, or before this returns if the run is `at_once`.

        Submit the run first: the copying thread takes the interpreter lock when this thread releases it.
        """
        copy = self._copy
        assert copy is not None
        assert copy.run is run
        self._work.put(lambda: self._copy_rest(copy))
        if run.at_once:
            started = time.perf_counter()
            run.wait_copied()
            run.add_stall(time.perf_counter() - started)

    def fail_copy(self, run: Run, reason: str) -> None:
        """Fail the copy if it has not begun; otherwise do nothing."""
        copy = self._copy
        assert copy is not None
        assert copy.run is run

        def fail() -> None:
            if run.state is RunState.COPYING:
                copy.layout.quiesce()
                copy.update_may_begin.set()
                run.end_copy(CopyResult(failure=HoldfastError(f"{reason} before it began")))

        self._work.put(fail)

    def wait_copied(self) -> float:
        """Block an optimizer step until it may change the state; return the seconds."""
        copy = self._copy
        if copy is None or copy.run.state is not RunState.COPYING:
            return 0.0
        started = time.perf_counter()
        copy.update_may_begin.wait()
        try:
            copy.layout.hold_update()
        except Exception as error:  # the update proceeds, and the copy fails
            copy.hold_failure = error
        waited = time.perf_counter() - started
        copy.run.add_stall(waited)
        return waited

    def wait_copy_ended(self) -> None:
        """Block until the copy under way has ended, without a call to a device from this thread."""
        if self._copy is not None:
            self._copy.run.wait_copied()

    @contextlib.contextmanager
    def borrowed_memory(self) -> Iterator[memoryview | None]:
        """Lend the memory of a free arena; `None` where none is free."""
        with self._lock:
            layout = max(self._free, key=lambda each: each.arena.size_bytes, default=None)
            if layout is not None:
                self._free.remove(layout)
        if layout is None:
            yield None
            return
        try:
            room = None
            with contextlib.suppress(OSError):  # the completion marker cannot be removed
                room = layout.borrow() if layout.arena.size_bytes else None
            yield room
        finally:
            self._release(layout)

    def reserve(self, arena: Arena) -> None:
        """Reserve an arena that holds a snapshot of an earlier attempt, until its run settles."""
        self._free = [layout for layout in self._free if layout.arena is not arena]

    def run_changed(self, run: Run, state: RunState) -> None:
        """Release the memory of a settled run, and wake `wait_free`."""
        if state in SETTLED and run.image is not None:
            run.image.close()
        if state is RunState.DURABLE and run.copy.versions:
            self._durable = {run.id: run.copy.versions}
        if state in SETTLED and run.arena is not None:
            self._release(next(layout for layout in self._layouts if layout.arena is run.arena))
        else:
            with self._lock:
                self._changed.notify_all()

    def close(self) -> None:
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(timeout=60)

    def _forks_for(self, captured: CapturedState) -> HostStateForks | None:
        if self._make_forks is not None and captured.host_state:
            self._forks, self._make_forks = self._make_forks(), None
        return self._forks

    def _release(self, layout: Layout) -> None:
        marker = layout.arena.marker if self._kept else None
        with self._lock:
            # the next snapshot overwrites the first: one that did not become complete, else the oldest
            at = len(self._free) if marker is None or marker.exists() else 0
            self._free.insert(at, layout)
            self._changed.notify_all()

    def _start_thread(self) -> None:
        """Start the copying thread. RuntimeError when no more threads can be started."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="holdfast-copy", daemon=True)
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _copy_rest(self, copy: _Copy) -> None:
        unchanged: Collection[str] = ()
        try:
            result = self._copy_and_wait(copy)
            unchanged = _unchanged(copy, result.versions)
        except Exception as error:  # release the waiting step, and keep this thread alive
            result = CopyResult(failure=error)
            copy.layout.quiesce()
        finally:
            copy.update_may_begin.set()
        seconds = time.perf_counter() - copy.started
        result = replace(result, seconds=seconds, failure=result.failure or copy.hold_failure)
        copy.run.end_copy(result, unchanged)

    def _copy_and_wait(self, copy: _Copy) -> CopyResult:
        layout = copy.layout
        torn = layout.copy_host()
        copy.update_may_begin.set()
        torn += layout.finish()
        return CopyResult(
            torn=torn,
            versions=layout.versions,
            device_copy_seconds=layout.device_copy_seconds,
            device_memory=layout.device_memory,
        )


def _unchanged(copy: _Copy, versions: Mapping[str, int]) -> Collection[str]:
    """Return the tensors whose version counter is that of the parent, or the frozen ones if that is unknown."""
    before, names = copy.parent_versions, copy.frozen
    if before is not None:
        names = {name for name, version in versions.items() if before.get(name) == version}
    return worth_sharing(copy.run.draft.slots, names)
