"""Kill each framework's script at random updates and let it resume, by the framework itself and by Holdfast.

    make bench-integrations ARGS='--only lightning --kills 5'
    make bench-integrations ARGS='--only transformers --sigterm'

Every script runs once without kills and once with them. A run is exact if each update has the losses and samples
of the uninterrupted one, bit for bit, also where it ran twice, and each sample occurs once an epoch. `overhead` is
the cost of a session in an iteration without a checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pkgutil
import signal
import statistics
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.integrations import jobs, overhead
from benchmarks.integrations.kills import Comparison, compare, entries, run
from holdfast.format.manifest import MANIFEST
from holdfast.format.manifest_files import ManifestFile, decode_manifest

RESUMED_BY = ("framework", "holdfast")
WITHOUT_OWN_RESUME = ("plain", "stateful_loader")
"""Scripts without a framework that saves checkpoints."""
DISTRIBUTIONS = {"fabric": "lightning", "stateful_loader": "torchdata", "plain": "torch"}
"""Where the name of a script is not that of its framework's distribution."""


@dataclasses.dataclass(kw_only=True)
class Row:
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
        result = self.result
        lines = "–" if self.lines is None else str(self.lines)
        blocked = "–" if self.blocked_seconds is None else f"{self.blocked_seconds * 1000:.1f}"
        start = [f"{self.script} {_version(self.script)}", self.resumed_by, lines]
        if result is None:
            return [*start, "fails", "–", "–", "–", "–", blocked]
        wrong = len(set(result.different) | set(result.missing))
        resume = f"{statistics.median(result.resume_seconds):.1f}" if result.resume_seconds else "–"
        return [
            *start,
            "yes" if result.exact else "no",
            f"{wrong} of {result.updates}",
            str(result.repeated_samples),
            str(result.repeated_updates),
            resume,
            blocked,
        ]


OVERHEAD = "overhead"
OVERHEAD_HEAD = ("script", "workers", "CPU µs an iteration without", "with", "median cost µs", "10th percentile")
HEAD = (
    *("script", "resumed by", "lines", "exact", "wrong updates", "samples twice", "updates repeated"),
    *("resume s", "blocked ms"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [module.name for module in pkgutil.iter_modules(jobs.__path__)]
    parser.add_argument(
        "--only", choices=[*names, OVERHEAD], nargs="*",
        help="scripts to run, and `overhead`; default: all whose framework is installed, and `overhead`",
    )  # fmt: skip
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1, help="seed of the updates after which a kill comes")
    parser.add_argument(
        "--sigterm",
        action="store_true",
        help="end each start by SIGTERM, for which Transformers has JIT checkpoints",
    )
    args = parser.parse_args()
    if args.only is None:
        args.only = [*(name for name in names if _version(name)), OVERHEAD]
        print(f"not installed here: {', '.join(set(names) - set(args.only)) or 'nothing'}", flush=True)
    started, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        for script in [name for name in args.only if name != OVERHEAD]:
            for resumed_by in RESUMED_BY:
                if resumed_by == "framework" and script in WITHOUT_OWN_RESUME:
                    continue
                row = _measure(script, resumed_by, Path(folder) / script / resumed_by, args)
                rows.append(row)
                seconds = time.monotonic() - started
                print(f"[{seconds:5.0f} s] {script}, resumed by {resumed_by}: {row.outcome}", flush=True)
    figures: dict[str, str | float] = {f"{row.script}_{row.resumed_by}": row.outcome for row in rows}
    if rows:
        _print_outcomes(rows)
    if OVERHEAD in args.only:
        costs = overhead.measure()
        _print_table([list(OVERHEAD_HEAD), *map(_cost_cells, costs)])
        figures |= {
            f"{cost.script}_{cost.workers}_workers_overhead_microseconds": round(cost.median_microseconds)
            for cost in costs
        }
    print("figures:", json.dumps(figures))


def _print_outcomes(rows: list[Row]) -> None:
    _print_table([list(HEAD), *(row.cells() for row in rows)])
    print(
        "\nlines           lines of the script that name Holdfast or its session\n"
        "wrong updates   with another loss or other samples than without kills\n"
        "resume s        from the start of the process to the end of its first update, median\n"
        "blocked ms      time that a checkpoint blocks training, median"
    )


def _cost_cells(cost: overhead.Cost) -> list[str]:
    without, with_holdfast = (statistics.median(each) * 1e6 for each in (cost.without, cost.with_holdfast))
    figures = without, with_holdfast, cost.median_microseconds, cost.undisturbed_microseconds
    return [f"{cost.script} {_version(cost.script)}", str(cost.workers), *(f"{figure:.0f}" for figure in figures)]


def _measure(script: str, resumed_by: str, folder: Path, args: argparse.Namespace) -> Row:
    by, options = (signal.SIGTERM, ["--preempted"]) if args.sigterm else (signal.SIGKILL, [])
    uninterrupted = run(script, resumed_by, folder / "uninterrupted", arguments=options)
    result, error = None, ""
    try:
        killed = run(
            script, resumed_by, folder / "killed", kills=args.kills, seed=args.seed, by=by, arguments=options
        )
        result = compare(uninterrupted, killed)
    except RuntimeError as failed:
        error = str(failed).splitlines()[-1]
    if resumed_by == "holdfast":
        blocked = _recorded_stalls(folder / "uninterrupted" / "store")
    else:
        blocked = [entry["seconds"] for entry in entries(uninterrupted) if entry["event"] == "blocked"]
    return Row(
        script=script,
        resumed_by=resumed_by,
        lines=_lines(script) if resumed_by == "holdfast" else None,
        result=result,
        error=error,
        blocked_seconds=statistics.median(blocked) if blocked else None,
    )


def _recorded_stalls(store: Path) -> list[float]:
    """Return the seconds that training stood still for each checkpoint, which its manifest records."""
    manifests = [decode_manifest(ManifestFile, path.read_bytes()) for path in store.glob(f"*/*/{MANIFEST}")]
    return [manifest.timings["stall_seconds"] for manifest in manifests]


def _source(script: str) -> str:
    return (Path(jobs.__file__).parent / f"{script}.py").read_text()


def _lines(script: str) -> int:
    """Count the statements of a script that name Holdfast or its session."""
    lines = [line.strip() for line in _source(script).splitlines()]
    return sum(
        ("holdfast" in line or "session" in line) and not line.startswith(("#", '"""')) and "resume_by" not in line
        for line in lines
    )


def _version(script: str) -> str:
    try:
        return version(DISTRIBUTIONS.get(script, script))
    except PackageNotFoundError:
        return ""


def _print_table(cells: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print()
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
