"""`python -m benchmarks.checkpoint`; `make bench-checkpoint` sets up the other libraries before."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from .calling import ROOT
from .driver import Run, no_rubbish_left
from .figures import report
from .machine import facts
from .registry import CONTENDERS
from .results import Plan
from .scale import Scale

AFTER_ROUNDS_SECONDS = 120
"""What comes after the rounds takes about so long."""


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that all is cleared away then, too
    until = time.monotonic() + 60 * options.minutes - AFTER_ROUNDS_SECONDS
    folder = Path(tempfile.mkdtemp(prefix=".bench-", dir=options.folder))
    with no_rubbish_left(folder):
        for line in facts(folder, options.device):
            print(line, flush=True)
        plan = Plan(
            scale=_scale(options),
            folder=folder,
            only=options.only or [],
            k=5,
            every_iterations=3,
            rounds=1 if options.quick else options.rounds,
            until=until,
            idle_pairs=6 if options.quick else 60,
            growth_checkpoints=60 if options.quick else 1000,
        )
        report(Run(plan).everything(), plan)


def _scale(options: argparse.Namespace) -> Scale:
    if options.quick:
        return Scale.small(options.device)
    if options.state_gb is None and options.device == "cpu":
        return Scale()
    return Scale.of_state(options.state_gb or 10.0, options.device)


def _options() -> argparse.Namespace:
    names = ", ".join(entry.name for entry in CONTENDERS)
    parser = argparse.ArgumentParser(prog="make bench-checkpoint", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--state-gb", type=float, help="size of the state; 0.33 on a CPU, 10 on a GPU by default")
    parser.add_argument("--rounds", type=int, default=9, help="at most so many")
    parser.add_argument(
        "--minutes", type=float, default=12.0, help="no further round begins that takes it past this"
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT, help="where checkpoints are written, on the disk meant"
    )
    parser.add_argument("--only", action="append", metavar="NAME", help=f"may be repeated; there are: {names}")
    parser.add_argument("--quick", action="store_true", help="a small model and one round: does everything work?")
    return parser.parse_args()


if __name__ == "__main__":
    main()
