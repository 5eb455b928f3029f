"""`make cuda-check`: stages on an accelerator, in a number of minutes."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Literal

from benchmarks.harness import run

from .driver import Driver, DriverOptions
from .results import ResultFile
from .stages import STAGES, Context, by_name


def main(
    device: Literal["cuda", "cpu"] = "cuda",
    minutes: float = 9.0,
    results: Path = Path("cuda.jsonl"),
    resume: Path | None = None,
    only: list[Literal[*(each.name for each in STAGES)]] | None = None,
    small: bool = False,
    folder: Path | None = None,
    disk: Path | None = None,
    list: bool = False,  # noqa: A002 - the name of the option
    stage: str = "",
    done: list[str] | None = None,
) -> None:
    """Run stages.

    Args:
        device: cpu tests the stages themselves
        minutes: all together; the table is printed at the end
        results: file for lines of JSON
        resume: a file of results: run what is missing in it, and add to it
        only: may be repeated
        small: small sizes, for a CPU
        folder: where checkpoints are written (/dev/shm)
        disk: where restores from a disk read
        list: print the stages with their estimates
        stage: run the cases of this stage in this process, as the driver does
        done: with --stage, a case that is left out
    """
    disk = disk or Path(tempfile.gettempdir())
    if stage:
        run_cases(stage, Context(device, small, folder, disk), done or [])
    elif list:
        for each in STAGES:
            print(f"{each.name:<8} {each.estimate_seconds:>4} s, at most {each.limit_seconds:>3} s  {each.what}")
    else:
        file = ResultFile.read(resume or results)
        if resume is None and file.rows:
            sys.exit(f"{results} has results already; --resume {results} adds what is missing")
        file.path.parent.mkdir(parents=True, exist_ok=True)
        options = DriverOptions(
            device=device, small=small, minutes=minutes, names=only or (), folder=folder, disk=disk
        )
        sys.exit(Driver(options, file).run())


def run_cases(stage: str, context: Context, done: list[str]) -> None:
    """Print a line of JSON for each case."""
    module = importlib.import_module(f"{__package__}.{by_name(stage).module}")
    count = getattr(module, "SMALL_CASES", None) if context.small else None
    for name, case in itertools.islice(module.CASES.items(), count):
        if name in done:
            continue
        try:
            result = case(context)
            row = {"case": name, "values": result.values, "met": result.met, "note": result.note}
        except Exception as error:  # the next case runs whatever happened before
            traceback.print_exc()
            row = {"case": name, "error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    run(main)
