"""`python -m benchmarks.pacing`: whether checkpoints stay within the budget, and how the controller reacts."""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from pathlib import Path

from benchmarks.checkpoint.calling import ROOT
from holdfast.pacing import FailureHistory, PacingSettings, Profile, plan, policies
from holdfast.pacing.failures import FailureEstimate

from . import convergence, shapes, written
from .agreement import ettr_max_error
from .noise_cases import NOISE_CASES, simulated_noise
from .noisy import BUDGET, EVIDENCE_CHECKPOINTS, BudgetRecord, noisy_training
from .paired import OverheadResult, overhead
from .reactions import outside_slowdown_ratio, recovered_ratio, slow_disk_intervals
from .recorded import figures_of

BUDGETS = {"1": 0.01, "3_5": 0.035, "10": 0.10}
PLANS = 200
NOISE_SEEDS, NOISE_SECONDS = 3, 7200.0


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # run the cleanup on SIGTERM
    if options.trace is not None:
        print(f"figures: {json.dumps(figures_of(options.trace, options.cluster_nodes))}")
        return
    figures: dict[str, float] = {}
    print("the controller on simulated jobs:", flush=True)
    figures["slow_disk_intervals"] = slow_disk_intervals()
    figures["recovered_k_ratio"] = recovered_ratio()
    figures["outside_slowdown_k_ratio"] = outside_slowdown_ratio()
    print(f"  a disk 4 times slower: within the budget again after {figures['slow_disk_intervals']} intervals")
    print(
        f"  five intervals after its recovery: the interval is {figures['recovered_k_ratio']:.2f} of the old one"
    )
    print(
        f"  everything 30 % slower: the interval becomes {figures['outside_slowdown_k_ratio']:.2f} of the old one"
    )
    for compress in (False, True):
        figures |= _simulated_noise(compress=compress)
    figures |= shapes.figures()
    figures |= convergence.figures()
    figures |= written.figures(options.folder)
    figures["plan_ms"] = round(1000 * max(_plan_seconds(name) for name in policies), 4)
    print(f"the plan of the slowest policy takes {figures['plan_ms']:.3f} ms", flush=True)
    figures["ettr_max_error"] = round(ettr_max_error()[0], 5)
    print(f"ETTR by its formula and by simulation differ by {figures['ettr_max_error']:.5f} at most", flush=True)

    print(f"training with and without Holdfast in turns, {options.minutes:g} minutes at each budget:")
    print("  budget    overhead   std error          control      reported   pairs   every     state")
    errors = []
    for name, budget in BUDGETS.items():
        found = overhead(budget, options.minutes, options.folder)
        print(_row(found), flush=True)
        figures[f"overhead_at_{name}"] = round(100 * found.measured, 3)
        errors.append(100 * abs(found.measured - found.reported))
    figures["report_error_points"] = round(max(errors), 3)
    for compress in (False, True):
        figures |= _noise(options.minutes, options.folder, compress=compress)
    print(f"figures: {json.dumps(figures)}")


def _row(found: OverheadResult) -> str:
    return (
        f"  {found.budget:6.1%}  {found.measured:+9.2%}   ±{found.error:8.2%}   {found.control:+13.2%}"
        f"   {found.reported:+10.2%}   {found.pairs:>5}   {found.interval:>5}   {found.state_bytes / 1e6:,.0f} MB"
    )


def _simulated_noise(*, compress: bool) -> dict[str, float]:
    with_compression = " with compression" if compress else ""
    print(
        f"simulated jobs of {NOISE_SECONDS / 3600:g} h{with_compression} at {BUDGET:.1%}, other work on 0, 50 and "
        "100 % of the cores by turns:\n  true overhead, share of the time over the budget, changes an hour"
    )
    every: list[BudgetRecord] = []
    for name, case in NOISE_CASES.items():
        runs = [
            simulated_noise(case, seed, seconds=NOISE_SECONDS, compress=compress) for seed in range(NOISE_SEEDS)
        ]
        records = [record for record, _ in runs]
        every += records
        overhead = statistics.fmean(overhead for _, overhead in runs)
        print(
            f"    {overhead:.2%}  {_over_share(records):6.1%}  {_changes_an_hour(records):4.1f}  {name}",
            flush=True,
        )
    return {f"simulated_{name}": value for name, value in _over_budget(every, compress=compress).items()}


def _noise(minutes: float, folder: Path, *, compress: bool) -> dict[str, float]:
    with_compression = " with compression" if compress else ""
    print(
        f"training at {BUDGET:.1%} for {minutes:g} minutes{with_compression}, other work on 0, 50 and 100 % of "
        "the cores by turns:"
    )
    record = noisy_training(minutes, folder, compress=compress)
    figures = _over_budget([record], compress=compress)
    print(f"  {record.intervals} intervals in {record.seconds:.0f} s, at last every {record.interval} iterations")
    return {f"noisy_{name}": value for name, value in figures.items()}


def _over_budget(records: list[BudgetRecord], *, compress: bool) -> dict[str, float]:
    """Print and return the figures of all jobs together, and the most intervals in a row of one."""
    share, changes = _over_share(records), _changes_an_hour(records)
    longest = max(each.longest_over for each in records)
    print(
        f"  the measured overhead of the newest window is over the budget for {share:.1%} of the time\n"
        f"  (from {EVIDENCE_CHECKPOINTS} checkpoints after the first plan on), {longest} intervals in a row;\n"
        f"  the interval changes {changes:.1f} times an hour; "
        f"{max(each.every_iteration for each in records)} checkpoints in a row began at an interval of 1",
        flush=True,
    )
    compressed = "compressed_" if compress else ""
    return {
        f"{compressed}over_budget_share": round(share, 3),
        f"{compressed}over_budget_intervals": longest,
        f"{compressed}interval_changes_per_hour": round(changes, 2),
    }


def _over_share(records: list[BudgetRecord]) -> float:
    return sum(each.over_seconds for each in records) / sum(each.seconds for each in records)


def _changes_an_hour(records: list[BudgetRecord]) -> float:
    return 3600 * sum(each.changes for each in records) / sum(each.seconds for each in records)


def _plan_seconds(policy: str) -> float:
    """Return the median seconds of a plan."""
    seconds = []
    failures = FailureEstimate(count=3, exposure_seconds=1e6, world_size=64)
    profile = Profile(
        iteration_seconds=0.5, update_seconds=0.05, snapshot_seconds=0.4, persist_seconds=3.0, cost_seconds=0.05
    )
    settings = PacingSettings(policy=policy, every=50 if policy == "fixed" else None)
    for number in range(PLANS):
        now = FailureHistory(failures=failures.after(float(number)))
        started = time.perf_counter()
        plan(profile, settings, now)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-pacing", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5, help="duration at each budget")
    parser.add_argument(
        "--folder", type=Path, default=ROOT, help="where checkpoints are written, on the disk to measure"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="only compare the policies on this fault trace, a JSON list of events",
    )
    parser.add_argument("--cluster-nodes", type=int, help="nodes of its cluster; default: those that have a fault")
    return parser.parse_args()


if __name__ == "__main__":
    main()
