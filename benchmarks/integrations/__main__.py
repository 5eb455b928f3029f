"""Kill each framework's script at random updates and let it resume, by the framework itself and by Holdfast.

    make bench-integrations ARGS='--only lightning --kills 5'
    make bench-integrations ARGS='--only transformers --sigterm'

Every script runs once without kills and once with them. A run is exact if each update has the losses and samples
of the uninterrupted one, bit for bit, also where it ran twice, and each sample occurs once an epoch. `overhead` is
the cost of a session in an iteration without a checkpoint.
"""

from __future__ import annotations

import itertools
import pkgutil
import signal
import statistics
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

from benchmarks.harness import aligned, run, scratch
from benchmarks.integrations import jobs, overhead
from benchmarks.integrations.kills import Comparison, compare, entries
from benchmarks.integrations.kills import run as kill_and_run
from holdfast.format.manifest import MANIFEST
from holdfast.format.manifest_files import ManifestFile, decode_manifest

RESUMED_BY = ("framework", "holdfast")
WITHOUT_OWN_RESUME = ("plain", "stateful_loader")
"""Scripts without a framework that saves checkpoints."""
DISTRIBUTIONS = {"fabric": "lightning", "stateful_loader": "torchdata", "plain": "torch"}
"""Where the name of a script is not that of its framework's distribution."""


class Row(NamedTuple):
    script: str
    resumed_by: str
    lines: int | None
    result: Comparison | None
    """`None` if a start after a kill failed."""
    blocked_seconds: float | None
    error: str = ""

    @property
    def outcome(self) -> str:
        if self.result is None:
            return f"a start after a kill fails: {self.error}"
        return "exact" if self.result.exact else "not exact"

    def cells(self) -> list[str]:
        blocked = None if self.blocked_seconds is None else f"{self.blocked_seconds * 1000:.1f}"
        cells: list[object] = [f"{self.script} {_version(self.script)}", self.resumed_by, self.lines]
        if (result := self.result) is None:
            cells += ["fails", None, None, None, None]
        else:
            wrong = len(set(result.different) | set(result.missing))
            resume = f"{statistics.median(result.resume_seconds):.1f}" if result.resume_seconds else None
            cells += ["yes" if result.exact else "no", f"{wrong} of {result.updates}"]
            cells += [result.repeated_samples, result.repeated_updates, resume]
        return ["–" if cell is None else str(cell) for cell in [*cells, blocked]]


OVERHEAD = "overhead"
OVERHEAD_HEAD = ("script", "workers", "CPU µs an iteration without", "with", "median cost µs", "10th percentile")
HEAD = (
    *("script", "resumed by", "lines", "exact", "wrong updates", "samples twice", "updates repeated"),
    *("resume s", "blocked ms"),
)
LEGEND = """
lines           lines of the script that name Holdfast or its session
wrong updates   with another loss or other samples than without kills
resume s        from the start of the process to the end of its first update, median
blocked ms      time that a checkpoint blocks training, median"""
NAMES = [module.name for module in pkgutil.iter_modules(jobs.__path__)]


def main(
    only: list[Literal[*NAMES, OVERHEAD]] | None = None, kills: int = 5, seed: int = 1, sigterm: bool = False
) -> dict[str, str | float]:  # fmt: skip
    """Compare the scripts.

    Args:
        only: scripts to run, and `overhead`; default: all whose framework is installed, and `overhead`
        seed: of the updates after which a kill comes
        sigterm: end each start by SIGTERM, for which Transformers has JIT checkpoints
    """
    if only is None:
        only = [*(name for name in NAMES if _version(name)), OVERHEAD]
        print(f"not installed here: {', '.join(set(NAMES) - set(only)) or 'nothing'}", flush=True)
    started, rows = time.monotonic(), []
    with scratch() as folder:
        for script, resumed_by in itertools.product((name for name in only if name != OVERHEAD), RESUMED_BY):
            if resumed_by == "framework" and script in WITHOUT_OWN_RESUME:
                continue
            row = _measure(script, resumed_by, folder / script / resumed_by, kills, seed, sigterm)
            rows.append(row)
            seconds = time.monotonic() - started
            print(f"[{seconds:5.0f} s] {script}, resumed by {resumed_by}: {row.outcome}", flush=True)
    if rows:
        print("", *aligned([HEAD, *(row.cells() for row in rows)], left=2), LEGEND, sep="\n")
    costs = overhead.measure() if OVERHEAD in only else []
    if costs:
        print("", *aligned([OVERHEAD_HEAD, *map(_cost_cells, costs)]), sep="\n")
    return {f"{row.script}_{row.resumed_by}": row.outcome for row in rows} | {
        f"{cost.script}_{cost.workers}_workers_overhead_microseconds": round(cost.median_microseconds)
        for cost in costs
    }


def _cost_cells(cost: overhead.Cost) -> list[str]:
    without, with_holdfast = (statistics.median(each) * 1e6 for each in (cost.without, cost.with_holdfast))
    figures = without, with_holdfast, cost.median_microseconds, cost.undisturbed_microseconds
    return [f"{cost.script} {_version(cost.script)}", str(cost.workers), *(f"{figure:.0f}" for figure in figures)]


def _measure(script: str, resumed_by: str, folder: Path, kills: int, seed: int, sigterm: bool) -> Row:
    by, options = (signal.SIGTERM, ["--preempted"]) if sigterm else (signal.SIGKILL, [])
    uninterrupted = kill_and_run(script, resumed_by, folder / "uninterrupted", arguments=options)
    result, error = None, ""
    try:
        more = {"kills": kills, "seed": seed, "by": by, "arguments": options}
        result = compare(uninterrupted, kill_and_run(script, resumed_by, folder / "killed", **more))
    except RuntimeError as failed:
        error = str(failed).splitlines()[-1]
    lines, blocked = None, [each["seconds"] for each in entries(uninterrupted) if each["event"] == "blocked"]
    if resumed_by == "holdfast":
        lines, blocked = _lines(script), _recorded_stalls(folder / "uninterrupted" / "store")
    return Row(script, resumed_by, lines, result, statistics.median(blocked) if blocked else None, error)


def _recorded_stalls(store: Path) -> list[float]:
    """Return the seconds that training stood still for each checkpoint, which its manifest records."""
    manifests = [decode_manifest(ManifestFile, path.read_bytes()) for path in store.glob(f"*/*/{MANIFEST}")]
    return [manifest.timings["stall_seconds"] for manifest in manifests]


def _lines(script: str) -> int:
    """Count the statements of a script that name Holdfast or its session."""
    source = (Path(jobs.__file__).parent / f"{script}.py").read_text()
    lines = [line.strip() for line in source.splitlines()]
    return sum(
        ("holdfast" in line or "session" in line) and not line.startswith(("#", '"""')) and "resume_by" not in line
        for line in lines
    )


def _version(script: str) -> str:
    try:
        return version(DISTRIBUTIONS.get(script, script))
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    run(main)
