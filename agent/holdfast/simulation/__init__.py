"""Simulations of training jobs that fail, under any interval policy.

`simulate` runs one job, `compare_policies` all policies with the same failures: seeded, or from a recorded fault
trace. `compare_placement` shows what `coci` gains and costs. Time between events is computed, not stepped, so 54
days take a fraction of a second. The policies are the functions that real jobs use, with the knowledge that a real
job has. Imports `holdfast.pacing` only.
"""

from holdfast.simulation.placement import PlacementComparison, compare_placement
from holdfast.simulation.run import (
    FORESEEN_FAILURES,
    RUNS,
    FailureKnowledge,
    Failures,
    PoissonFailures,
    SimulatedJob,
    SimulatedPolicy,
    SimulationOutcome,
    certain,
    compare_policies,
    simulate,
)
from holdfast.simulation.trace import FaultTrace, NodeFault, TraceFailures, parse_trace

__all__ = [
    "FORESEEN_FAILURES",
    "RUNS",
    "FailureKnowledge",
    "Failures",
    "FaultTrace",
    "NodeFault",
    "PlacementComparison",
    "PoissonFailures",
    "SimulatedJob",
    "SimulatedPolicy",
    "SimulationOutcome",
    "TraceFailures",
    "certain",
    "compare_placement",
    "compare_policies",
    "parse_trace",
    "simulate",
]
