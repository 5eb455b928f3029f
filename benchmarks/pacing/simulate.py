"""`python -m benchmarks.pacing.simulate`: every policy on simulated jobs that fail, COCI's comparison among them.

What is compared by which measure is said below each table; docs/pacing.md says what follows from it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from .agreement import ettr_max_error
from .at_scale import at_scale, regret_of_change, regret_of_wrong_prior
from .coci import MENDED, PUBLISHED
from .conditions import CONDITIONS, Compared, compared
from .drawing import picture
from .equal_number import killed_for_good, lost_by_one_failure

Figures = dict[str, float]

LEGEND = """\
(1) P_l as published  (2) P_l with the Jacobian: median and range over 5 models x 4 mean times between failures
(3) P_l, simulated    (4) time that was not useful, simulated: sums over {runs:,} runs of each policy
Changes are against the fixed interval; less is better. Hours: median and quartiles.
"""


def main() -> None:
    options = _options()
    figures: Figures = {}
    tables: dict[str, list[Compared]] = {}
    for condition in CONDITIONS:
        rows = tables[condition.key] = compared(condition, range(options.seeds))
        print(f"\n{condition.words}\n{_table(rows)}\n{_winners(rows)}", flush=True)
        figures |= _coci_figures(condition.key, rows)
    print(f"\n{LEGEND.format(runs=options.seeds * 12)}", flush=True)
    for part in (_same_number, _large_job, _agreement):
        figures |= part(options.seeds)
    if options.plot is not None:
        options.plot.write_text(picture(tables), encoding="utf-8")
        print(f"plot: {options.plot}")
    print(f"figures: {json.dumps({name: round(value, 5) for name, value in figures.items()})}")


def _table(rows: Sequence[Compared]) -> str:
    lines = [
        f"  {'':<22}{'checkpoints':>12}{'(1)':>9}{'':16}{'(2)':>9}{'':16}{'(3)':>9}{'(4)':>9}  ETTR     hours"
    ]
    for row in rows:
        late = row.late
        lines.append(
            f"  {row.name:<22}{row.checkpoints.median:>12.0f}"
            f"{change(row.published.median):>9} {_range(row.published.low, row.published.high):<15}"
            f"{change(row.true.median):>9} {_range(row.true.low, row.true.high):<15}"
            f"{change(row.lost):>9}{change(row.time):>9}  {row.ettr:.2%}"
            f"   {late.median:.3f} ({late.low:.3f}-{late.high:.3f})"
        )
    return "\n".join(lines)


def _winners(rows: Sequence[Compared]) -> str:
    """Who has the least by each measure; within a hundredth of it counts as the same."""
    measures = {
        "(1)": lambda row: row.published.median,
        "(2)": lambda row: row.true.median,
        "(3)": lambda row: row.lost,
        "(4)": lambda row: row.time,
    }
    said = []
    for name, of in measures.items():
        least = min(of(row) for row in rows)
        said.append(f"{name} {' = '.join(row.name for row in rows if of(row) <= least * 1.01)}")
    [coci] = [row for row in rows if row.name == PUBLISHED]
    beside = f"(1) {change(coci.published_vs_checkfreq.median)}, (2) {change(coci.true_vs_checkfreq.median)}"
    return f"  least: {'; '.join(said)}\n  {PUBLISHED} against checkfreq: {beside}"


def change(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.0f} %" if ratio < 10.995 else f"x {ratio:.0f}"


def _range(low: float, high: float) -> str:
    return f"({change(low)}, {change(high)})".replace(" %", "")


def _coci_figures(key: str, rows: Sequence[Compared]) -> Figures:
    """Changes against the fixed interval, in percent."""
    found = {row.name: row for row in rows}
    coci = found[PUBLISHED]
    ratios = {
        f"coci_{key}_as_published": coci.published.median,
        f"coci_{key}_as_published_best": coci.published.low,
        f"coci_{key}_true": coci.true.median,
        f"coci_{key}_true_best": coci.true.low,
        f"coci_{key}_time": coci.time,
        f"coci_{key}_vs_checkfreq_as_published": coci.published_vs_checkfreq.median,
        f"coci_{key}_vs_checkfreq_true": coci.true_vs_checkfreq.median,
        f"coci_mended_{key}_true": found[MENDED].true.median,
        f"convergence_{key}_true": found["convergence"].true.median,
        f"goodput_{key}_true": found["goodput"].true.median,
    }
    return {f"{name}_percent": 100 * (ratio - 1) for name, ratio in ratios.items()}


def _same_number(seeds: int) -> Figures:
    print("The same number of checkpoints: progress lost by a failure, against even spacing (40 of them)")
    figures: Figures = {}
    for length in (3, 5, 10):
        lost = lost_by_one_failure(length)
        figures[f"lost_ratio_{length}"] = lost["√ density"]
        print(f"  θT = {length:<3} " + "   ".join(f"{name} {each:.3f}" for name, each in lost.items()))
    print(
        "Failures once in the job's length, 20 segments, θT = 5: killed for good at a random moment, or finished"
    )
    killed = killed_for_good(runs=10 * seeds)
    for name, each in killed.items():
        print(
            f"  {name:<12} loss of what is left above the job's {each.gap:.4f}   completion +{each.completion:.1%}"
        )
    best, even = killed["√ density"], killed["uniform"]
    figures["killed_gap_ratio"] = best.gap / even.gap
    figures["killed_completion_points"] = 100 * (best.completion - even.completion)
    return figures


def _large_job(seeds: int) -> Figures:
    some = range(max(3, seeds // 10))
    print("\n16,384 GPUs for 54 days, a failure every 3.09 h; a stall of 5 s, durable 120 s later, restart 300 s;")
    print(f"{len(some)} runs, median and quartiles; regret: ETTR lost against knowing the rate")
    figures: Figures = {}
    for row in at_scale(some):
        name = "".join(letter if letter.isalnum() else "_" for letter in row.name).replace("__", "_").strip("_")
        figures[f"ettr_16k_{name}"] = row.median
        spread = f"({row.low:.2%}-{row.high:.2%})"
        print(f"  {row.name:<24} ETTR {row.median:.2%} {spread}, {row.checkpoints:,.0f} checkpoints")
    for words, points in (
        ("prior_10_times_too_long", 100 * regret_of_wrong_prior(10, some)),
        ("prior_10_times_too_short", 100 * regret_of_wrong_prior(0.1, some)),
        ("rate_4_times", 100 * regret_of_change(4, some)),
        ("rate_a_quarter", 100 * regret_of_change(0.25, some)),
    ):
        figures[f"regret_{words}_points"] = points
        print(f"  regret, {words.replace('_', ' ')}: {points:.2f} points of ETTR")
    return figures


def _agreement(seeds: int) -> Figures:
    worst, where = ettr_max_error()
    print(f"\nformula for the ETTR against the simulator, 50 points: at most {worst:.4f} apart, at {where}")
    return {"ettr_max_error": worst}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pacing.simulate", description=__doc__)
    parser.add_argument(
        "--seeds", type=int, default=60, help="runs of each job; the same failures for all policies"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="where to draw what the tables say")
    return parser.parse_args()


if __name__ == "__main__":
    main()
