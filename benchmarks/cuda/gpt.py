"""The GPT of `benchmarks.checkpoint` with a session, for the stages that measure time."""

from __future__ import annotations

from typing import Any

from benchmarks.checkpoint.ours import open_session
from benchmarks.checkpoint.scale import TrainingScale
from benchmarks.checkpoint.training import BenchmarkTraining
from holdfast.save.run import SETTLED, Run, RunState

from .stages import Context


def scale_of(gigabytes: float, context: Context) -> TrainingScale:
    if context.small:
        return TrainingScale.small(context.device)
    return TrainingScale.of_state(gigabytes, context.device)


class SessionTraining:
    """A training whose session takes no checkpoint before the options say so."""

    def __init__(self, context: Context, gigabytes: float, **options: Any) -> None:
        self.training = BenchmarkTraining(scale_of(gigabytes, context))
        self.begun = self.durable = self.in_flight = 0
        self.training.seconds(2)
        options = {"every": None, "keep": 1} | options
        self.session = open_session(context.folder / "store", self.training, **options)
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
        return self.training.seconds(count, self._iterate)

    def _iterate(self) -> None:
        self.training.iterate()
        self.session.step()
