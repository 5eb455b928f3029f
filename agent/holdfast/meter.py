"""Measures iterations, lets the pacing controller learn from them, and tells the server."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.pacing import Controller, Observation
from holdfast.persist import Settled
from holdfast.prices import Prices
from holdfast.profile import IterationClock, MetricReader
from holdfast.reports import Reporter


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

    def end_iteration(self, metrics: Mapping[str, Any]) -> None:
        """Book the iteration that ends here. What a checkpoint begun now costs falls into the next one."""
        standing = self._reporter.standing
        measured = self.clock.end(standing.iteration, standing.lineage)
        if measured is None:
            return
        self._metrics.add(measured, metrics)
        self.send_samples(wait=False)
        self._reporter.stalls(measured)
        self._prices.iteration(measured.seconds - measured.data_seconds, in_flight=self.in_flight)
        plan = self._controller.observe(
            Observation(
                iteration=measured.iteration,
                seconds=measured.seconds,
                checkpoint_stall_seconds=measured.checkpoint_stall_seconds,
                data_seconds=measured.data_seconds,
                in_flight=self.in_flight,
                update_seconds=measured.update_seconds,
            )
        )
        self._reporter.pace(self._controller, changed=plan is not None)

    def checkpoint_settled(self, settled: Settled) -> None:
        snapshot = settled.snapshot
        if settled.state == "durable" and settled.backend is not None:
            self._prices.settled(settled.backend, settled.seconds)
        # copied while training waited, those taken for safety or at the end say nothing of the others' cost
        if settled.state == "durable" and snapshot.kind in ("scheduled", "requested"):
            device_copy_seconds = snapshot.device_copy_seconds
            self._controller.measured(
                snapshot_seconds=snapshot.seconds,
                persist_seconds=settled.seconds,
                checkpoint_bytes=snapshot.size_bytes,
                device_copy_seconds=math.inf if device_copy_seconds is None else device_copy_seconds,
                memory_used_bytes=snapshot.device_memory[0],
                memory_total_bytes=snapshot.device_memory[1],
            )

    def send_samples(self, *, wait: bool) -> None:
        """Send the iterations whose metrics have arrived from the device; with `wait`, all of them."""
        for measured, metrics in self._metrics.ready(wait=wait):
            self._reporter.sample(measured, metrics)
