"""Stage `copy`: copies from a device, by state size, against a bare copy into pinned memory.

The training is the one of `benchmarks.checkpoint`: a GPT with fused AdamW. Mode "cpu" copies to host memory, and
the update waits for what does not fit into the forward and backward pass; mode "gpu" copies within the memory of
the device first. Each size has a process of its own, whose memory is free afterwards.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import holdfast
from benchmarks.checkpoint.scale import TrainingScale
from benchmarks.checkpoint.training import BenchmarkTraining
from holdfast.pacing.policy import SnapshotMode
from holdfast.save.run import Run, RunState

from .stages import CaseResult, Context

ROOT = Path(__file__).resolve().parents[2]
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


class Runs:
    def __init__(self) -> None:
        self.all: list[Run] = []

    def run_changed(self, run: Run, state: RunState) -> None:
        if state is RunState.COPIED:
            self.all.append(run)


def bare_bandwidth(device: str, piece_bytes: int) -> float:
    """Return bytes per second of a copy into pinned memory that nothing overlaps."""
    there = torch.empty(piece_bytes, dtype=torch.uint8, device=device)
    here = torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=device == "cuda")
    seconds = []
    for _ in range(6):
        started = time.perf_counter()
        here.copy_(there, non_blocking=True)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return piece_bytes / statistics.median(seconds[1:])


class Measurement:
    """One state size, with a session attached to the training."""

    def __init__(self, scale: TrainingScale, device: str, folder: Path) -> None:
        self._training = BenchmarkTraining(scale)
        is_small = scale == TrainingScale.small(device)
        self._bare = bare_bandwidth(device, SMALL_PIECE_BYTES if is_small else PIECE_BYTES)
        self._is_large = self._training.scale.state_bytes >= LARGE_BYTES
        self._checkpoints = 1 if is_small or self._is_large else CHECKPOINTS
        self._iterate(2)
        self._runs, self._blocked = Runs(), 0.0
        self._training.optimizer.register_step_pre_hook(self._hooks_begin)
        self._session = holdfast.Session(
            "job", store=folder, server="", every=10**9, keep=1, max_in_flight=1,
            model=self._training.model, optimizer=self._training.optimizer,
        )  # fmt: skip
        self._training.optimizer.register_step_pre_hook(self._hooks_end)
        self._session.observe(self._runs)

    def run(self) -> list[dict[str, Any]]:
        with self._session as session:
            session.step()  # allocates in the background
            self._settle()
            return [self._measure(mode) for mode in MODES]

    def _measure(self, mode: SnapshotMode) -> dict[str, Any]:
        self._checkpointed(mode)
        self._runs.all.clear()
        iterations, slowdowns, blocked = [], [], []
        for _ in range(self._checkpoints):
            before, waited = self._iterate(SPACING), self._blocked
            with_one = self._checkpointed(mode)
            blocked.append(self._blocked - waited)
            plain = (before + self._iterate(SPACING)) / 2
            iterations.append(plain / SPACING)
            slowdowns.append(with_one - plain)
        copies, state_bytes = [run.copy for run in self._runs.all], self._training.state_bytes
        every = None
        if not self._is_large:
            every = self._every_iteration(2 * SPACING, mode) / (2 * SPACING * statistics.median(iterations))
        self._settle()
        on_device = [copy.device_copy_seconds for copy in copies if copy.device_copy_seconds is not None]
        return {
            "state_gb": state_bytes / 1e9,
            "mode": mode,
            "iteration_seconds": statistics.median(iterations),
            "bare_gb_per_second": self._bare / 1e9,
            "copy_gb_per_second": state_bytes / statistics.median(copy.seconds for copy in copies) / 1e9,
            "blocked_seconds": statistics.median(blocked),
            "slowdown_seconds": statistics.median(slowdowns),
            "every_iteration": every,
            "device_copy_seconds": statistics.median(on_device) if mode == "gpu" and on_device else None,
            "torn": sum(run.state is RunState.TORN for run in self._runs.all),
        }

    def _iterate(self, count: int) -> float:
        self._training.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            self._training.iterate()
        self._training.synchronize()
        return time.perf_counter() - started

    def _checkpointed(self, mode: SnapshotMode) -> float:
        """Return the seconds of a checkpoint and the iterations after it; then wait until it is durable."""
        self._settle()
        self._training.synchronize()
        started = time.perf_counter()
        self._begin(mode)
        for _ in range(SPACING):
            self._training.iterate()
        self._training.synchronize()
        seconds = time.perf_counter() - started
        self._settle()
        return seconds

    def _every_iteration(self, count: int, mode: SnapshotMode) -> float:
        self._settle()
        self._training.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            self._training.iterate()
            self._begin(mode)
        self._training.synchronize()
        return time.perf_counter() - started

    def _begin(self, mode: SnapshotMode) -> None:
        self._session._controller.mode = mode
        self._session.checkpoint()
        self._step()

    def _step(self) -> None:
        started = time.perf_counter()
        self._session.step()
        self._blocked += time.perf_counter() - started

    def _settle(self) -> None:
        self._session.wait(TIMEOUT_SECONDS)

    def _hooks_begin(self, *_: object) -> None:
        self._hook_began = time.perf_counter()

    def _hooks_end(self, *_: object) -> None:
        self._blocked += time.perf_counter() - self._hook_began


def line_of(found: dict[str, Any]) -> str:
    on_device, iteration = found["device_copy_seconds"], found["iteration_seconds"]
    return (
        f"{found['state_gb']:5.2f} GB {found['mode']:>5} {iteration * 1e3:7.1f} ms "
        f"{found['bare_gb_per_second']:5.1f} GB/s {found['copy_gb_per_second']:5.1f} GB/s "
        f"{found['copy_gb_per_second'] / found['bare_gb_per_second']:8.2f} "
        f"{found['blocked_seconds'] * 1e3:6.2f} ms "
        f"{found['slowdown_seconds'] * 1e3:7.2f} ms {found['slowdown_seconds'] / iteration:8.2%} "
        f"{found['every_iteration']:9.3f} {'-' if on_device is None else f'{on_device * 1e3:7.2f} ms':>10}"
    )


def cases(context: Context) -> list[tuple[str, Callable[[], CaseResult]]]:
    sizes = SIZES_GB[:1] if context.small else SIZES_GB
    return [(f"{size:g} GB", partial(measured, context, size)) for size in sizes]


def measured(context: Context, gigabytes: float) -> CaseResult:
    """Measure one size in a process of its own."""
    command = [
        sys.executable, "-m", "benchmarks.cuda.copying", context.device, str(gigabytes), str(context.folder),
        *(["--small"] if context.small else []),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{gigabytes:g} GB failed: {done.stderr[-400:]}")
    rows = list(json.loads(done.stdout.splitlines()[-1]))
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
    return CaseResult(values, None if context.small else _is_met(gigabytes, values))


def _is_met(gigabytes: float, values: dict[str, Any]) -> bool:
    """Judge mode "cpu", the default where the copy fits into the pass."""
    is_fast = gigabytes < GOAL_FROM_GB or values["cpu_copy_of_bare"] >= GOAL_OF_BARE
    slowdown = min(values[f"{mode}_slowdown_of_an_iteration"] for mode in MODES)
    return is_fast and values["cpu_blocked_ms"] < GOAL_BLOCKED_MS and slowdown <= GOAL_SLOWDOWN


def main() -> None:
    device, gigabytes, folder, *small = sys.argv[1:]
    scale = TrainingScale.small(device) if small else TrainingScale.of_state(float(gigabytes), device)
    print(json.dumps(Measurement(scale, device, Path(folder) / "store").run()))


if __name__ == "__main__":
    main()
