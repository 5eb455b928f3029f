"""The simulations of `holdfast plan`: at a constant failure rate, or with the faults of a recorded trace."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.commands.console import counted
from holdfast.commands.plan_comparison import PlanReport
from holdfast.pacing import FailureEstimate, FailureHistory, PacingSettings, Profile
from holdfast.simulation import (
    FORESEEN_FAILURES,
    RUNS,
    FaultTrace,
    SimulatedPolicy,
    TraceFailures,
    compare_policies,
    parse_trace,
)
from holdfast.simulation.trace import DAY
from holdfast.units import duration

UNIT_SECONDS = {"days": DAY, "hours": 3600.0, "seconds": 1.0}
GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """The options that describe a fault trace, and the nodes of a job; `None` where they were left out."""

    trace: Path | None
    cluster_nodes: int | None
    gpus_per_node: int | None
    spares: int | None
    trace_level: str | None
    trace_unit: str | None
    accelerate: float | None

    def read(self) -> RecordedFaults | None:
        """Read the trace, if there is one. ValueError: the file or an option is invalid, with the remedy."""
        if self.trace is None:
            for name in self.__dataclass_fields__:
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"--{name.replace('_', '-')} is about a fault trace: give the file with --trace"
                    )
            return None
        unit = self.trace_unit or "days"
        if unit not in UNIT_SECONDS:
            raise ValueError(f"--trace-unit {unit!r} is unknown: give days, hours or seconds")
        try:
            trace = parse_trace(self.trace.read_bytes(), unit_seconds=UNIT_SECONDS[unit], level=self.trace_level)
        except OSError as error:
            raise ValueError(f"cannot read --trace {self.trace}: {error.strerror}") from None
        except ValueError as error:
            raise ValueError(f"cannot use --trace {self.trace}: {error}") from None
        return RecordedFaults(
            name=self.trace.name,
            trace=trace.accelerated(self.accelerate or 1.0),
            cluster_nodes=self.cluster_nodes or len(trace.nodes),
            gpus_per_node=self.gpus_per_node or GPUS_PER_NODE,
            spares=self.spares or 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedFaults:
    """A fault trace, and the nodes that a job has."""

    name: str
    trace: FaultTrace
    cluster_nodes: int
    gpus_per_node: int
    spares: int

    def job_nodes(self, ranks: int) -> int:
        """Return the number of nodes that a job of so many GPUs needs."""
        return math.ceil(ranks / self.gpus_per_node)

    def failures(self, ranks: int, seed: int) -> TraceFailures:
        return TraceFailures(
            self.trace,
            nodes=self.job_nodes(ranks),
            spares=self.spares,
            cluster_nodes=self.cluster_nodes,
            seed=seed,
        )

    def takes_whole_cluster(self, ranks: int) -> bool:
        """Return whether all runs have the same nodes."""
        return self.job_nodes(ranks) + self.spares == self.cluster_nodes

    def describe(self, ranks: int, result: SimulatedPolicy) -> str:
        """Describe the trace and the job."""
        trace = self.trace
        runs = "" if result.runs == 1 else f", in {result.runs} runs with nodes chosen at random"
        unused = f" Not used: {'; '.join(trace.unused)}." if trace.unused else ""
        faults, cluster = counted(len(trace.faults), "fault"), counted(self.cluster_nodes, "node")
        return (
            f"Simulated with {self.name}: {faults} of {cluster} in {trace.seconds / DAY:,.3g} days (one in "
            f"{duration(trace.mtbf_seconds)}, coefficient of variation {trace.gap_variation:.2f}). The job needs "
            f"{counted(self.job_nodes(ranks), 'node')} and has {counted(self.spares, 'spare')}{runs}: "
            f"{counted(round(result.failures), 'failure')}. Policies learn the rate, starting from the one "
            f"below.{unused}"
        )


def with_simulation(report: PlanReport, recorded: RecordedFaults | None) -> PlanReport:
    """Simulate every policy with the same failures; takes some seconds of CPU time."""
    comparison = report.comparison
    ranks = comparison.world_size
    settings = PacingSettings(
        budget=comparison.budget,
        write_bytes_per_second=comparison.write_bytes_per_second,
        max_unsaved_seconds=comparison.max_unsaved_seconds,
    )
    profile = Profile(
        iteration_seconds=comparison.iteration_seconds,
        persist_seconds=max(0.0, comparison.lag_seconds),
        written_bytes=comparison.written_bytes,
        cost_seconds=comparison.cost_seconds,
    )
    history = FailureHistory(
        failures=FailureEstimate(world_size=ranks, mean_seconds=comparison.mtbf_seconds),
        restart_seconds=comparison.restart_seconds,
    )
    if recorded is None:
        jobs = (
            f"Simulated: {RUNS} runs of each policy, each for about {FORESEEN_FAILURES} mean times between "
            "failures, with the same failures for all, at the failure rate below."
        )
        return replace(report, simulated=compare_policies(profile, settings, history), simulated_jobs=jobs)
    results = compare_policies(
        profile,
        settings,
        history,
        seeds=range(1 if recorded.takes_whole_cluster(ranks) else RUNS),
        trace=lambda seed: recorded.failures(ranks, seed),
    )
    return replace(report, simulated=results, simulated_jobs=recorded.describe(ranks, results[0]))
