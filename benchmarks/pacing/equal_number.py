"""The same number of checkpoints, placed in three ways: what is lost of the progress, and what of the time."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass

from holdfast.simulation import (
    Exponential,
    Job,
    PoissonFailures,
    equal_loss,
    planned,
    simulate,
    square_root,
    uniform,
)

TOTAL = 60_000
HOURS = TOTAL / 3600


def placings(curve: Exponential, segments: int) -> dict[str, list[int]]:
    return {
        "uniform": uniform(TOTAL, segments),
        "equal loss": equal_loss(curve, TOTAL, segments),
        "√ density": square_root(curve, TOTAL, segments),
    }


def lost_by_one_failure(length: float, segments: int = 40, draws: int = 4000) -> dict[str, float]:
    """Progress that a failure takes back, at a time as likely as any other, over that with even spacing.

    `length` is θ T. Checkpoints cost nothing here: only where they are counts.
    """
    curve = Exponential(rate=length / TOTAL)
    chance = random.Random(17)
    times = [(n + chance.random()) * TOTAL / draws for n in range(draws)]
    lost = {
        name: statistics.fmean(_lost_at(curve, places, at) for at in times)
        for name, places in placings(curve, segments).items()
    }
    return {name: each / lost["uniform"] for name, each in lost.items()}


def _lost_at(curve: Exponential, places: list[int], at: float) -> float:
    before = max((place for place in places if place <= at), default=0)
    return curve.loss_at(before) - curve.loss_at(at)


@dataclass(frozen=True, slots=True)
class Killed:
    """Of jobs that failures strike as often as once in their length."""

    gap: float
    """Loss of the newest checkpoint above that of the job, at a random moment at which it is killed for good."""
    completion: float
    """How much longer than undisturbed those take that are not killed, as a share."""


def killed_for_good(length: float = 5.0, segments: int = 20, runs: int = 2000) -> dict[str, Killed]:
    """Jobs killed for good at a random moment of their planned time, and those that are left to finish.

    Failures strike once in the job's length on average, checkpoints cost nothing.
    """
    curve = Exponential(rate=length / TOTAL)
    job = Job(total_iterations=TOTAL, iteration_seconds=1.0, curve=curve)
    chance = random.Random(23)
    ends = [(n + chance.random()) * TOTAL / runs for n in range(runs)]
    found = {}
    for name, places in placings(curve, segments).items():
        gaps, walls = [], []
        for seed, end in enumerate(ends):
            policy = planned(places)
            killed = simulate(
                job, policy, failures=PoissonFailures(per_job_hour=1 / HOURS, seed=seed), until_seconds=end
            )
            gaps.append(curve.loss_at(killed.durable_iteration) - curve.loss_at(killed.iteration))
            finished = simulate(job, policy, failures=PoissonFailures(per_job_hour=1 / HOURS, seed=seed))
            walls.append(finished.wall_seconds / TOTAL - 1)
        found[name] = Killed(gap=statistics.fmean(gaps), completion=statistics.fmean(walls))
    return found
