"""Overhead in real training: turns with and without Holdfast in one process.

A turn with Holdfast begins when a checkpoint is due and ends when none is in flight, so that it includes all
costs. The rest of a longer interval costs an idle step per iteration, which is measured too. The turn is compared
with as many iterations without Holdfast, half before and half after it: many short turns suffer less from other
load on the machine than a few long ones. One process, since two equal processes differ by several percent.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.checkpoint.scale import TrainingScale

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


@dataclass(frozen=True, slots=True)
class OverheadResult:
    budget: float
    measured: float
    """(time with / time without) - 1 over an interval; interquartile mean of all pairs."""
    error: float
    """Standard error of `measured`."""
    control: float
    """The same figure for turns without Holdfast, compared with their neighbors."""
    reported: float
    """Mean overhead that the session reports."""
    interval: int
    pairs: int
    state_bytes: int


def overhead(budget: float, minutes: float, folder: Path) -> OverheadResult:
    """Measure training on one CPU thread with a state of over 100 MB; at least three pairs of turns."""
    with _trainer(budget, folder) as trainer:
        trainer.ask("learn")
        pairs, until = [], time.monotonic() + 60 * minutes
        while len(pairs) < LEAST_PAIRS or time.monotonic() < until:
            pairs.append(trainer.ask("pair"))
        interval, state_bytes = trainer.ask("facts")
    measured, error = _middle([ratio for ratio, _, _ in pairs])
    return OverheadResult(
        budget=budget,
        measured=measured,
        error=error,
        control=_middle([nothing for _, nothing, _ in pairs])[0],
        reported=statistics.fmean(reported for _, _, reported in pairs),
        interval=int(interval),
        pairs=len(pairs),
        state_bytes=int(state_bytes),
    )


def _middle(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the interquartile mean and its bootstrap standard error."""
    chance = random.Random(1)
    means = [_interquartile(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)]
    return _interquartile(ratios), statistics.stdev(means)


def _interquartile(ratios: Sequence[float]) -> float:
    quarter = len(ratios) // 4
    return statistics.fmean(sorted(ratios)[quarter : len(ratios) - quarter])


class _Trainer:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def ask(self, what: str) -> tuple[float, ...]:
        self._connection.send(what)
        answer: tuple[float, ...] = self._connection.recv()
        return answer


@contextlib.contextmanager
def _trainer(budget: float, folder: Path) -> Iterator[_Trainer]:
    here, there = multiprocessing.Pipe()
    store = tempfile.mkdtemp(prefix=".bench-pacing-", dir=folder)
    process = multiprocessing.get_context("spawn").Process(target=_train, args=(there, budget, store))
    process.start()
    there.close()
    try:
        yield _Trainer(here)
    finally:
        here.close()
        process.join(30)
        process.kill()
        shutil.rmtree(store, ignore_errors=True)


def _train(connection: Connection, budget: float, store: str) -> None:
    """Train until the connection closes."""
    import torch

    import holdfast
    from benchmarks.checkpoint.training import BenchmarkTraining

    torch.set_num_threads(1)
    training = BenchmarkTraining(SCALE)
    session = holdfast.Session(
        "paired",
        model=training.model,
        optimizer=training.optimizer,
        store=store,
        policy="checkfreq",  # which spends the budget
        budget=budget,
        write_budget=UNLIMITED,
        keep=2,
    )
    session.resume()

    def without(iterations: int) -> float:
        training.iterate()  # warm the caches
        started = time.perf_counter()
        for _ in range(iterations):
            training.iterate()
        return (time.perf_counter() - started) / iterations

    def idle(least: int = 0) -> float:
        """Train until a checkpoint is due; return the median seconds of an idle step, or 0."""
        session._meter.clock.restart()  # ignore the iterations without Holdfast
        steps: list[float] = []
        while len(steps) < least or not (
            session._controller.due(session.iteration + 1) or len(steps) >= MOST_ITERATIONS
        ):
            training.iterate()
            started = time.perf_counter()
            session.step()
            steps.append(time.perf_counter() - started)
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

    with contextlib.suppress(EOFError), session:
        while True:
            match connection.recv():
                case "learn":
                    connection.send((idle(least=LEARNING_ITERATIONS),))
                case "pair":
                    connection.send(pair())
                case "facts":
                    plan = session._controller.plan
                    connection.send((plan.interval or 0 if plan else 0, training.state_bytes))
