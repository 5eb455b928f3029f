"""A controller driven by a simulated job with known costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.pacing import Controller, IntervalPlan, Observation, Profile


@dataclass
class CheckpointInFlight:
    left_seconds: float
    took_seconds: float = 0.0


@dataclass
class PacedJob:
    """A simulated training loop: iterations, and checkpoints that overlap and slow them."""

    controller: Controller
    compute_seconds: float = 1.0
    data_seconds: float = 0.0
    stall_seconds: float = 0.0
    """Stall in the iteration after a checkpoint."""
    interference: float = 0.0
    """Share by which an iteration is slower while a checkpoint is in flight."""
    snapshot_seconds: float = 0.4
    persist_seconds: float = 3.0
    noise: Callable[[], float] = lambda: 1.0
    iteration: int = 0
    device_copy_seconds: float = math.inf
    memory_used_bytes: int = 0
    memory_total_bytes: int = 0
    under_way: list[CheckpointInFlight] = field(default_factory=list)
    new: bool = False
    waited_seconds: float = 0.0
    """Time since the last checkpoint began."""
    seconds: float = 0.0
    """Time of all iterations."""
    bare_seconds: float = 0.0
    """The same without what checkpoints cost."""
    starts: list[int] = field(default_factory=list)
    plans: list[IntervalPlan] = field(default_factory=list)
    intervals: list[int | None] = field(default_factory=list)

    def run(self, iterations: int) -> PacedJob:
        for _ in range(iterations):
            self.step()
        return self

    def run_intervals(self, intervals: int) -> PacedJob:
        target = len(self.starts) + intervals
        for _ in range(1_000_000):
            if len(self.starts) >= target:
                return self
            self.step()
        raise AssertionError("no further checkpoint was started")

    def step(self) -> None:
        self.iteration += 1
        in_flight = bool(self.under_way)
        compute = self.compute_seconds * self.noise() * (1 + self.interference * in_flight)
        stall = self.stall_seconds if self.new else 0.0
        seconds = compute + stall + self.data_seconds
        self.waited_seconds += seconds
        self.seconds += seconds
        self.bare_seconds += compute / (1 + self.interference * in_flight) + self.data_seconds
        self.new = False
        for checkpoint in self.under_way:
            checkpoint.took_seconds += seconds
            checkpoint.left_seconds -= seconds
            if checkpoint.left_seconds <= 0:
                persist_seconds = checkpoint.took_seconds + checkpoint.left_seconds - self.snapshot_seconds
                profile = Profile(
                    iteration_seconds=math.nan, snapshot_seconds=self.snapshot_seconds, checkpoint_bytes=10**6,
                    persist_seconds=persist_seconds, device_copy_seconds=self.device_copy_seconds,
                    memory_used_bytes=self.memory_used_bytes, memory_total_bytes=self.memory_total_bytes,
                )  # fmt: skip
                self.controller.measured(profile)
        self.under_way = [checkpoint for checkpoint in self.under_way if checkpoint.left_seconds > 0]
        made = self.controller.observe(
            Observation(
                iteration=self.iteration,
                seconds=seconds,
                checkpoint_stall_seconds=stall,
                data_seconds=self.data_seconds,
                in_flight=in_flight,
                update_seconds=0.1 * self.compute_seconds,
            )
        )
        if made is not None:
            self.plans.append(made)
        self.intervals.append(self.controller.plan.interval if self.controller.plan else None)
        due = self.controller.due(self.iteration, self.waited_seconds)
        if due and len(self.under_way) < self.controller.max_in_flight:
            self.start()

    def start(self) -> None:
        self.controller.started(self.iteration)
        self.waited_seconds = 0.0
        self.starts.append(self.iteration)
        seconds = self.snapshot_seconds + self.persist_seconds
        self.under_way.append(CheckpointInFlight(seconds))
        self.new = True

    @property
    def interval(self) -> int:
        assert self.controller.plan is not None
        assert self.controller.plan.interval is not None
        return self.controller.plan.interval

    @property
    def overhead(self) -> float:
        assert self.controller.measured_overhead is not None
        return self.controller.measured_overhead
