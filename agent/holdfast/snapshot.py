"""Phase 1: a consistent copy of the state of one instant, made while training goes on.

After iteration i, what forward mutates (buffers, random state, counters) is copied at once. What only an
optimizer's step mutates is copied by a thread while the forward and backward pass of iteration i+1 run; the
step of i+1 waits for it (CheckFreq, FAST'21, figure 4c: the stall is max(0, Tc - (Ti - Tw))).

The copy goes into an arena that is allocated once and laid out as the data section of the payload file. There
are as many arenas as snapshots may be in flight.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.arena import Arena
from holdfast.errors import HoldfastError
from holdfast.format import Shard, Slot
from holdfast.layout import Layout
from holdfast.pacing.profile import SnapshotMode
from holdfast.protocol import RankSpan, checkpoint_id
from holdfast.round_trip import RoundTrip
from holdfast.state import Captured

logger = logging.getLogger("holdfast")


@dataclass(slots=True)
class Snapshot:
    """A copy under way or complete. `torn` names the tensors that changed while they were copied."""

    iteration: int
    lineage: int
    kind: str
    trees: dict[str, Any]
    slots: list[Slot]
    views: dict[str, str]
    arena: Arena
    started_at: float
    shards: dict[str, Shard] = field(default_factory=dict)
    """Of tensors that are parts of larger ones."""
    round_trip: RoundTrip | None = None
    """Tells whether what is about to be written would come back as it was captured; None where that is known."""
    own: set[str] = field(default_factory=set)
    """Names of tensors that may be otherwise on other ranks."""
    alike: dict[str, str] = field(default_factory=dict)
    """What other ranks must say the same of."""
    number: int = 0
    """Which of the attempt's it is: the same on all ranks."""
    in_flight: int = 1
    """How many were under way when it began, itself included."""
    stored_bytes: int = 0
    """What all ranks together have stored of it; 0 while that is not known, and where there is one rank."""
    ranks: list[RankSpan] = field(default_factory=list)
    """What the slowest of several ranks took for it, on rank 0 once it is durable."""
    submitted: bool = False
    """Who persists it has it, and will release it."""
    fingerprint: dict[str, str] = field(default_factory=dict)
    """Where and how it was trained; whole once it is being persisted."""
    survived: bool = False
    """An attempt before this one took it, and did not live to see it durable."""
    seconds: float = 0.0
    stall_seconds: float = 0.0
    device_copy_seconds: float | None = None
    """Tg, of this snapshot or of the last one that was first copied within a device's memory."""
    device_memory: tuple[int, int] = (0, 0)
    """(M, Mmax) in bytes of the device with the least room; zeros where there is none."""
    torn: list[str] = field(default_factory=list)
    failure: BaseException | None = None
    safe: threading.Event = field(default_factory=threading.Event)
    """An update may be queued: host tensors are copied, and devices know what to wait for."""
    copied: threading.Event = field(default_factory=threading.Event)
    outcome: str | None = None
    """durable, torn or failed, once it is settled."""
    reason: str | None = None
    settled: threading.Event = field(default_factory=threading.Event)

    @property
    def id(self) -> str:
        return checkpoint_id(self.iteration, self.lineage)

    @property
    def size_bytes(self) -> int:
        return self.slots[-1].end if self.slots else 0

    def payload(self) -> memoryview:
        return self.arena.bytes(self.size_bytes)


