"""Measures iterations (wall time, waits, update, metrics) for the pacing controller and the server."""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from holdfast.accelerators import is_accelerator, module_of
from holdfast.pacing import Controller, Observation, Profile
from holdfast.protocol import wire
from holdfast.protocol.wire import StallKind
from holdfast.retention import LoggedMetric
from holdfast.server_link.connection import ServerConnection
from holdfast.telemetry.reporter import Reporter

if TYPE_CHECKING:
    from holdfast.telemetry.loss_watch import LossWatch
    from holdfast.telemetry.metrics_relay import MetricsReceiver, MetricsSender


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


logger = logging.getLogger("holdfast")

LOSS = "loss"
"""The metric that policies follow."""
BATCH_ITERATIONS = 16
RECENT_ITERATIONS = 64
BATCH_SECONDS = 1.0
"""Limits after which the controller is given the measured iterations."""

LEAST_SECONDS = 10.0
"""Least time between two reports of a rank."""
REPORTS_PER_SECOND = 10
"""Most reports of all ranks of a job together: each of a thousand ranks reports every 100 seconds."""


class IterationMetrics:
    """Measures iterations, and their share of checkpoint cost. For the training thread only."""

    def __init__(self, controller: Controller, reporter: Reporter, losses: LossWatch | None = None) -> None:
        self.losses = losses
        """The watch over the losses; `None` if they are not watched."""
        self.clock = IterationClock()
        self._controller, self._reporter = controller, reporter
        self._metrics = MetricReader()
        self._in_flight = False
        """A checkpoint is under way at the start of this iteration."""
        self._unlearned: list[tuple[Iteration, bool]] = []
        """Iterations, and whether a checkpoint was under way."""
        self._learned_at = 0.0
        self.recent: deque[Iteration] = deque(maxlen=RECENT_ITERATIONS)
        """The newest iterations that the controller was given."""
        self._rank_reporter: RankReporter | None = None
        """Reporter of this rank, where there are several ranks and a server."""
        self._relay: MetricsSender | MetricsReceiver | None = None
        """Relay of metrics among the ranks of a pipeline."""

    def watch_losses(self, losses: LossWatch) -> None:
        """Give the losses from now on to a watch."""
        self.losses = losses

    def report_to(self, rank_reporter: RankReporter) -> None:
        """Report the times of this rank from now on."""
        self._rank_reporter = rank_reporter

    def relay_through(self, relay: MetricsSender | MetricsReceiver | None) -> None:
        """Have metrics reach rank 0 from the stage of a pipeline that has them."""
        self._relay = relay

    def end_iteration(self, metrics: Mapping[str, Any]) -> None:
        """End the iteration. The cost of a checkpoint begun now counts in the next one."""
        position = self._reporter.position
        measured = self.clock.end(position.iteration, position.lineage)
        if measured is None:
            return
        self._metrics.add(measured, metrics)
        self.send_samples(wait=False)
        if self._reporter.has_server:
            self._reporter.stalls(measured)
        if self._rank_reporter is not None:
            self._rank_reporter.add(measured)
        self._unlearned.append((measured, self._in_flight))
        if (
            len(self._unlearned) >= BATCH_ITERATIONS
            or measured.at - self._learned_at >= BATCH_SECONDS
            or self._controller.plan is None
        ):
            self.update_controller()

    def begin_iteration(self, *, in_flight: bool) -> None:
        """Begin an iteration, with or without a checkpoint under way."""
        self._in_flight = in_flight

    def update_controller(self) -> None:
        """Give the controller the iterations measured since the last call.

        They are collected until a decision needs them: each iteration evicts this code from the CPU caches,
        so that one call for several costs as much as a call for one.
        """
        if not self._unlearned:
            return
        seen = [
            Observation(
                iteration=measured.iteration,
                seconds=measured.seconds,
                checkpoint_stall_seconds=measured.checkpoint_stall_seconds,
                data_seconds=measured.data_seconds,
                in_flight=in_flight,
                update_seconds=measured.update_seconds,
            )
            for measured, in_flight in self._unlearned
        ]
        self._learned_at = self._unlearned[-1][0].at
        self.recent.extend(measured for measured, _ in self._unlearned)
        self._unlearned.clear()
        plan = self._controller.observe(*seen)
        self._reporter.report_interval(self._controller, changed=plan is not None)

    def checkpoint_settled(self, cost: Profile | None) -> None:
        """Give the controller the cost of a settled checkpoint, if known, after the iterations before it."""
        self.update_controller()
        if cost is not None:
            self._controller.measured(cost)

    def send_samples(self, *, wait: bool) -> None:
        """Send the iterations whose metrics have arrived from the device; with `wait`, all of them."""
        ready = self._metrics.ready(wait=wait)
        for measured, metrics in ready if self._relay is None else self._relay.relay(ready, wait=wait):
            self._reporter.sample(measured, metrics)
            if (loss := metrics.get(LOSS)) is None:
                continue
            if self.losses is not None and measured.lineage == self._reporter.position.lineage:
                self.losses.add(measured.iteration, loss)
            if self._controller.follows_losses:
                self._controller.job_history.lost(measured.iteration, loss)

    def newest_metrics(self) -> Callable[[], dict[str, LoggedMetric]]:
        """Return a function that returns the newest value of each metric; see `MetricReader.newest`.

        Without those that cannot be read: a checkpoint does not fail for its metrics.
        """
        lineage, iteration = self._reporter.position.lineage, self._reporter.position.iteration
        read, relay = self._metrics.newest(lineage), self._relay

        def newest() -> dict[str, LoggedMetric]:
            try:
                return (relay.newest(lineage, iteration) if relay is not None else {}) | read()
            except Exception as error:  # the device failed
                logger.debug("a checkpoint records no metrics: %s", error)
                return {}

        return newest

    def close(self) -> None:
        """Send all samples, and what this rank has not reported yet."""
        self.send_samples(wait=True)
        if self._rank_reporter is not None:
            self._rank_reporter.close()


