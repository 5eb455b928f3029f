"""`python -m benchmarks.pacing.simulate`: all policies on a large simulated job with failures."""

from __future__ import annotations

import re

from benchmarks.harness import run

from .at_scale import at_scale, regret_of_change, regret_of_wrong_prior


def main(seeds: int = 6) -> dict[str, float]:
    """Run all policies.

    Args:
        seeds: number of runs, with the same failures for all policies
    """
    runs, figures = range(seeds), dict[str, float]()
    print("16,384 GPUs for 54 days, a failure every 3.09 h; a stall of 5 s, durable 120 s later, restart 300 s;")
    print(f"{seeds} runs, median and quartiles; regret: ETTR lost against knowing the rate")
    for row in at_scale(runs):
        figures[f"ettr_16k_{re.sub('[^0-9A-Za-z]+', '_', row.name).strip('_')}"] = row.median
        spread = f"({row.low:.2%}-{row.high:.2%})"
        print(f"  {row.name:<24} ETTR {row.median:.2%} {spread}, {row.checkpoints:,.0f} checkpoints", flush=True)
    for words, regret in (
        ("prior_10_times_too_long", regret_of_wrong_prior(10, runs)),
        ("prior_10_times_too_short", regret_of_wrong_prior(0.1, runs)),
        ("rate_4_times", regret_of_change(4, runs)),
        ("rate_a_quarter", regret_of_change(0.25, runs)),
    ):
        figures[f"regret_{words}_points"] = 100 * regret
        print(f"  regret, {words.replace('_', ' ')}: {100 * regret:.2f} points of ETTR", flush=True)
    return figures


if __name__ == "__main__":
    run(main)
