"""What a simulated job's policy gets to know, and when: the truth from the start, or what a real job would see."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from holdfast.pacing import Failures, History, LossCurve, ProgressFit

from .curves import Curve, Exponential

CERTAIN_FAILURES = 1e9
FITTED_POINTS = 200
SEEN_POINTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """By default failures are learnt from the published rates on, and nothing is known of the loss."""

    failures: Failures = field(default_factory=Failures)
    """What is believed of failures before the first second."""
    rate: Callable[[float, int], float] | None = None
    """The true rate, failures a second, at a wall time and a number of workers; it takes the place of learning."""
    progress: LossCurve | None = None
    """A loss curve known from the start, as of an earlier run of the same job."""
    fits: bool = False
    """Whether the losses are followed and fitted as they come."""
    noise: float = 0.0
    """Standard deviation of the losses that are seen."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.fits and self.progress is not None:
            raise ValueError("a loss curve is known from the start or fitted on the way, not both")


def certain(rate: float) -> Failures:
    """A belief in exactly this rate, failures a second, that nothing will move."""
    return Failures(count=CERTAIN_FAILURES, exposure_seconds=CERTAIN_FAILURES / rate, mean_seconds=1 / rate)


def foreseen(curve: Curve, iterations: int) -> LossCurve | None:
    """A curve as an earlier run of so many iterations has shown it; None where no exponential is like it."""
    if isinstance(curve, Exponential):
        return LossCurve(floor=curve.floor, scale=curve.start - curve.floor, decay=curve.rate)
    fit = ProgressFit()
    for place in range(1, FITTED_POINTS + 1):
        at = max(1, round(place * iterations / FITTED_POINTS))
        fit.add(at, curve.loss_at(at))
    return fit.curve


class Observer:
    """The memory of one run, from which its policy's `History` is made."""

    def __init__(self, knowledge: Knowledge, curve: Curve | None) -> None:
        self._knowledge = knowledge
        self._failures = knowledge.failures
        self._told_at = 0.0
        self._curve = curve if knowledge.fits else None
        self._fit = ProgressFit()
        self._chance = random.Random(knowledge.seed)  # noqa: S311 - a simulation is repeated by its seed

    def trained(self, first: int, last: int) -> None:
        """The iterations after `first` up to `last` were finished; a few of their losses are looked at."""
        if self._curve is None:
            return
        step = max(1, (last - first) // SEEN_POINTS)
        for at in range(first + 1, last + 1, step):
            self._fit.add(at, self._curve.loss_at(at) + self._chance.gauss(0.0, self._knowledge.noise))

    def ran(self, seconds: float, *, failures: int = 0) -> None:
        """So much more running time, and so many failures at its end."""
        if self._knowledge.rate is None:
            self._failures = self._failures.after(seconds, failures=failures)

    def history(
        self, *, iteration: int, total: int, now: float, workers: int, checkpoints: int, restart_seconds: float
    ) -> History:
        rate = self._knowledge.rate
        failures = self._failures if rate is None else certain(rate(now, workers))
        return History(
            iterations=iteration,
            total_iterations=total,
            failures=replace(failures, world_size=workers),
            restart_seconds=restart_seconds,
            checkpoints=checkpoints,
            progress=self._knowledge.progress if self._curve is None else self._fit.curve,
        )
