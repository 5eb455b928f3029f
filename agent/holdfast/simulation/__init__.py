"""Seeded simulations of training jobs that fail, under any interval policy.

`simulate` runs one job, `compare_policies` all policies with the same failures. Time between events is computed,
not stepped, so 54 days take a fraction of a second. The policies are the functions that real jobs use, with the
knowledge that a real job has. Imports `holdfast.pacing` only.
"""

from holdfast.simulation.run import (
    FORESEEN_FAILURES,
    RUNS,
    FailureKnowledge,
    PoissonFailures,
    SimulatedJob,
    SimulatedPolicy,
    SimulationOutcome,
    certain,
    compare_policies,
    simulate,
)

__all__ = [
    "FORESEEN_FAILURES",
    "RUNS",
    "FailureKnowledge",
    "PoissonFailures",
    "SimulatedJob",
    "SimulatedPolicy",
    "SimulationOutcome",
    "certain",
    "compare_policies",
    "simulate",
]
