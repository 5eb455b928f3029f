"""What would have happened: seeded runs of a training job that fails, under any policy. Standard library only.

A job's iterations, checkpoints, failures and restarts are events; between two of them time is arithmetic, so that
54 days of a job take a fraction of a second. Policies are the very functions that pace real jobs, called with what
a real job would know at that point.
"""

from .comparison import FORESEEN_FAILURES, Row, Spread, Way, compare, compare_planned, ways_of
from .curves import Curve, Exponential, PowerLaw
from .failing import ListedFailures, PoissonFailures, Source, even_draws
from .job import Job, Round
from .knowledge import Knowledge, certain, foreseen
from .outcome import Outcome
from .run import simulate
from .schedules import equal_loss, planned, square_root, uniform

__all__ = [
    "FORESEEN_FAILURES",
    "Curve",
    "Exponential",
    "Job",
    "Knowledge",
    "ListedFailures",
    "Outcome",
    "PoissonFailures",
    "PowerLaw",
    "Round",
    "Row",
    "Source",
    "Spread",
    "Way",
    "certain",
    "compare",
    "compare_planned",
    "equal_loss",
    "even_draws",
    "foreseen",
    "planned",
    "simulate",
    "square_root",
    "uniform",
    "ways_of",
]
