"""The GPT of `benchmarks.checkpoint` with a session, for the stages that measure time."""

from __future__ import annotations

import time
from typing import Any

import holdfast
from benchmarks.checkpoint.scale import TrainingScale
from benchmarks.checkpoint.training import BenchmarkTraining
from holdfast.save.run import SETTLED, Run, RunState

from .stages import Context


def scale_of(gigabytes: float, context: Context) -> TrainingScale:
    return (
        TrainingScale.small(context.device) if context.small else TrainingScale.of_state(gigabytes, context.device)
    )


class SessionTraining:
    """A training whose session takes no checkpoint before the options say so."""

    def __init__(self, context: Context, gigabytes: float, **options: Any) -> None:
        self.training = BenchmarkTraining(scale_of(gigabytes, context))
        self.begun = self.durable = self.in_flight = 0
        self._iterate(2)
        self.session = holdfast.Session(
            "cuda", store=context.folder / "store", server="", keep=1, model=self.training.model,
            optimizer=self.training.optimizer, **options,
        )  # fmt: skip
        self.session.observe(self)

    def run_changed(self, run: Run, state: RunState) -> None:
        if state is RunState.COPYING:
            self.begun += 1
            self.in_flight += 1
        elif state in SETTLED:
            self.in_flight -= 1
            self.durable += state is RunState.DURABLE

    def seconds(self, count: int) -> float:
        """Return the seconds of so many iterations with the session."""
        self.training.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            self.training.iterate()
            self.session.step()
        self.training.synchronize()
        return time.perf_counter() - began

    def _iterate(self, count: int) -> None:
        for _ in range(count):
            self.training.iterate()
        self.training.synchronize()