class Snapshotter:
    """Takes snapshots, one at a time, into arenas that persisting gives back.

    Args:
        slots: how many snapshots may be held at the same time, each in host memory of the state's size.
        shared: into memory that another process can map; see `Arena`. It holds for those begun later.
        debug: digest every tensor before and after it is copied, while training waits.
        arenas: the memory for them, where it is to be such of a kind; by itself, this process's own.
    """

    def __init__(
        self,
        slots: int = 1,
        *,
        shared: bool = True,
        debug: bool = False,
        arenas: Sequence[Arena] | None = None,
    ) -> None:
        self.shared, self._debug = shared, debug
        self._layouts = [Layout(arena) for arena in arenas or [Arena() for _ in range(slots)]]
        self._free = list(self._layouts)
        self._changed = threading.Condition()
        self._tried_on_device = False
        self._current: Snapshot | None = None
        self._current_layout: Layout | None = None
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def free(self) -> bool:
        """A snapshot can begin: there is an arena that none holds, and the copy before is complete."""
        return bool(self._free) and not self.copying

    @property
    def has_room(self) -> bool:
        """There is an arena that none holds: a snapshot can begin when the copy before is complete."""
        return bool(self._free)

    @property
    def idle(self) -> bool:
        """No snapshot is held: the ones before are durable, or given up."""
        return len(self._free) == len(self._layouts)

    @property
    def copying(self) -> bool:
        return self._current is not None and not self._current.copied.is_set()

    def wait_idle(self, timeout_seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.idle, timeout_seconds)

    def wait_free(self, timeout_seconds: float) -> bool:
        """Wait until a snapshot can begin; False when that takes too long."""
        with self._changed:
            return self._changed.wait_for(lambda: self.free, timeout_seconds)

    def prepare(self, captured: Captured) -> None:
        """Allocate what snapshots of such a state need, in the background; a failure shows in `begin`."""
        taken = list(self._free)

        def reserve() -> None:
            for layout in taken:
                try:
                    layout.fit(captured, shared=self.shared)
                except Exception as error:  # a thread's edge; `begin` meets it again and reports it
                    logger.debug("no arena yet: %s", error)
                finally:
                    self._give_back(layout)

        self._start_thread()
        del self._free[: len(taken)]
        self._work.put(reserve)

    def begin(
        self,
        captured: Captured,
        *,
        iteration: int,
        lineage: int,
        kind: str,
        mode: SnapshotMode = "cpu",
        at_once: bool = False,
        announce: Callable[[Snapshot], None] = lambda _: None,
    ) -> Snapshot:
        """Start copying; returns when everything that forward may change is copied.

        Before the copy begins `announce` hands the snapshot to whoever is to `release` it; were it done after, the
        thread that copies would take the interpreter where this one lets go of it. With `mode` "gpu" tensors on a
        device are first copied within its memory, if there is room. With `at_once` everything is copied before it
        returns.

        Raises:
            MemoryError: there is no room for an arena.
            TypeError: a tensor of a kind that cannot be stored.
        """
        assert self.free, "every arena still holds a snapshot, or the copy before is not complete"
        started = time.perf_counter()
        snapshot = None
        layout = self._free.pop(0)  # all in turn, or one that is rarely used would keep an old state's tensors
        try:
            layout.arena.unseal()
            layout.fit(captured, shared=self.shared)
            if not (layout.copied_on_device or self._tried_on_device) and self._current is not None:
                mode = "gpu"  # once, where there is a device with room: Algorithm 1 wants to know what it costs
                self._tried_on_device = True
            snapshot = Snapshot(
                iteration,
                lineage,
                kind,
                captured.trees,
                layout.slots,
                layout.views,
                layout.arena,
                started_at=time.time(),
                shards=captured.shards,
                round_trip=captured.round_trip,
                own=captured.own,
                alike=captured.alike,
            )
            layout.start(captured, mode, digests=self._debug)
            self._start_thread()
            announce(snapshot)
            self._current, self._current_layout = snapshot, layout
            self._work.put(functools.partial(self._copy_rest, snapshot, layout, started, waits=at_once))
        except BaseException as error:
            if snapshot is None or not snapshot.submitted:
                self._give_back(layout)  # or no checkpoint would ever be taken again
            else:  # who has it waits for it
                self._work.put(functools.partial(self._give_up, snapshot, layout, type(error).__name__))
            raise
        if at_once:
            try:
                snapshot.copied.wait()
            except BaseException:  # Ctrl-C
                if not snapshot.submitted:  # nobody will have it, and so nobody would give its memory back
                    self._work.put(functools.partial(self._give_back, layout))
                raise
        return snapshot

    def wait_copied(self) -> float:
        """Hold the caller (an optimizer about to step) until it may change the state; the seconds that took."""
        snapshot, layout = self._current, self._current_layout
        if snapshot is None or layout is None or snapshot.copied.is_set():
            return 0.0
        started = time.perf_counter()
        snapshot.safe.wait()
        try:
            layout.hold_update()
        except Exception as error:  # the update goes on, and the copy is worth nothing
            snapshot.failure = error
        waited = time.perf_counter() - started
        snapshot.stall_seconds += waited
        return waited

    @contextlib.contextmanager
    def lent(self) -> Iterator[memoryview | None]:
        """The memory of an arena that none holds, for something else meanwhile; None where there is none."""
        with self._changed:
            layout = max(self._free, key=lambda each: each.arena.size_bytes, default=None)
            if layout is not None:
                self._free.remove(layout)
        if layout is None:
            yield None
            return
        try:
            room = None
            with contextlib.suppress(OSError):  # the supervisor's memory cannot be unsealed
                room = layout.lend() if layout.arena.size_bytes else None
            yield room
        finally:
            self._give_back(layout)

    def hold(self, arena: Arena) -> None:
        """Begin no snapshot in this memory, which holds one that was not taken here, until that is released."""
        self._free = [layout for layout in self._free if layout.arena is not arena]

    def release(self, snapshot: Snapshot) -> None:
        """The snapshot is persisted or given up: its memory may be used again."""
        self._give_back(next(layout for layout in self._layouts if layout.arena is snapshot.arena))

    def abandon(self) -> None:
        """In a forked child, where nobody copies: nothing may wait for the copy."""
        self._current = self._current_layout = None

    def close(self) -> None:
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(timeout=60)

    def _give_back(self, layout: Layout) -> None:
        with self._changed:
            self._free.append(layout)
            self._changed.notify_all()

    def _start_thread(self) -> None:
        """RuntimeError where there can be no more threads."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="holdfast-snapshot", daemon=True)
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _give_up(self, snapshot: Snapshot, layout: Layout, reason: str) -> None:
        """Where it has not come to a copy."""
        if snapshot.copied.is_set():
            return
        snapshot.failure = HoldfastError(f"{reason} before it began")
        layout.quiesce()
        snapshot.safe.set()
        with self._changed:
            snapshot.copied.set()
            self._changed.notify_all()

    def _copy_rest(self, snapshot: Snapshot, layout: Layout, started: float, *, waits: bool) -> None:
        """`waits`: training does, for all of it."""
        began = time.perf_counter()
        try:
            snapshot.torn = layout.copy_host()
            snapshot.safe.set()
            snapshot.torn += layout.finish()
            snapshot.device_copy_seconds = layout.device_copy_seconds
            snapshot.device_memory = layout.device_memory
        except Exception as error:  # a thread's edge: whatever went wrong, the step that waits must go on
            snapshot.failure = error
            layout.quiesce()
        finally:
            snapshot.seconds = time.perf_counter() - started
            if waits:
                snapshot.stall_seconds += time.perf_counter() - began
            snapshot.safe.set()
            with self._changed:
                snapshot.copied.set()
                self._changed.notify_all()
