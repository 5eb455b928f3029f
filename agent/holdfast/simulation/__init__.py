"""What would have happened: seeded runs of a training job that fails, under any policy. Standard library only.

A job's iterations, checkpoints, failures and restarts are events; between two of them time is arithmetic, so that
54 days of a job take a fraction of a second. Policies are the very functions that pace real jobs, called with what
a real job would know at that point.
"""

from holdfast.simulation.comparison import FORESEEN_FAILURES, RUNS, Simulated, compare_policies
from holdfast.simulation.run import FailureSource, Job, Knowledge, Outcome, PoissonFailures, certain, simulate

__all__ = [
    "FORESEEN_FAILURES",
    "RUNS",
    "FailureSource",
    "Job",
    "Knowledge",
    "Outcome",
    "PoissonFailures",
    "Simulated",
    "certain",
    "compare_policies",
    "simulate",
]
