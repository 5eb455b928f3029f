"""Stage `budget`: the overhead of a policy in real training, with and without checkpoints by turns."""

from __future__ import annotations

import time

from .gpt import SessionTraining
from .stages import CaseResult, Cases, Context

BUDGET = 0.035
SECONDS, TURN_SECONDS = 60.0, 10.0
"""Of both kinds of turns together, and of a turn with checkpoints; one without takes half of it."""


def within_budget(context: Context) -> CaseResult:
    """Compare turns under the policy, each until no checkpoint is in flight, with turns in which it is paused."""
    whole, turn = (2.0, 0.5) if context.small else (SECONDS, TURN_SECONDS)
    training = SessionTraining(context, 2.0, budget=BUDGET)
    with training.session as session:
        _turn(training, turn)  # allocates, and measures the first checkpoints
        began, begun = time.monotonic(), training.begun
        ours, plain = list[float](), list[float]()
        while time.monotonic() - began < whole:
            ours += _turn(training, turn)
            with session.paused():
                while training.in_flight:
                    ours.append(training.seconds(1))
                plain += _turn(training, turn / 2)
        checkpoints = training.begun - begun
    iteration = sum(plain) / len(plain)
    overhead = sum(ours) / len(ours) / iteration - 1
    values = {"overhead": overhead, "iteration_seconds": iteration, "checkpoints": checkpoints}
    return CaseResult(values, context.judged(overhead <= BUDGET))


def _turn(training: SessionTraining, seconds: float) -> list[float]:
    """Return the seconds of each iteration in a turn."""
    found, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        found.append(training.seconds(1))
    return found


CASES: Cases = {"2 GB at 3.5 %": within_budget}
