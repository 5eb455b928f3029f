"""`make bench-pacing`: whether checkpoints stay within the budget, and how the controller reacts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.harness import ROOT, Table, run, seconds_of
from holdfast.pacing import FailureHistory, PacingSettings, Profile, plan, policies
from holdfast.pacing.failures import FailureEstimate

from . import convergence, shapes, written
from .agreement import ettr_max_error
from .noise_cases import NOISE_CASES, simulated_noise
from .noisy import BUDGET, EVIDENCE_CHECKPOINTS, BudgetRecord, noisy_training
from .paired import overhead
from .reactions import outside_slowdown_ratio, recovered_ratio, slow_disk_intervals
from .recorded import figures_of

BUDGETS = {"1": 0.01, "3_5": 0.035, "10": 0.10}
PLANS = 200
NOISE_SEEDS, NOISE_SECONDS = 3, 7200.0
LOAD = "other work on 0, 50 and 100 % of the cores by turns:"


def main(
    minutes: float = 5, folder: Path = ROOT, trace: Path | None = None, cluster_nodes: int | None = None
) -> dict[str, float]:
    """Measure all, or compare the policies on a trace.

    Args:
        minutes: duration at each budget
        folder: where checkpoints are written, on the disk to measure
        trace: only compare the policies on this fault trace, a JSON list of events
        cluster_nodes: nodes of its cluster; default: those that have a fault
    """
    if trace is not None:
        return figures_of(trace, cluster_nodes)
    slow, recovered, outside = slow_disk_intervals(), recovered_ratio(), outside_slowdown_ratio()
    print("the controller on simulated jobs:")
    print(f"  a disk 4 times slower: within the budget again after {slow} intervals")
    print(f"  five intervals after its recovery: the interval is {recovered:.2f} of the old one")
    print(f"  everything 30 % slower: the interval becomes {outside:.2f} of the old one", flush=True)
    figures: dict[str, float] = {
        "slow_disk_intervals": slow, "recovered_k_ratio": recovered, "outside_slowdown_k_ratio": outside
    }  # fmt: skip
    for compress in (False, True):
        figures |= _simulated_noise(compress=compress)
    figures |= shapes.figures() | convergence.main() | written.figures(folder)
    figures["plan_ms"] = round(1000 * max(_plan_seconds(name) for name in policies), 4)
    print(f"the plan of the slowest policy takes {figures['plan_ms']:.3f} ms", flush=True)
    figures["ettr_max_error"] = ettr_max_error()
    print(f"ETTR by its formula and by simulation differ by {figures['ettr_max_error']:.5f} at most", flush=True)
    return figures | _overheads(minutes, folder) | _noise(minutes, folder) | _noise(minutes, folder, compress=True)


def _overheads(minutes: float, folder: Path) -> dict[str, float]:
    print(f"training with and without Holdfast in turns, {minutes:g} minutes at each budget:")
    columns = {"budget": ".1%"} | dict.fromkeys(("overhead", "std error", " control", "reported"), "+.2%")
    table, figures, errors = Table(columns | dict.fromkeys(("pairs", "every", "state MB"), ",.0f"), "  "), {}, []
    for name, budget in BUDGETS.items():
        found = overhead(budget, minutes, folder)
        table.row(budget, *found[:-1], found.state_bytes / 1e6)
        figures[f"overhead_at_{name}"] = round(100 * found.measured, 3)
        errors.append(100 * abs(found.measured - found.reported))
    return figures | {"report_error_points": round(max(errors), 3)}


def _simulated_noise(*, compress: bool) -> dict[str, float]:
    with_compression = " with compression" if compress else ""
    print(f"simulated jobs of {NOISE_SECONDS / 3600:g} h{with_compression} at {BUDGET:.1%}, {LOAD}\n"
          "  true overhead, share of the time over the budget, changes an hour")  # fmt: skip
    every: list[BudgetRecord] = []
    for name, case in NOISE_CASES.items():
        seeds = range(NOISE_SEEDS)
        runs = [simulated_noise(case, seed, seconds=NOISE_SECONDS, compress=compress) for seed in seeds]
        records, overheads = zip(*runs, strict=True)
        every += records
        shares = f"{_over_share(records):6.1%}  {_changes_an_hour(records):4.1f}"
        print(f"    {statistics.fmean(overheads):.2%}  {shares}  {name}", flush=True)
    return {f"simulated_{name}": value for name, value in _over_budget(every, compress=compress).items()}


def _noise(minutes: float, folder: Path, *, compress: bool = False) -> dict[str, float]:
    with_compression = " with compression" if compress else ""
    print(f"training at {BUDGET:.1%} for {minutes:g} minutes{with_compression}, {LOAD}")
    record = noisy_training(minutes, folder, compress=compress)
    figures = _over_budget([record], compress=compress)
    print(f"  {record.intervals} intervals in {record.seconds:.0f} s, at last every {record.interval} iterations")
    return {f"noisy_{name}": value for name, value in figures.items()}


def _over_budget(records: Sequence[BudgetRecord], *, compress: bool) -> dict[str, float]:
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


def _over_share(records: Sequence[BudgetRecord]) -> float:
    return sum(each.over_seconds for each in records) / sum(each.seconds for each in records)


def _changes_an_hour(records: Sequence[BudgetRecord]) -> float:
    return 3600 * sum(each.changes for each in records) / sum(each.seconds for each in records)


def _plan_seconds(policy: str) -> float:
    """Return the median seconds of a plan."""
    failures = FailureEstimate(count=3, exposure_seconds=1e6, world_size=64)
    profile = Profile(
        iteration_seconds=0.5, update_seconds=0.05, snapshot_seconds=0.4, persist_seconds=3.0, cost_seconds=0.05
    )
    settings = PacingSettings(policy=policy, every=50 if policy == "fixed" else None)
    histories = [FailureHistory(failures=failures.after(float(number))) for number in range(PLANS)]
    return statistics.median(seconds_of(partial(plan, profile, settings, history)) for history in histories)


if __name__ == "__main__":
    run(main)
