"""`python -m benchmarks.checkpoint`; `make bench-checkpoint` installs the other libraries first."""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
import tempfile
import time
from pathlib import Path

from . import host_state
from .calling import ROOT
from .driver import CheckpointBenchmark, removed_at_exit
from .figures import report
from .machine import facts
from .registry import CONTENDERS, FORK, OURS, PLAIN, TORCH_SAVE
from .results import BenchmarkOptions
from .scale import TrainingScale

SIZES_GB = (0.1, 0.3, 1.0, 3.0, 10.0)
BESIDE_FORK = (PLAIN, TORCH_SAVE, OURS)
BRIEF_STARTS = 4
AFTER_ROUNDS_SECONDS = 120
"""Approximate duration of everything after the rounds."""


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # run the cleanup on SIGTERM
    if options.host_state:
        with tempfile.TemporaryDirectory(prefix=".bench-", dir=options.folder) as folder:
            host_state.report(options.state_gb or 2.0, Path(folder))
    elif options.crum:
        for size in options.sizes:
            _run(options, TrainingScale.with_short_iterations(size), [*BESIDE_FORK, FORK])
    else:
        _run(options, _scale(options), options.only or [])


def _run(options: argparse.Namespace, scale: TrainingScale, only: list[str]) -> None:
    until = time.monotonic() + 60 * options.minutes - AFTER_ROUNDS_SECONDS
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=options.folder))
    with removed_at_exit(folder):
        for line in facts(folder, options.device):
            print(line, flush=True)
        plan = BenchmarkOptions(
            scale=scale,
            folder=folder,
            only=only,
            k=3 if options.brief else 5,
            every_iterations=0 if options.brief else 3,
            rounds=1 if options.quick or options.brief else options.rounds,
            starts=BRIEF_STARTS if options.brief else 2 if options.device == "cpu" else 1,
            until=until,
            idle_pairs=6 if options.quick else 60,
            growth_checkpoints=60 if options.quick else 1000,
        )
        report(CheckpointBenchmark(plan).everything(), plan)


def _scale(options: argparse.Namespace) -> TrainingScale:
    if options.quick:
        return TrainingScale.small(options.device)
    if options.state_gb is None and options.device == "cpu":
        return TrainingScale()
    scale = TrainingScale.of_state(options.state_gb or 10.0, options.device)
    return dataclasses.replace(scale, batch=max(1, scale.batch // 3)) if options.brief else scale


def _options() -> argparse.Namespace:
    names = ", ".join(entry.name for entry in CONTENDERS)
    parser = argparse.ArgumentParser(prog="make bench-checkpoint", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--state-gb", type=float, help="size of the state (0.33 on a CPU, 10 on a GPU)")
    parser.add_argument("--rounds", type=int, default=9, help="maximum number of rounds")
    parser.add_argument(
        "--minutes", type=float, default=12.0, help="start no round that would end after this time"
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT, help="where checkpoints are written, on the disk to measure"
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help=f"only this library, without the measurements of Holdfast alone; may be repeated: {names}",
    )
    parser.add_argument(
        "--crum", action="store_true", help="compare a forked save with torch.save and Holdfast, by state size"
    )
    parser.add_argument(
        "--host-state",
        action="store_true",
        help="an array in NumPy, copied and written from a fork (--state-gb, 2 by default)",
    )
    parser.add_argument("--sizes", type=float, nargs="+", default=SIZES_GB, metavar="GB", help="sizes for --crum")
    parser.add_argument("--quick", action="store_true", help="a small model and one round, as a smoke test")
    parser.add_argument(
        "--brief",
        action="store_true",
        help="one round with short iterations, for a machine that is lent for minutes",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
