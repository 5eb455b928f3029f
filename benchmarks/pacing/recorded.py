"""All policies on a recorded fault trace, against the best fixed interval that a search finds on it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from holdfast.pacing import FailureEstimate, PacingSettings, policies
from holdfast.simulation import (
    FailureKnowledge,
    FaultTrace,
    SimulatedJob,
    SimulationOutcome,
    TraceFailures,
    parse_trace,
    simulate,
)

GPUS_PER_NODE = 8
SPARE_SHARE = 0.1
HARDWARE = "Hardware Failure"
ACCELERATED = 5.0
JOB = SimulatedJob(
    total_iterations=10**12, iteration_seconds=5.0, cost_seconds=5.0, lag_seconds=115.0, restart_seconds=300.0
)
REPLAN_SECONDS = 1800.0
SEARCHED = 40
"""Fixed intervals that are tried, from the shortest to a hundred times the optimum of a constant rate."""


@dataclass(frozen=True, slots=True)
class TraceResult:
    """ETTR of each policy on one variant of a trace."""

    variant: str
    trace: FaultTrace
    best_interval: int
    best_ettr: float
    outcomes: dict[str, SimulationOutcome]

    @property
    def default_ratio(self) -> float:
        """ETTR of the default policy as a share of that of the best fixed interval."""
        return self.outcomes[PacingSettings().policy].ettr / self.best_ettr


def variants(path: Path) -> dict[str, FaultTrace]:
    """Return all faults, those of hardware if the trace says so, and all faults so many times as often."""
    text = path.read_bytes()
    found = {"all faults": parse_trace(text)}
    try:
        found["hardware only"] = parse_trace(text, level=HARDWARE)
    except ValueError:
        print(f"  {path.name} has no faults of the level {HARDWARE!r}: without that variant")
    return found | {f"{ACCELERATED:g} times as often": found["all faults"].accelerated(ACCELERATED)}


def compare(variant: str, trace: FaultTrace, cluster_nodes: int) -> TraceResult:
    """Run every policy and a search over fixed intervals on a job of all nodes but a tenth, the spares."""
    spares = max(1, math.floor(SPARE_SHARE * cluster_nodes))
    nodes = cluster_nodes - spares
    knowledge = FailureKnowledge(failures=FailureEstimate(world_size=nodes * GPUS_PER_NODE))

    def run(policy: str, every: int | None = None) -> SimulationOutcome:
        settings = PacingSettings(policy=policy, every=every, budget=1.0 if every else PacingSettings().budget)
        failures = TraceFailures(trace, nodes=nodes, spares=spares, cluster_nodes=cluster_nodes)
        return simulate(
            JOB, policies[policy], settings, failures=failures, knowledge=knowledge, replan_seconds=REPLAN_SECONDS,
            until_seconds=trace.seconds,
        )  # fmt: skip

    shortest = math.ceil((JOB.lag_seconds + JOB.cost_seconds) / JOB.iteration_seconds)
    longest = 100 * math.sqrt(2 * JOB.cost_seconds * trace.mtbf_seconds) / JOB.iteration_seconds
    tried = {round(shortest * (longest / shortest) ** (n / (SEARCHED - 1))) for n in range(SEARCHED)}
    ettr = {every: run("fixed", every).ettr for every in tried}
    best = max(ettr, key=ettr.__getitem__)
    outcomes = {name: run(name) for name in policies if name != "fixed"}
    outcomes["every 30 min"] = run("fixed", round(1800 / JOB.iteration_seconds))
    return TraceResult(variant, trace, best, ettr[best], outcomes)


def figures_of(path: Path, cluster_nodes: int | None) -> dict[str, float]:
    """Print a table for each variant, and return the figures."""
    print(f"all policies on {path.name}: iterations of 5 s, a checkpoint costs 5 s and is durable after 2 min,")
    print("a restart takes 5 min; the job has all nodes but a tenth, the spares, and learns the failure rate:")
    figures: dict[str, float] = {}
    for variant, trace in variants(path).items():
        result = compare(variant, trace, cluster_nodes or len(trace.nodes))
        _print(result)
        name = variant.replace(" ", "_")
        for policy, outcome in result.outcomes.items():
            figures[f"ettr_trace_{name}_{policy.replace(' ', '_').replace('-', '_')}"] = round(outcome.ettr, 5)
        figures[f"ettr_default_trace_{name}"] = round(result.default_ratio, 5)
    figures["ettr_default_trace"] = min(value for name, value in figures.items() if "default_trace" in name)
    return figures


def _print(result: TraceResult) -> None:
    trace, hours = result.trace, result.trace.mtbf_seconds / 3600
    print(
        f"  {result.variant}: {len(trace.faults):,} faults, one in {hours:.1f} h, "
        f"coefficient of variation {trace.gap_variation:.2f}"
    )
    for unused in trace.unused:
        print(f"    not used: {unused}")
    minutes = result.best_interval * JOB.iteration_seconds / 60
    print(f"    {f'best fixed, {minutes:.1f} min':<24} ETTR {result.best_ettr:.2%}")
    for name, outcome in result.outcomes.items():
        seconds = {
            "stall": outcome.stall_seconds, "lost work": outcome.lost_seconds, "restart": outcome.restart_seconds,
            "waiting": outcome.waiting_seconds,
        }  # fmt: skip
        shares = "  ".join(f"{what} {each / outcome.wall_seconds:.2%}" for what, each in seconds.items())
        print(f"    {name:<24} ETTR {outcome.ettr:.2%}  {shares}  {outcome.failures:,} failures", flush=True)
