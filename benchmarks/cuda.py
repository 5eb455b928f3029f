"""`python -m benchmarks.cuda`: copies from a CUDA device, by state size, beside a bare copy into pinned memory.

The training is the one of `benchmarks.checkpoint`: a GPT with fused AdamW. Mode "cpu" copies to host memory, and
the update waits for what does not fit into the forward and backward pass; mode "gpu" copies within the memory of
the device first. Each size has a process of its own. `--device cpu` tests the script.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.pacing.profile import SnapshotMode
from holdfast.save.run import Run, RunState

from .checkpoint.scale import TrainingScale
from .checkpoint.training import BenchmarkTraining

ROOT = Path(__file__).resolve().parents[1]
SIZES_GB = (1.0, 4.0, 16.0)
CHECKPOINTS, SPACING = 3, 3
"""Checkpoints per size, each with so many iterations until the next."""
PIECE_BYTES = 1 << 30
TIMEOUT_SECONDS = 300.0
MODES: tuple[SnapshotMode, ...] = ("cpu", "gpu")
HEADING = (
    f"{'state':>8} {'mode':>5} {'iteration':>10} {'bare copy':>10} {'copy':>10} {'of bare':>8} {'blocked':>9} "
    f"{'slow-down':>10} {'of iter.':>8} {'every it.':>9} {'on device':>10}"
)
LEGEND = """\
copy        bandwidth of the snapshot into pinned host memory, while the forward and backward pass run
blocked     time that the training thread waited per checkpoint, in step() and before the update; the median
slow-down   time that a checkpoint adds to the iterations after it, with waits of the device; also per iteration
every it.   time with a checkpoint asked for in each iteration ÷ time without; one begins when memory is free
on device   time of the copy within the memory of the device"""


class Runs:
    def __init__(self) -> None:
        self.all: list[Run] = []

    def run_changed(self, run: Run, state: RunState) -> None:
        if state is RunState.COPIED:
            self.all.append(run)


def scale_of(gigabytes: float, device: str) -> TrainingScale:
    return TrainingScale.small(device) if device == "cpu" else TrainingScale.of_state(gigabytes, device)


def bare_bandwidth(device: str) -> float:
    """Return bytes per second of a copy into pinned memory that nothing overlaps."""
    there = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device)
    here = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=device == "cuda")
    seconds = []
    for _ in range(6):
        started = time.perf_counter()
        here.copy_(there, non_blocking=True)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return PIECE_BYTES / statistics.median(seconds[1:])


class Measurement:
    """One state size, with a session attached to the training."""

    def __init__(self, gigabytes: float, device: str, folder: Path) -> None:
        self._training = BenchmarkTraining(scale_of(gigabytes, device))
        self._bare = bare_bandwidth(device)
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
        for _ in range(CHECKPOINTS):
            before, waited = self._iterate(SPACING), self._blocked
            with_one = self._checkpointed(mode)
            blocked.append(self._blocked - waited)
            plain = (before + self._iterate(SPACING)) / 2
            iterations.append(plain / SPACING)
            slowdowns.append(with_one - plain)
        copies, state_bytes = [run.copy for run in self._runs.all], self._training.state_bytes
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


def measured(gigabytes: float, device: str, folder: Path | None) -> list[dict[str, Any]]:
    """Measure one size in a process of its own, whose memory is free afterwards."""
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=folder or ROOT) as place:
        command = [sys.executable, "-m", "benchmarks.cuda", "--device", device, "--one", str(gigabytes), place]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"{gigabytes:g} GB failed:\n{done.stderr[-3000:]}")
    return list(json.loads(done.stdout.splitlines()[-1]))


def figures_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the figures of mode "cpu".

    `pinned_copy_share`: bandwidth of the copy ÷ the bare one, of the largest state. `blocked_ms`: the worst size.
    `slowdown_of_an_iteration`: the largest share of an iteration that a checkpoint adds.
    """
    found = [row for row in rows if row["mode"] == "cpu"]
    last = found[-1]
    return {
        "pinned_copy_share": round(last["copy_gb_per_second"] / last["bare_gb_per_second"], 3),
        "blocked_ms": round(max(row["blocked_seconds"] for row in found) * 1e3, 3),
        "slowdown_of_an_iteration": round(max(r["slowdown_seconds"] / r["iteration_seconds"] for r in found), 4),
        "torn": sum(row["torn"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument(
        "--sizes", type=float, nargs="+", default=SIZES_GB, metavar="GB", help="sizes of the state"
    )
    parser.add_argument("--folder", type=Path, help="where checkpoints are written")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device here; --device cpu tests the script")
    if options.one:
        print(json.dumps(Measurement(float(options.one[0]), options.device, Path(options.one[1])).run()))
        return
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"device      {name}, torch {torch.__version__}, {len(os.sched_getaffinity(0))} cores\n")
    print(HEADING, flush=True)
    rows = []
    for size in options.sizes:
        found = measured(size, options.device, options.folder)
        print("\n".join(map(line_of, found)), flush=True)
        rows += found
    print(f"\n{LEGEND}\nfigures: {json.dumps(figures_of(rows))}")


if __name__ == "__main__":
    main()
