"""Measures iterations, lets the pacing controller learn from them, and tells the server."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.pacing import Controller, Observation, Profile
from holdfast.persist import Settled
from holdfast.prices import Prices
from holdfast.profile import Iteration, IterationClock, MetricReader
from holdfast.reports import Reporter
from holdfast.tally import Tally

BATCH_ITERATIONS = 16
RECENT_ITERATIONS = 64
BATCH_SECONDS = 1.0
"""At most so many iterations, and about so long, before the controller learns of them."""


class Meter:
    """What an iteration took and what of it was a checkpoint's doing. For the training thread only."""

    def __init__(
        self, controller: Controller, reporter: Reporter, measured: Callable[[str, float, float], None]
    ) -> None:
        self.clock = IterationClock()
        self._controller, self._reporter = controller, reporter
        self._metrics = MetricReader()
        self.in_flight = False
        """A checkpoint is under way at the start of this iteration."""
        self._prices = Prices(measured)
        self._unlearnt: list[tuple[Iteration, bool]] = []
        """Iterations, and whether a checkpoint was under way."""
        self._learnt_at = 0.0
        self.recent: deque[Iteration] = deque(maxlen=RECENT_ITERATIONS)
        """The newest that the controller has learnt of."""
        self.tally: Tally | None = None
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
            self._prices.iteration(measured.seconds - measured.data_seconds, in_flight=in_flight)
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

    def checkpoint_settled(self, settled: Settled) -> None:
        snapshot = settled.snapshot
        if snapshot.survived:
            return
        self.learn()  # what came before, before it
        if settled.state == "durable" and settled.backend is not None:
            self._prices.settled(settled.backend, settled.seconds)
        # copied while training waited, those taken for safety or at the end say nothing of the others' cost
        if settled.state == "durable" and snapshot.kind in ("scheduled", "requested"):
            device_copy_seconds = snapshot.device_copy_seconds
            self._controller.measured(
                Profile(
                    iteration_seconds=math.nan,
                    snapshot_seconds=snapshot.seconds,
                    persist_seconds=settled.seconds,
                    checkpoint_bytes=snapshot.size_bytes,
                    device_copy_seconds=math.inf if device_copy_seconds is None else device_copy_seconds,
                    memory_used_bytes=snapshot.device_memory[0],
                    memory_total_bytes=snapshot.device_memory[1],
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
