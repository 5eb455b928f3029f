"""Measures iterations, lets the pacing controller learn from them, and tells the server."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from holdfast.pacing import Controller, Observation, Profile
from holdfast.protocol import messages
from holdfast.server_link.connection import ServerConnection
from holdfast.snapshot.checkpoint_run import CheckpointRun, RunState
from holdfast.telemetry.iteration_clock import Iteration, IterationClock, MetricReader
from holdfast.telemetry.reporter import Reporter

BATCH_ITERATIONS = 16
RECENT_ITERATIONS = 64
BATCH_SECONDS = 1.0
"""At most so many iterations, and about so long, before the controller learns of them."""

LEAST_SECONDS = 10.0
"""Between two reports of a rank."""
REPORTS_PER_SECOND = 10
"""Of all ranks of a job together, at most: a thousand ranks tell of themselves every 100 seconds each."""


class IterationMetrics:
    """What an iteration took and what of it was a checkpoint's doing. For the training thread only."""

    def __init__(self, controller: Controller, reporter: Reporter) -> None:
        self.clock = IterationClock()
        self._controller, self._reporter = controller, reporter
        self._metrics = MetricReader()
        self.in_flight = False
        """A checkpoint is under way at the start of this iteration."""
        self._unlearnt: list[tuple[Iteration, bool]] = []
        """Iterations, and whether a checkpoint was under way."""
        self._learnt_at = 0.0
        self.recent: deque[Iteration] = deque(maxlen=RECENT_ITERATIONS)
        """The newest that the controller has learnt of."""
        self.tally: RankReport | None = None
        """Of this rank, where there are several and a server."""

    def end_iteration(self, metrics: Mapping[str, Any]) -> None:
        """Book the iteration that ends here. What a checkpoint begun now costs falls into the next one."""
        standing = self._reporter.standing
        measured = self.clock.end(standing.iteration, standing.lineage)
        if measured is None:
            return
        if self._reporter.heard:
            self._metrics.add(measured, metrics)
            self.send_samples(wait=False)
            self._reporter.stalls(measured)
        else:
            self._metrics.check(metrics)
        if self.tally is not None:
            self.tally.add(measured)
        self._unlearnt.append((measured, self.in_flight))
        if (
            len(self._unlearnt) >= BATCH_ITERATIONS
            or measured.at - self._learnt_at >= BATCH_SECONDS
            or self._controller.plan is None
        ):
            self.learn()

    def learn(self) -> None:
        """Let the controller have what was measured since it last did.

        Iterations wait for each other until something hangs on them: each drives all that was run before out of
        the processor's caches, and to run it again for each takes as long as for several.
        """
        if not self._unlearnt:
            return
        changed = False
        for measured, in_flight in self._unlearnt:
            self._learnt_at = measured.at
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
        self._unlearnt.clear()
        self._reporter.pace(self._controller, changed=changed)

    def checkpoint_settled(self, run: CheckpointRun) -> None:
        request, copy = run.request, run.copy
        if request.survived:
            return
        self.learn()  # what came before, before it
        # copied while training waited, those taken for safety or at the end say nothing of the others' cost
        if run.state is RunState.DURABLE and request.kind in ("scheduled", "requested"):
            device_copy_seconds = copy.device_copy_seconds
            self._controller.measured(
                Profile(
                    iteration_seconds=math.nan,
                    snapshot_seconds=copy.seconds,
                    persist_seconds=run.result.seconds,
                    checkpoint_bytes=run.size_bytes,
                    device_copy_seconds=math.inf if device_copy_seconds is None else device_copy_seconds,
                    memory_used_bytes=copy.device_memory[0],
                    memory_total_bytes=copy.device_memory[1],
                )
            )

    def send_samples(self, *, wait: bool) -> None:
        """Send the iterations whose metrics have arrived from the device; with `wait`, all of them."""
        for measured, metrics in self._metrics.ready(wait=wait):
            self._reporter.sample(measured, metrics)

    def close(self) -> None:
        """All samples, and what this rank has not told of itself yet."""
        self.send_samples(wait=True)
        if self.tally is not None:
            self.tally.close()


class RankReport:
    """Of a rank's iterations since its last report. For the training thread; a report is a few hundred bytes."""

    def __init__(self, link: ServerConnection, rank: int, world_size: int) -> None:
        self._link, self._rank = link, rank
        self.every_seconds = max(LEAST_SECONDS, world_size / REPORTS_PER_SECOND)
        # The first report comes the sooner the lower the rank, so that they do not all come at once ever after.
        self._due_after = self.every_seconds * (rank + 1) / world_size
        self._seconds_since = 0.0
        self._told: messages.RankWork | None = None

    def add(self, measured: Iteration) -> None:
        told = self._told
        if told is not None and told.lineage != measured.lineage:
            self.tell()
            told = None
        if told is None:
            told = self._told = messages.RankWork(
                at=measured.at,
                lineage=measured.lineage,
                first_iteration=measured.iteration,
                last_iteration=measured.iteration,
                iterations=0,
                seconds=0.0,
                longest_seconds=0.0,
            )
        told.at, told.last_iteration = measured.at, measured.iteration
        told.iterations += 1
        told.seconds += measured.seconds
        told.longest_seconds = max(told.longest_seconds, measured.seconds)
        told.stall_seconds += measured.checkpoint_stall_seconds
        told.data_seconds += measured.data_seconds
        if measured.barrier_seconds is not None and math.isfinite(measured.barrier_seconds):
            told.barrier_iterations += 1
            told.barrier_seconds += measured.barrier_seconds
        self._seconds_since += measured.seconds
        if self._seconds_since >= self._due_after:
            self._seconds_since, self._due_after = 0.0, self.every_seconds
            self.tell()

    def tell(self) -> None:
        """Report what was added since the last report."""
        if self._told is not None:
            self._link.event(self._told)
            self._told = None

    def close(self) -> None:
        """The last report. The link of rank 0 is the session's own, and closed with it."""
        self.tell()
        if self._rank != 0:
            self._link.close()
