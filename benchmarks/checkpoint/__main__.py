"""`make bench-checkpoint`, which installs the other libraries first."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness import ROOT, run, scratch

from . import host_state as host
from .driver import CheckpointBenchmark
from .figures import report
from .machine import facts
from .registry import FORK, OURS, PLAIN, TORCH_SAVE
from .results import BenchmarkOptions
from .scale import TrainingScale

SIZES_GB = [0.1, 0.3, 1.0, 3.0, 10.0]
BESIDE_FORK = (PLAIN, TORCH_SAVE, OURS)
BRIEF_STARTS = 4
AFTER_ROUNDS_SECONDS = 120
"""Approximate duration of everything after the rounds."""


def main(
    device: Literal["cpu", "cuda"] = "cpu",
    state_gb: float | None = None,
    rounds: int = 9,
    minutes: float = 12.0,
    folder: Path = ROOT,
    only: list[str] | None = None,
    crum: bool = False,
    host_state: bool = False,
    sizes: list[float] = SIZES_GB,
    quick: bool = False,
    brief: bool = False,
) -> dict[str, Any] | None:
    """Compare all libraries.

    Args:
        state_gb: size of the state (0.33 on a CPU, 10 on a GPU)
        rounds: maximum number of rounds
        minutes: start no round that would end after this time
        folder: where checkpoints are written, on the disk to measure
        only: only this library; may be repeated
        crum: compare a forked save with torch.save and Holdfast, by state size
        host_state: an array in NumPy, copied and written from a fork (--state-gb, 2 by default)
        sizes: GB, for --crum
        quick: a small model and one round, as a smoke test
        brief: one round with short iterations, for a machine that is lent for minutes
    """
    if host_state:
        with scratch(folder) as made:
            return host.report(state_gb or 2.0, made)
    scale, until = TrainingScale(), time.monotonic() + 60 * minutes - AFTER_ROUNDS_SECONDS
    if quick:
        scale = TrainingScale.small(device)
    elif state_gb is not None or device != "cpu":
        scale = TrainingScale.of_state(state_gb or 10.0, device)
        scale = dataclasses.replace(scale, batch=max(1, scale.batch // 3)) if brief else scale
    plan = BenchmarkOptions(
        scale=scale, folder=folder, only=only or [], k=3 if brief else 5, every_iterations=0 if brief else 3,
        rounds=1 if quick or brief else rounds, starts=BRIEF_STARTS if brief else 2 if device == "cpu" else 1,
        until=until,
    )  # fmt: skip
    if crum:
        for size in sizes:
            scale, only = TrainingScale.with_short_iterations(size), [*BESIDE_FORK, FORK]
            until = time.monotonic() + 60 * minutes - AFTER_ROUNDS_SECONDS
            _compare(dataclasses.replace(plan, scale=scale, only=only, until=until))
    else:
        _compare(plan)
    return None


def _compare(plan: BenchmarkOptions) -> None:
    with scratch(plan.folder) as made:
        for line in facts(made, plan.scale.device):
            print(line, flush=True)
        plan = dataclasses.replace(plan, folder=made)
        report(CheckpointBenchmark(plan).everything(), plan)


if __name__ == "__main__":
    run(main)
