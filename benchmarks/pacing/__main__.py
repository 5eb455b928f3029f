"""`python -m benchmarks.pacing`: whether checkpointing keeps to its budget, and what a plan is worth."""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from pathlib import Path

from benchmarks.checkpoint.calling import ROOT
from holdfast.pacing import History, Profile, Settings, plan, policies
from holdfast.pacing.failures import Failures

from .agreement import ettr_max_error
from .paired import Overhead, overhead
from .reactions import outside_slowdown_ratio, recovered_ratio, slow_disk_intervals

BUDGETS = {"1": 0.01, "3_5": 0.035, "10": 0.10}
PLANS = 200


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that all is cleared away then, too
    figures: dict[str, float] = {}
    print("the controller on simulated jobs, on a clock of their own:", flush=True)
    figures["slow_disk_intervals"] = slow_disk_intervals()
    figures["recovered_k_ratio"] = recovered_ratio()
    figures["outside_slowdown_k_ratio"] = outside_slowdown_ratio()
    print(f"  a disk 4 times slower: within the budget again after {figures['slow_disk_intervals']} intervals")
    print(f"  as quick again: k after five intervals is {figures['recovered_k_ratio']:.2f} of what it was")
    print(f"  all else 30 % slower: k becomes {figures['outside_slowdown_k_ratio']:.2f} of what it was")
    figures["plan_ms"] = round(1000 * max(_plan_seconds(name) for name in policies), 4)
    print(f"the plan of the slowest policy takes {figures['plan_ms']:.3f} ms", flush=True)
    figures["ettr_max_error"] = round(ettr_max_error()[0], 5)
    print(f"ETTR by its formula and by simulation differ by {figures['ettr_max_error']:.5f} at most", flush=True)

    print(f"training with Holdfast and without, by turns for {options.minutes:g} minutes at each:")
    print("  budget    overhead   std error   nothing at all   as reported   pairs   every     state")
    errors = []
    for name, budget in BUDGETS.items():
        found = overhead(budget, options.minutes, options.folder)
        print(_row(found), flush=True)
        figures[f"overhead_at_{name}"] = round(100 * found.measured, 3)
        errors.append(100 * abs(found.measured - found.reported))
    figures["report_error_points"] = round(max(errors), 3)
    print(f"figures: {json.dumps(figures)}")


def _row(found: Overhead) -> str:
    return (
        f"  {found.budget:6.1%}  {found.measured:+9.2%}   ±{found.error:8.2%}   {found.control:+13.2%}"
        f"   {found.reported:+10.2%}   {found.pairs:>5}   {found.interval:>5}   {found.state_bytes / 1e6:,.0f} MB"
    )


def _plan_seconds(policy: str) -> float:
    """What the median plan takes, in seconds."""
    seconds = []
    failures = Failures(count=3, exposure_seconds=1e6, world_size=64)
    profile = Profile(
        iteration_seconds=0.5, update_seconds=0.05, snapshot_seconds=0.4, persist_seconds=3.0, cost_seconds=0.05
    )
    settings = Settings(policy=policy, every=50 if policy == "fixed" else None)
    for number in range(PLANS):
        now = History(failures=failures.after(float(number)))
        started = time.perf_counter()
        plan(profile, settings, now)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-pacing", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5, help="of turns, at each budget")
    parser.add_argument(
        "--folder", type=Path, default=ROOT, help="where checkpoints are written, on the disk meant"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
