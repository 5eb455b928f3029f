"""Stage `every`: a checkpoint after each iteration, with memory for two snapshots."""

from __future__ import annotations

from .gpt import SessionTraining
from .stages import CaseResult, Cases, Context

GOAL = 0.035


def every_iteration(context: Context) -> CaseResult:
    training = SessionTraining(context, 1.0, every=10**9, max_in_flight=2)
    count = 4 if context.small else 12
    with training.session as session:
        plain = training.seconds(count)
        session.every(1)
        training.seconds(3)  # allocates
        ours = training.seconds(count)
        session.every(10**9)
        session.wait(60)
        plain = (plain + training.seconds(count)) / 2
        durable = training.durable
    overhead = ours / plain - 1
    values = {"overhead": overhead, "iteration_seconds": plain / count, "durable": durable}
    return CaseResult(values, context.judged(overhead <= GOAL))


CASES: Cases = {"1 GB": every_iteration}
