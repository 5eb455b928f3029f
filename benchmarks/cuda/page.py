"""`python -m benchmarks.cuda.page`: writes docs/cuda.md from the results in benchmarks/results."""

from __future__ import annotations

import collections
import textwrap

from benchmarks.harness import ROOT

from .results import ResultFile, describe, status_of
from .stages import STAGES, Stage

PAGE = ROOT / "docs/cuda.md"
WIDTH = 118
RESULTS = ROOT / "benchmarks/results"

INTRODUCTION = """\
# CUDA and other accelerators

<!-- written by `python -m benchmarks.cuda.page` from benchmarks/results; do not edit -->

{summary}

A result stays on this page until a run on a device replaces it, also if a defect was fixed since. `make test` runs
the code that copies from devices on a simulated device, whose streams finish as late as the waits allow. It finds
the two defects of the run below when they are reintroduced. The simulation has no timing, and only the
interleavings that it knows.

ROCm uses the names of CUDA in torch, and the same code. So does XPU, except that its host memory is not pinned,
which makes copies slower. Neither was run on a device.

## Stages

| stage | what is run | goal | estimate | newest result |
|---|---|---|---|---|
"""
HOW = """
## How to run them

On a machine with a GPU, from the source tree:

```
make cuda-check CUDA_MINUTES=9                          # in the environment of the benchmarks
make cuda-check CUDA_MINUTES=9 CUDA_PYTHON=python3      # with the packages of the machine, without a download
make cuda-check RESUME=cuda.jsonl                       # what is missing in the results of earlier runs
make cuda-check RESUME=cuda.jsonl ARGS='--only host --only hash --only managed'     # after those of nine minutes
make cuda-check ARGS='--only copy --only restore'       # these stages; --list names all
```

Python needs torch with CUDA (2.11 or later to compare with all libraries) and the dependencies in
`pyproject.toml`. For a machine without a network, `benchmarks/cuda/collect_wheels.sh` collects the wheels that a
common image of Python 3.12 lacks. The source tree is not installed.

Each stage is a process with its own time limit; a failed stage does not stop the next one. Results are lines of
JSON in `cuda.jsonl`, written as they come. The table and the figures are printed at the end, also when the time
is over. `--device cpu --small` runs the stages without a device, as `make test-full` does.

To publish results, move the file to `benchmarks/results/cuda-DATE.jsonl`, run `python -m benchmarks.cuda.page`,
and put the first sentence of the page into README.md and install.md: tests compare all three.

A stage is a line in `benchmarks/cuda/stages.py` and a module in the same folder with `CASES`: the name of each
case and a function that returns its values.
"""


def files() -> list[ResultFile]:
    """Return the results, the oldest first."""
    return [ResultFile.read(path) for path in sorted(RESULTS.glob("cuda-*.jsonl"))]


def merged(results: list[ResultFile]) -> ResultFile:
    """Return all results together; a newer one of a case replaces an older one."""
    return ResultFile(RESULTS, [row for each in results for row in each.rows])


def summary(results: list[ResultFile]) -> str:
    """Say in a sentence what was run on devices; README and the installation guide say the same."""
    together = merged(results)
    runs = together.runs()
    if not runs:
        return "No stage was run on a device."
    newest = runs[-1]
    where = f"{newest['name']} with torch {newest['torch']}, {newest['at'][:10]}"
    times = "once" if len(runs) == 1 else f"{len(runs)} times, last"
    counts = collections.Counter(_kind(status_of(together, stage.name)) for stage in STAGES)
    parts = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    return f"CUDA was run {times} on one {where}: of {len(STAGES)} stages, {parts}."


def _kind(status: str) -> str:
    return status.partition(":")[0].replace("MISSED", "missed").replace(", incomplete", " and incomplete")


def page(results: list[ResultFile]) -> str:
    together = merged(results)
    text = INTRODUCTION.format(summary=textwrap.fill(summary(results), WIDTH))
    text += "".join(_line(stage, together) for stage in STAGES)
    for each in reversed(results):
        text += "".join(_run(each))
    return text + HOW


def _line(stage: Stage, results: ResultFile) -> str:
    estimate = f"{stage.estimate_seconds} s"
    status = _kind(status_of(results, stage.name))
    more = " (only where it is named)" if stage.by_name else ""
    return f"| `{stage.name}` | {stage.what} | {stage.goal} | {estimate} | {status}{more} |\n"


def _run(results: ResultFile) -> list[str]:
    """Return the section of one file."""
    facts = results.runs()[0]
    lines = [f"\n## {facts['at'][:10]}: {facts['name']}\n\n"]
    lines.append(f"torch {facts['torch']}, {facts['cores']} cores")
    lines.append(f"; {facts['note']}.\n\n" if facts.get("note") else ".\n\n")
    lines.append("| stage | case | result |\n|---|---|---|\n")
    for stage in STAGES:
        cases, end = results.cases(stage.name), results.end(stage.name)
        lines += [f"| `{stage.name}` | {case} | {describe(row)} |\n" for case, row in cases.items()]
        if end is not None and end["end"] != "complete":
            lines.append(f"| `{stage.name}` | | {end['end']}: {end['reason']} |\n")
    return lines


if __name__ == "__main__":
    PAGE.write_text(page(files()))
