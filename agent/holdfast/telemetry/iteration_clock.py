"""What an iteration is made of: its wall time, the waits within it, the update, the metrics."""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.accelerators import is_accelerator, module_of
from holdfast.protocol.wire import StallKind
from holdfast.retention import LoggedMetric

logger = logging.getLogger("holdfast")


@dataclass(slots=True)
class Iteration:
    """One iteration, measured."""

    iteration: int
    lineage: int
    at: float
    """Unix time of its end."""
    seconds: float
    """Wall time, restores left out."""
    update_seconds: float | None
    stalls: dict[StallKind, float] = field(default_factory=dict)
    barrier_seconds: float | None = None
    """From this rank's own last gradient to the update; None where that was not seen."""

    @property
    def checkpoint_stall_seconds(self) -> float:
        return self.stalls.get("snapshot_wait", 0.0)

    @property
    def data_seconds(self) -> float:
        return self.stalls.get("data_fetch", 0.0)


class IterationClock:
    """Cuts wall time into iterations and books the waits on the iteration in which they fall.

    An iteration runs from the boundary in one `step` to that in the next, so that whatever `step` itself
    does for a checkpoint counts, in the iteration that the checkpoint overlaps.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._on_stall: Callable[[StallKind, float], None] | None = None
        """Called on the training thread at the end of each wait."""
        self._began: float | None = None
        self._stalls: dict[StallKind, float] = {}
        self._update_seconds: float | None = None
        self._update_began = 0.0
        self._gradients_at: float | None = None
        self._barrier_seconds: float | None = None

    def begin(self) -> None:
        """Time before the first batch (imports, building the model) belongs to no iteration."""
        if self._began is None:
            self._began = self._clock()

    def stall(self, kind: StallKind, seconds: float) -> None:
        self._stalls[kind] = self._stalls.get(kind, 0.0) + seconds
        if self._on_stall is not None:
            self._on_stall(kind, seconds)

    def observe(self, on_stall: Callable[[StallKind, float], None]) -> None:
        """Call a function on the training thread at the end of each wait; only one is kept."""
        self._on_stall = on_stall

    @contextlib.contextmanager
    def stalled(self, kind: StallKind) -> Iterator[None]:
        """Count the time of the `with` block as a stall."""
        began = self._clock()
        try:
            yield
        finally:
            self.stall(kind, self._clock() - began)

    def restart(self) -> None:
        """Begin the next iteration now: the time since the last one was a restore, not training."""
        self._began, self._stalls, self._update_seconds = self._clock(), {}, None
        self._gradients_at = self._barrier_seconds = None

    def exclude(self, seconds: float) -> None:
        """Exclude some seconds from the current iteration: they were not training."""
        if self._began is not None:
            self._began += seconds

    def gradients_end(self) -> None:
        """Note that this rank has its last gradient of a backward pass; what follows involves all ranks."""
        self._gradients_at = self._clock()

    def update_begins(self) -> None:
        self._update_began = self._clock()
        if self._gradients_at is not None:
            waited = self._update_began - self._gradients_at
            self._barrier_seconds = (self._barrier_seconds or 0.0) + waited
            self._gradients_at = None

    def update_ends(self) -> None:
        self._update_seconds = (self._update_seconds or 0.0) + self._clock() - self._update_began

    def end(self, iteration: int, lineage: int) -> Iteration | None:
        """Return the iteration that ends now; None for one whose beginning was not seen."""
        now = self._clock()
        began, self._began = self._began, now
        stalls, self._stalls = self._stalls, {}
        update, self._update_seconds = self._update_seconds, None
        barrier, self._barrier_seconds = self._barrier_seconds, None
        self._gradients_at = None
        if began is None:
            return None
        return Iteration(iteration, lineage, time.time(), now - began, update, stalls, barrier)


_FLOAT = frozenset({float})
_NUMBERS = object()


def _copied(iteration: Iteration, metrics: Mapping[str, Any]) -> tuple[Iteration, dict[str, Any], Any]:
    """Begin to copy what is on a device; return the values, and the event that the copies arrive with."""
    values, event = {}, None
    for name, value in metrics.items():
        if isinstance(value, torch.Tensor) and is_accelerator(value.device):
            event = event or module_of(value.device.type).Event()
            with contextlib.suppress(Exception):  # a tensor of another package; `_number` reads it
                copy = torch.empty_like(value, device="cpu", pin_memory=True)
                value = copy.copy_(value.detach(), non_blocking=True)
        values[name] = value
    if event is not None:
        event.record()
    return iteration, values, event


class MetricReader:
    """Turns the metrics given to `step` into numbers, without making training wait for a device.

    A tensor on a device is copied to pinned memory behind the kernels already queued; `ready` gives out
    iterations in order, as soon as their copies have arrived.
    """

    def __init__(self) -> None:
        self._pending: collections.deque[tuple[Iteration, dict[str, Any], Any]] = collections.deque()
        """With the event that its copies arrive with; None: there are none; _NUMBERS: all are numbers already."""
        self._warned: set[str] = set()
        self._newest: dict[str, tuple[Iteration, float]] = {}
        """The newest value of each metric that `ready` has given out, by name."""

    def newest(self, lineage: int) -> Callable[[], dict[str, LoggedMetric]]:
        """Return a function that returns the newest finite value of each metric up to now, of this lineage.

        It may be called on any thread, and waits for the device.
        """
        noted = [(iteration, {name: number}, _NUMBERS) for name, (iteration, number) in self._newest.items()]
        known = [each for each in (*noted, *self._pending) if each[0].lineage == lineage]

        def read() -> dict[str, LoggedMetric]:
            found: dict[str, LoggedMetric] = {}
            for iteration, values, event in known:
                if event is not None and event is not _NUMBERS:
                    event.synchronize()
                for name, value in values.items():
                    if math.isfinite(number := self._number(name, value)):
                        found[name] = LoggedMetric(value=number, iteration=iteration.iteration)
                    else:
                        found.pop(name, None)
            return found

        return read

    def add(self, iteration: Iteration, metrics: Mapping[str, Any]) -> None:
        if _FLOAT.issuperset(map(type, metrics.values())):
            self._pending.append((iteration, dict(metrics), _NUMBERS))
            return
        self._pending.append(_copied(iteration, metrics))

    def ready(self, *, wait: bool = False) -> list[tuple[Iteration, dict[str, float]]]:
        found = []
        while self._pending:
            iteration, values, event = self._pending[0]
            if event is _NUMBERS:
                self._pending.popleft()
                self._note(iteration, values)
                found.append((iteration, values))
                continue
            if event is not None and not event.query():
                if not wait:
                    break
                event.synchronize()
            self._pending.popleft()
            numbers = {name: self._number(name, value) for name, value in values.items()}
            self._note(iteration, numbers)
            found.append((iteration, numbers))
        return found

    def _note(self, iteration: Iteration, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._newest[name] = iteration, value

    def _number(self, name: str, value: Any) -> float:
        try:
            return float(value.detach() if isinstance(value, torch.Tensor) else value)
        except Exception:  # whatever a loop hands over must not stop it
            if name not in self._warned:
                self._warned.add(name)
                logger.warning(
                    "metric %s is not a scalar (%s), and recorded as NaN: give a number or a one-element tensor",
                    *(name, type(value).__name__),
                )
            return math.nan
