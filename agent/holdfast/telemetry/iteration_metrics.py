"""Iteration metrics: measures iterations for the pacing controller and the server."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.pacing import Controller, Observation, Profile
from holdfast.protocol import wire
from holdfast.retention import LoggedMetric
from holdfast.server_link.connection import ServerConnection
from holdfast.telemetry.iteration_clock import Iteration, IterationClock, MetricReader
from holdfast.telemetry.reporter import Reporter

if TYPE_CHECKING:
    from holdfast.telemetry.loss_watch import LossWatch
    from holdfast.telemetry.metrics_relay import MetricsReceiver, MetricsSender

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
        changed = False
        for measured, in_flight in self._unlearned:
            self._learned_at = measured.at
            self.recent.append(measured)
            plan = self._controller.observe(
                Observation(
                    iteration=measured.iteration,
                    seconds=measured.seconds,
                    checkpoint_stall_seconds=measured.checkpoint_stall_seconds,
                    data_seconds=measured.data_seconds,
                    in_flight=in_flight,
                    update_seconds=measured.update_seconds,
                )
            )
            changed = changed or plan is not None
        self._unlearned.clear()
        self._reporter.report_interval(self._controller, changed=changed)

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
