"""What a job writes to its store: it is reported, and kept within the share that a server assigns."""

from __future__ import annotations

import math
import platform
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from holdfast.protocol.field_types import MAX_INTEGER
from holdfast.protocol.store_shares import StoreReport, StoreShare
from holdfast.protocol.wire import CheckpointKind
from holdfast.store import Store
from holdfast.store_share.identity import identify
from holdfast.store_share.limiter import RateLimit
from holdfast.system import io_pool
from holdfast.system.masking import escaped

if TYPE_CHECKING:
    from holdfast.pacing import Controller
    from holdfast.telemetry.reporter import Reporter

WRITING_REPORT_SECONDS, REPORT_SECONDS = 5.0, 60.0
"""Time between two reports while a checkpoint is written, and otherwise."""
LIMITED = ("scheduled",)
"""Kinds of checkpoints that wait for a start and keep within the share. Training, an operator or the end of the
process waits for all others."""


class CheckpointWrite(Protocol):
    """What is needed of a checkpoint that is copied and written; `save.run.Run` is one."""

    number: int
    is_urgent: bool

    @property
    def size_bytes(self) -> int: ...


class StoreTraffic:
    """The checkpoints of one session, on rank 0, for all ranks.

    `may_begin` is for the training thread, `pace`, `begin` and `end` for any, `follow` for the polling thread and
    `sample` for the sending thread. Only `end` does I/O.
    """

    def __init__(
        self,
        store: Store,
        reporter: Reporter,
        controller: Controller,
        world_size: int,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._store, self._reporter, self._controller = store, reporter, controller
        self._world_size, self._clock = world_size, clock
        self._address = escaped(store.addresses[0])
        self._limit = RateLimit(self._rank_rate, wait, clock)
        self._lock = threading.Lock()
        """Guards what follows; held for no I/O."""
        self._share: StoreShare | None = None
        self._id: str | None = None
        """Of the store; `None` until it was read."""
        self._disk: tuple[int | None, int | None] = None, None
        """Free and total bytes of its file system, until they are reported: others may report newer ones."""
        self._under_way: dict[int, tuple[CheckpointWrite, int]] = {}
        """Checkpoints that are copied or written, and how many bytes this rank has written of each."""
        self._settled_bytes = self._checkpoint_bytes = 0
        self._wants = self._started = 0
        self._wanted_at = 0.0
        self._reported_at, self._reported_bytes = -math.inf, 0
        self.identified = io_pool.submit(self._identify)
        """Done once the id of the store is known, which every report has."""

    # The share

    def follow(self, shares: Sequence[StoreShare]) -> None:
        """Take over what the server assigns."""
        mine = next((share for share in shares if share.address == self._address), None)
        with self._lock:
            self._share = mine

    @property
    def _is_alone(self) -> bool:
        """Whether the share no longer holds, since the server has not answered for its time."""
        share, link = self._share, self._reporter.link
        return share is None or link is None or self._clock() - link.answered_at > share.holds_seconds

    def rate(self) -> float:
        """Bytes per second that all ranks together may write now; infinite without a limit."""
        share = self._share
        if share is None:
            return math.inf
        return share.fallback_bytes_per_second if self._is_alone else share.bytes_per_second

    def _rank_rate(self) -> float:
        return self.rate() / self._world_size

    def rank_rate(self, kind: CheckpointKind) -> float:
        """Bytes per second of each rank for a checkpoint of this kind that begins; 0 without a limit."""
        rate = self._rank_rate()
        return rate if kind in LIMITED and math.isfinite(rate) else 0.0

    def may_begin(self) -> bool:
        """Return whether a checkpoint that is due may begin, and request its start otherwise."""
        share = self._share
        if share is None or self._is_alone:
            return True
        with self._lock:
            asks = self._wants == self._started
            if asks:
                self._wants += 1
                self._wanted_at = self._clock()
        if asks:
            self.report()
        return share.granted >= self._wants or self._clock() - self._wanted_at >= share.longest_wait_seconds

    def pace(self, run: CheckpointWrite, kind: CheckpointKind) -> Callable[[int], None] | None:
        """Return what limits and counts the bytes of a checkpoint while it is written; `None` without a limit."""
        if kind not in LIMITED or self._share is None:
            return None

        def pay(size_bytes: int, /) -> None:
            self._limit.take(size_bytes, lambda: run.is_urgent)
            with self._lock:
                if (found := self._under_way.get(run.number)) is not None:
                    self._under_way[run.number] = run, found[1] + size_bytes

        return pay

    # What is written

    def begin(self, run: CheckpointWrite) -> None:
        """Count a checkpoint whose copy begins, and report it."""
        with self._lock:
            self._under_way[run.number] = run, 0
            self._limit.restart()
            self._started = self._wants  # whatever its kind: the next one is due an interval later
        self.report()

    def end(self, run: CheckpointWrite, written_bytes: int) -> None:
        """Note that a checkpoint has settled, of which all ranks wrote so many bytes, and report it."""
        disk = self._read_disk()
        with self._lock:
            _, passed = self._under_way.pop(run.number, (run, 0))
            self._settled_bytes += max(passed, written_bytes)
            self._checkpoint_bytes = written_bytes or self._checkpoint_bytes
            self._disk = disk
        self.report()

    def sample(self) -> StoreReport | None:
        """Return a report if the last one is old."""
        every = WRITING_REPORT_SECONDS if self._under_way else REPORT_SECONDS
        return self._made() if self._clock() - self._reported_at >= every else None

    def report(self) -> None:
        """Report what there is now."""
        if (made := self._made()) is not None:
            self._reporter.event(made)

    def _made(self) -> StoreReport | None:
        """Return a report of now; `None` until the store was identified."""
        plan, profile = self._controller.plan, self._controller.profile
        interval = plan.interval_seconds if plan is not None else None
        if interval is None and plan is not None and plan.interval is not None and profile is not None:
            interval = plan.interval * profile.iteration_seconds
        with self._lock:
            if self._id is None:
                return None
            now, under_way = self._clock(), list(self._under_way.values())
            written = self._settled_bytes + sum(passed for _, passed in under_way)
            seconds, written_since = now - self._reported_at, written - self._reported_bytes
            self._reported_at, self._reported_bytes = now, written
            waiting = sum(run.size_bytes for run, _ in under_way)
            (free, total), self._disk = self._disk, (None, None)
            return StoreReport(
                at=time.time(), store=self._id, address=self._address, host=platform.node(),
                free_bytes=free, total_bytes=total, written_bytes=written,
                bytes_per_second=written_since / seconds if written_since and 0 < seconds < math.inf else None,
                waiting_bytes=waiting, checkpoint_bytes=self._checkpoint_bytes or waiting,
                interval_seconds=interval, writing=bool(under_way), wants=self._wants, started=self._started,
            )  # fmt: skip

    def _identify(self) -> None:
        found, disk = identify(_first(self._store)), self._read_disk()
        with self._lock:
            self._id, self._disk = found, disk
        self.report()

    def _read_disk(self) -> tuple[int | None, int | None]:
        store = _first(self._store)
        try:
            free, total = store.free_bytes(), store.total_bytes()
        except OSError:  # the next checkpoint reports it
            return None, None
        return None if free is None else min(free, MAX_INTEGER), None if total is None else min(total, MAX_INTEGER)


def _first(store: Store) -> Store:
    """Return the store that checkpoints are written to: the directory, where there is a store behind it."""
    near: Store = getattr(store, "near", store)
    return near
