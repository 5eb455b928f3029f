"""`python -m benchmarks.cuda`, which `make cuda-check` runs: stages on an accelerator, in a number of minutes."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import traceback
from pathlib import Path

from .driver import Driver, DriverOptions
from .results import ResultFile
from .stages import STAGES, Context, by_name


def main() -> None:
    options = _options()
    if options.stage:
        run_cases(options)
        return
    if options.list:
        for stage in STAGES:
            print(
                f"{stage.name:<8} {stage.estimate_seconds:>4} s, at most {stage.limit_seconds:>3} s  {stage.what}"
            )
        return
    results = ResultFile.read(options.resume or options.results)
    if options.resume is None and results.rows:
        sys.exit(f"{options.results} has results already; --resume {options.results} adds what is missing")
    results.path.parent.mkdir(parents=True, exist_ok=True)
    chosen = DriverOptions(
        device=options.device,
        small=options.small,
        minutes=options.minutes,
        names=options.only or (),
        folder=options.folder,
        disk=options.disk,
    )
    sys.exit(Driver(chosen, results).run())


def run_cases(options: argparse.Namespace) -> None:
    """Run the cases of one stage in this process, and print a line of JSON for each."""
    stage = by_name(options.stage)
    context = Context(options.device, options.small, options.folder, options.disk)
    for name, run in importlib.import_module(f"{__package__}.{stage.module}").cases(context):
        if name in options.done:
            continue
        try:
            result = run()
            row = {"case": name, "values": result.values, "met": result.met, "note": result.note}
        except Exception as error:  # the next case runs whatever happened before
            traceback.print_exc()
            row = {"case": name, "error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(row), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu tests the stages themselves"
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="all together; the table is printed at the end")
    parser.add_argument("--results", type=Path, default=Path("cuda.jsonl"), help="file for lines of JSON")
    parser.add_argument("--resume", type=Path, help="a file of results: run what is missing in it, and add to it")
    parser.add_argument(
        "--only", action="append", metavar="STAGE", choices=[each.name for each in STAGES], help="may be repeated"
    )
    parser.add_argument("--small", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written (/dev/shm)")
    parser.add_argument(
        "--disk", type=Path, default=Path(tempfile.gettempdir()), help="where restores from a disk read"
    )
    parser.add_argument("--list", action="store_true", help="print the stages with their estimates")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    parser.add_argument("--done", action="append", default=[], help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
