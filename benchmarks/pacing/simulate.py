"""`python -m benchmarks.pacing.simulate`: all policies on a large simulated job with failures."""

from __future__ import annotations

import argparse
import json

from .at_scale import at_scale, regret_of_change, regret_of_wrong_prior


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pacing.simulate", description=__doc__)
    parser.add_argument(
        "--seeds", type=int, default=6, help="number of runs, with the same failures for all policies"
    )
    seeds = range(parser.parse_args().seeds)
    print("16,384 GPUs for 54 days, a failure every 3.09 h; a stall of 5 s, durable 120 s later, restart 300 s;")
    print(f"{len(seeds)} runs, median and quartiles; regret: ETTR lost against knowing the rate")
    figures: dict[str, float] = {}
    for row in at_scale(seeds):
        name = "".join(letter if letter.isalnum() else "_" for letter in row.name).replace("__", "_").strip("_")
        figures[f"ettr_16k_{name}"] = row.median
        spread = f"({row.low:.2%}-{row.high:.2%})"
        print(f"  {row.name:<24} ETTR {row.median:.2%} {spread}, {row.checkpoints:,.0f} checkpoints", flush=True)
    for words, points in (
        ("prior_10_times_too_long", 100 * regret_of_wrong_prior(10, seeds)),
        ("prior_10_times_too_short", 100 * regret_of_wrong_prior(0.1, seeds)),
        ("rate_4_times", 100 * regret_of_change(4, seeds)),
        ("rate_a_quarter", 100 * regret_of_change(0.25, seeds)),
    ):
        figures[f"regret_{words}_points"] = points
        print(f"  regret, {words.replace('_', ' ')}: {points:.2f} points of ETTR", flush=True)
    print(f"figures: {json.dumps({name: round(value, 5) for name, value in figures.items()})}")


if __name__ == "__main__":
    main()
