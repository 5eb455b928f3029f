"""Overhead in real training: turns with and without Holdfast in one process.

A turn with Holdfast begins when a checkpoint is due and ends when none is in flight, so that it includes all
costs. The rest of a longer interval costs an idle step per iteration, which is measured too. The turn is compared
with as many iterations without Holdfast, half before and half after it: many short turns suffer less from other
load on the machine than a few long ones. One process, since two equal processes differ by several percent.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.checkpoint.scale import TrainingScale
from benchmarks.harness import in_process, scratch, seconds_of

from .noisy import UNLIMITED

SCALE = TrainingScale(layers=10, width=256, tokens=64)
LEARNING_ITERATIONS = 120
"""First iterations, until the interval follows from measured checkpoints."""
LEAST_ITERATIONS = 6
"""Minimum iterations of a turn; shorter intervals are repeated."""
MOST_ITERATIONS = 60
"""Maximum iterations of a turn, and until the next due checkpoint."""
LEAST_PAIRS = 3
RESAMPLES = 1000


class OverheadResult(NamedTuple):
    measured: float
    """(time with / time without) - 1 over an interval; interquartile mean of all pairs."""
    error: float
    """Standard error of `measured`."""
    control: float
    """The same figure for turns without Holdfast, compared with their neighbors."""
    reported: float
    """Mean overhead that the session reports."""
    pairs: int
    interval: int
    state_bytes: int


def overhead(budget: float, minutes: float, folder: Path) -> OverheadResult:
    """Measure training on one CPU thread with a state of over 100 MB; at least three pairs of turns."""
    with scratch(folder) as store, in_process(_train, budget, minutes, store) as trainer:
        pairs, interval, state_bytes = trainer.result()
    ratios, controls, reported = zip(*pairs, strict=True)
    control, mean = _middle(controls)[0], statistics.fmean(reported)
    return OverheadResult(*_middle(ratios), control, mean, len(pairs), interval, state_bytes)


def _middle(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the interquartile mean and its bootstrap standard error."""
    chance = random.Random(1)
    means = [_interquartile(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)]
    return _interquartile(ratios), statistics.stdev(means)


def _interquartile(ratios: Sequence[float]) -> float:
    quarter = len(ratios) // 4
    return statistics.fmean(sorted(ratios)[quarter : len(ratios) - quarter])


def _train(budget: float, minutes: float, store: Path) -> tuple[list[tuple[float, float, float]], int, int]:
    """Train in pairs of turns; return these, the interval and the size of the state."""
    import torch

    import holdfast
    from benchmarks.checkpoint.training import BenchmarkTraining

    torch.set_num_threads(1)
    training = BenchmarkTraining(SCALE)
    session = holdfast.Session(
        "paired", model=training.model, optimizer=training.optimizer, store=store, budget=budget,
        policy="checkfreq", write_budget=UNLIMITED, keep=2,
    )  # fmt: skip
    session.resume()

    def without(iterations: int) -> float:
        training.iterate()  # warm the caches
        return training.seconds(iterations) / iterations

    def idle(least: int = 0) -> float:
        """Train until a checkpoint is due; return the median seconds of an idle step, or 0."""
        session._meter.clock.restart()  # ignore the iterations without Holdfast
        steps: list[float] = []
        while len(steps) < least or not (
            session._controller.due(session.iteration + 1) or len(steps) >= MOST_ITERATIONS
        ):
            training.iterate()
            steps.append(seconds_of(session.step))
        return statistics.median(steps) if steps else 0.0

    def beside(iterations: int) -> tuple[float, int]:
        done, started = 0, time.perf_counter()
        while done < iterations or (session._saver.active and done < MOST_ITERATIONS):
            training.iterate()
            session.step()
            done += 1
        return time.perf_counter() - started, done

    def pair() -> tuple[float, float, float]:
        plan = session._controller.plan
        interval = plan.interval if plan is not None and plan.interval else LEAST_ITERATIONS
        turn = interval * -(-LEAST_ITERATIONS // interval) if interval < LEAST_ITERATIONS else LEAST_ITERATIONS
        idle_step = idle()
        half = turn // 2
        before = without(half)
        nothing = without(turn)
        between = without(half)
        training.iterate()
        session._meter.clock.restart()
        seconds, done = beside(turn)
        after = without(half)
        bare = (between + after) / 2
        whole = max(done, interval)
        cost = seconds - done * bare + (whole - done) * idle_step
        reported = session._controller.measured_overhead or 0.0
        return cost / (whole * bare), (nothing / ((before + between) / 2) - 1) * turn / whole, reported

    with session:
        idle(least=LEARNING_ITERATIONS)
        pairs, until = [], time.monotonic() + 60 * minutes
        while len(pairs) < LEAST_PAIRS or time.monotonic() < until:
            pairs.append(pair())
        plan = session._controller.plan
        return pairs, plan.interval or 0 if plan else 0, training.state_bytes