class RankReporter:
    """Reports totals of one rank's iterations. For the training thread; a report is a few hundred bytes."""

    def __init__(self, link: ServerConnection, rank: int, world_size: int) -> None:
        self._link, self._rank = link, rank
        self.every_seconds = max(LEAST_SECONDS, world_size / REPORTS_PER_SECOND)
        # stagger the first reports by rank, so that later ones do not coincide either
        self._due_after = self.every_seconds * (rank + 1) / world_size
        self._seconds_since = 0.0
        self._work: wire.RankTotals | None = None

    def add(self, measured: Iteration) -> None:
        work = self._work
        if work is not None and work.lineage != measured.lineage:
            self.send()
            work = None
        if work is None:
            work = self._work = wire.RankTotals(
                at=measured.at,
                lineage=measured.lineage,
                first_iteration=measured.iteration,
                last_iteration=measured.iteration,
                iterations=0,
                seconds=0.0,
                longest_seconds=0.0,
            )
        work.at, work.last_iteration = measured.at, measured.iteration
        work.iterations += 1
        work.seconds += measured.seconds
        work.longest_seconds = max(work.longest_seconds, measured.seconds)
        work.stall_seconds += measured.checkpoint_stall_seconds
        work.data_seconds += measured.data_seconds
        if measured.barrier_seconds is not None and math.isfinite(measured.barrier_seconds):
            work.barrier_iterations += 1
            work.barrier_seconds += measured.barrier_seconds
        self._seconds_since += measured.seconds
        if self._seconds_since >= self._due_after:
            self._seconds_since, self._due_after = 0.0, self.every_seconds
            self.send()

    def send(self) -> None:
        """Send what was added since the last report."""
        if self._work is not None:
            self._link.event(self._work)
            self._work = None

    def close(self) -> None:
        """Send the last report. The link of rank 0 belongs to the session, which closes it."""
        self.send()
        if self._rank != 0:
            self._link.close()
