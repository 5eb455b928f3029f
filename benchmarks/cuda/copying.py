"""Stage `copy`: copies from a device, by state size, against a bare copy into pinned memory.

The training is the one of `benchmarks.checkpoint`: a GPT with fused AdamW. Mode "cpu" copies to host memory, and
the update waits for what does not fit into the forward and backward pass; mode "gpu" copies within the memory of
the device first. Each size has a process of its own, whose memory is free afterwards.
"""

from __future__ import annotations

import itertools
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.checkpoint.ours import open_session
from benchmarks.checkpoint.scale import TrainingScale
from benchmarks.checkpoint.training import BenchmarkTraining, pinned_copy_seconds
from benchmarks.harness import output_of, run, seconds_of
from holdfast.pacing.policy import SnapshotMode
from holdfast.save.run import Run, RunState

from .stages import CaseResult, Cases, Context

SIZES_GB = (1.0, 4.0, 16.0)
CHECKPOINTS, SPACING = 3, 3
"""Checkpoints per mode, each with so many iterations until the next."""
LARGE_BYTES = 8 << 30
"""From this size on a state has one checkpoint per mode, and none after each iteration: it takes too long."""
PIECE_BYTES = 1 << 30
SMALL_PIECE_BYTES = 1 << 24
TIMEOUT_SECONDS = 300.0
MODES: tuple[SnapshotMode, ...] = ("cpu", "gpu")
GOAL_FROM_GB, GOAL_OF_BARE = 4.0, 0.9
GOAL_BLOCKED_MS, GOAL_SLOWDOWN = 1.0, 0.02


class Measurement:
    """One state size, with a session attached to the training."""

    def __init__(self, scale: TrainingScale, device: str, folder: Path) -> None:
        self._training = BenchmarkTraining(scale)
        is_small = scale == TrainingScale.small(device)
        piece = SMALL_PIECE_BYTES if is_small else PIECE_BYTES
        self._bare = piece / statistics.median(pinned_copy_seconds(piece, device))
        self._is_large = self._training.scale.state_bytes >= LARGE_BYTES
        self._checkpoints = 1 if is_small or self._is_large else CHECKPOINTS
        self._training.seconds(2)
        self._copied, self._blocked = list[Run](), 0.0
        self._training.optimizer.register_step_pre_hook(self._hooks_begin)
        self._session = open_session(folder, self._training, keep=1, max_in_flight=1)
        self._training.optimizer.register_step_pre_hook(self._hooks_end)
        self._session.observe(self)

    def run_changed(self, run: Run, state: RunState) -> None:
        if state is RunState.COPIED:
            self._copied.append(run)

    def run(self) -> list[dict[str, Any]]:
        with self._session as session:
            session.step()  # allocates in the background
            self._settle()
            return [self._measure(mode) for mode in MODES]

    def _measure(self, mode: SnapshotMode) -> dict[str, Any]:
        self._checkpointed(mode)
        self._copied.clear()
        iterations, slowdowns, blocked = [], [], []
        for _ in range(self._checkpoints):
            before, waited = self._training.seconds(SPACING), self._blocked
            with_one = self._checkpointed(mode)
            blocked.append(self._blocked - waited)
            plain = (before + self._training.seconds(SPACING)) / 2
            iterations.append(plain / SPACING)
            slowdowns.append(with_one - plain)
        copies, state_bytes = [run.copy for run in self._copied], self._training.state_bytes
        every = None
        if not self._is_large:
            every = self._every_iteration(2 * SPACING, mode) / (2 * SPACING * statistics.median(iterations))
        self._settle()
        return {
            "state_gb": state_bytes / 1e9,
            "mode": mode,
            "iteration_seconds": statistics.median(iterations),
            "bare_gb_per_second": self._bare / 1e9,
            "copy_gb_per_second": state_bytes / statistics.median(copy.seconds for copy in copies) / 1e9,
            "blocked_seconds": statistics.median(blocked),
            "slowdown_seconds": statistics.median(slowdowns),
            "every_iteration": every,
            "torn": sum(run.state is RunState.TORN for run in self._copied),
        }

    def _checkpointed(self, mode: SnapshotMode) -> float:
        """Return the seconds of a checkpoint and the iterations after it; then wait until it is durable."""
        self._settle()
        acts = itertools.chain([lambda: self._begin(mode)], itertools.repeat(self._training.iterate))
        seconds = self._training.seconds(1 + SPACING, lambda: next(acts)())
        self._settle()
        return seconds

    def _every_iteration(self, count: int, mode: SnapshotMode) -> float:
        def iterate() -> None:
            self._training.iterate()
            self._begin(mode)

        self._settle()
        return self._training.seconds(count, iterate)

    def _begin(self, mode: SnapshotMode) -> None:
        self._session._controller.mode = mode
        self._session.checkpoint()
        self._blocked += seconds_of(self._session.step)

    def _settle(self) -> None:
        self._session.wait(TIMEOUT_SECONDS)

    def _hooks_begin(self, *_: object) -> None:
        self._hook_began = time.perf_counter()

    def _hooks_end(self, *_: object) -> None:
        self._blocked += time.perf_counter() - self._hook_began


def measured(gigabytes: float, context: Context) -> CaseResult:
    """Measure one size in a process of its own."""
    small = ["--small"] if context.small else []
    rows = output_of("benchmarks.cuda.copying", context.device, gigabytes, context.folder, *small)
    values: dict[str, Any] = {"state_gb": rows[0]["state_gb"], "bare_gb_per_second": rows[0]["bare_gb_per_second"]}
    for row in rows:
        mode = row["mode"]
        values |= {
            f"{mode}_copy_of_bare": row["copy_gb_per_second"] / row["bare_gb_per_second"],
            f"{mode}_blocked_ms": row["blocked_seconds"] * 1e3,
            f"{mode}_slowdown_of_an_iteration": row["slowdown_seconds"] / row["iteration_seconds"],
            f"{mode}_every_iteration": row["every_iteration"],
            f"{mode}_torn": row["torn"],
        }
    values["iteration_seconds"] = rows[0]["iteration_seconds"]
    return CaseResult(values, context.judged(_is_met(gigabytes, values)))


def _is_met(gigabytes: float, values: dict[str, Any]) -> bool:
    """Judge mode "cpu", the default where the copy fits into the pass."""
    is_fast = gigabytes < GOAL_FROM_GB or values["cpu_copy_of_bare"] >= GOAL_OF_BARE
    slowdown = min(values[f"{mode}_slowdown_of_an_iteration"] for mode in MODES)
    return is_fast and values["cpu_blocked_ms"] < GOAL_BLOCKED_MS and slowdown <= GOAL_SLOWDOWN


def main(device: str, gigabytes: float, folder: Path, small: bool = False) -> list[dict[str, Any]]:
    scale = TrainingScale.small(device) if small else TrainingScale.of_state(gigabytes, device)
    return Measurement(scale, device, folder / "store").run()


CASES: Cases = {f"{size:g} GB": partial(measured, size) for size in SIZES_GB}
SMALL_CASES = 1

if __name__ == "__main__":
    run(main, is_helper=True)
