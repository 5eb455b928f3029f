"""The job that is simulated: its iterations, what a checkpoint costs it, and what a failure does."""

from __future__ import annotations

from dataclasses import dataclass

from .curves import Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A stretch of iterations with so many workers, which join or leave at its ends."""

    until_iteration: int
    workers: int = 1
    speed: float = 1.0
    """Iterations take 1 / speed of the job's `iteration_seconds` (COCI's ξ)."""
    cost_factor: float = 1.0
    """A checkpoint costs so many times the job's `cost_seconds` (COCI takes the number of workers)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Times in seconds. ValueError for one that could never be trained."""

    total_iterations: int
    iteration_seconds: float
    cost_seconds: float = 0.0
    """What one checkpoint costs training, interference included (δ)."""
    lag_seconds: float = 0.0
    """From the end of that cost until it is durable; training goes on meanwhile (L)."""
    restart_seconds: float = 0.0
    """Starting again and loading (R)."""
    down_seconds: float = 0.0
    """Before that: until a failure is noticed and there is a machine to start on."""
    workers: int = 1
    rounds: tuple[Round, ...] = ()
    """Where workers join and leave; after the last round `workers` go on alone."""
    in_flight: int = 1
    """At most so many checkpoints are on their way to being durable; a further one waits for its turn."""
    stop_iteration: int | None = None
    """The iteration at which somebody ends it for good, unknown to its policy."""
    curve: Curve | None = None
    targets: tuple[float, ...] = ()
    """Losses whose time is asked for, highest first."""

    def __post_init__(self) -> None:
        if self.total_iterations < 1 or not self.iteration_seconds > 0:
            raise ValueError("a job has at least one iteration, and an iteration takes more than 0 s")
        if min(self.cost_seconds, self.lag_seconds, self.restart_seconds, self.down_seconds) < 0:
            raise ValueError("the times of a job are 0 or more")
        if self.in_flight < 1:
            raise ValueError(f"{self.in_flight} checkpoints in flight: at least one must be")
        if any(each.workers < 1 or not each.speed > 0 or each.cost_factor < 0 for each in self.rounds):
            raise ValueError("a round has at least one worker, a speed above 0 and a cost of 0 or more")
        ends = [each.until_iteration for each in self.rounds]
        if ends != sorted(set(ends)):
            raise ValueError("rounds end one after the other")
        if self.targets and self.curve is None:
            raise ValueError("a loss is reached only by a job with a loss curve")

    @property
    def last_iteration(self) -> int:
        return min(self.total_iterations, self.stop_iteration or self.total_iterations)

    def round_at(self, iteration: int) -> Round:
        """The round that the iteration after `iteration` belongs to."""
        for each in self.rounds:
            if iteration < each.until_iteration:
                return each
        return Round(until_iteration=self.total_iterations, workers=self.workers)
