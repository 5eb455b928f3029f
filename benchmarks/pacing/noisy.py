"""The interval under load from outside: other work on 0, 50 and 100 % of the cores by turns, simulated and real.

`over_share` is the share of training time in which the overhead that the session reports for its newest window
exceeds the budget, by any amount. The time counts from EVIDENCE_CHECKPOINTS checkpoints after the first plan on.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Queue

from benchmarks.checkpoint.scale import TrainingScale
from holdfast.pacing import Controller, PacingSettings

from .paced import PacedJob

BUDGET = 0.035
EVIDENCE_CHECKPOINTS = 10
SHARES = (0.0, 0.5, 1.0)
PHASE_SECONDS = (3, 5, 8, 12, 20, 40)
SCALE = TrainingScale(layers=3, width=128, tokens=64)
"""Short iterations, of which a checkpoint is a large part."""
LEAST_INTERVALS = 20
MOST_MINUTES = 10
"""Limit for the intervals: a machine may be too slow for them."""


@dataclass
class BudgetRecord:
    """How a job kept its budget, from one iteration to the next."""

    budget: float = BUDGET
    checkpoints: int = 0
    intervals: int = 0
    """Intervals after the evidence phase."""
    over_seconds: float = 0.0
    seconds: float = 0.0
    """Training time after the evidence phase, and the part of it that was over the budget."""
    longest_over: int = 0
    """Maximum number of intervals in a row that began over the budget."""
    every_iteration: int = 0
    """Maximum number of checkpoints in a row that began at an interval of 1."""
    interval: int = 0
    _first: int | None = field(default=None, repr=False)
    _over: int = field(default=0, repr=False)
    _at_one: int = field(default=0, repr=False)

    @property
    def over_share(self) -> float:
        return self.over_seconds / self.seconds if self.seconds > 0 else 0.0

    def iteration(self, seconds: float, controller: Controller, *, started: bool) -> None:
        """Add an iteration; `started`: a checkpoint began at its end."""
        self.checkpoints += started
        plan, overhead = controller.plan, controller.measured_overhead
        if plan is None or plan.interval is None:
            return
        self.interval = plan.interval
        if self._first is None:
            self._first = self.checkpoints
        if started:
            self._at_one = self._at_one + 1 if plan.interval == 1 else 0
            self.every_iteration = max(self.every_iteration, self._at_one)
        if self.checkpoints - self._first < EVIDENCE_CHECKPOINTS:
            return
        is_over = overhead is not None and overhead > self.budget
        self.seconds += seconds
        self.over_seconds += seconds * is_over
        if started:
            self.intervals += 1
            self._over = self._over + 1 if is_over else 0
            self.longest_over = max(self.longest_over, self._over)


# Simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadEffect:
    """What a load does to a job: factors of its times, and the scatter of its iterations."""

    iteration: float = 1.0
    interference: float = 1.0
    write: float = 1.0
    stall: float = 1.0
    scatter: float = 0.12
    """Standard deviation of the logarithm."""
    outliers: float = 0.01
    """Share of iterations that take much longer: a Pareto tail."""


LOAD_EFFECTS = {
    0.0: LoadEffect(),
    0.5: LoadEffect(iteration=1.6, interference=1.5, write=1.7, stall=2.2, scatter=0.4, outliers=0.03),
    1.0: LoadEffect(iteration=3.0, write=2.5, stall=4.0, scatter=0.35, outliers=0.05),
}
"""Roughly those of `noisy_training` on a machine of 2 cores."""
SIMULATED_JOBS: dict[str, dict[str, float]] = {
    "a checkpoint overlaps one iteration": {
        "compute_seconds": 0.1, "interference": 0.2, "stall_seconds": 0.002, "persist_seconds": 0.06,
    },
    "stalls": {"compute_seconds": 0.1, "interference": 0.05, "stall_seconds": 0.015, "persist_seconds": 0.05},
    "long writes": {
        "compute_seconds": 0.15, "interference": 0.15, "stall_seconds": 0.005, "persist_seconds": 0.4,
    },
    "short iterations": {
        "compute_seconds": 0.02, "interference": 0.3, "stall_seconds": 0.001, "persist_seconds": 0.03,
    },
    "long iterations": {
        "compute_seconds": 1.0, "interference": 0.2, "stall_seconds": 0.01, "persist_seconds": 0.5,
    },
}  # fmt: skip
SIMULATED_ITERATIONS = 2500


def simulated_noise(
    job: dict[str, float], seed: int, *, iterations: int = SIMULATED_ITERATIONS, shares: tuple[float, ...] = SHARES
) -> tuple[BudgetRecord, float]:
    """Simulate a job under loads by turns; return its record and its true overhead after the evidence phase.

    Args:
        job: fields of `PacedJob`, without load.
        seed: of the order and lengths of the phases, and of the noise.
        iterations: length of the job.
        shares: loads to take turns, keys of LOAD_EFFECTS.
    """
    chance = random.Random(seed)
    effect = LOAD_EFFECTS[0.0]

    def noise() -> float:
        outlier = 1 + 0.5 * chance.paretovariate(1.5) if chance.random() < effect.outliers else 1.0
        return min(chance.lognormvariate(0, effect.scatter) * outlier, 30.0)

    simulated = PacedJob(
        Controller(PacingSettings(budget=BUDGET, policy="checkfreq")), noise=noise, snapshot_seconds=0.005, **job
    )  # type: ignore[arg-type]
    record, turn, phase_ends = BudgetRecord(), chance.randrange(len(shares)), 0.0
    seconds = bare_seconds = 0.0
    for _ in range(iterations):
        if simulated.seconds >= phase_ends:
            effect, turn = LOAD_EFFECTS[shares[turn % len(shares)]], turn + 1
            phase_ends = simulated.seconds + chance.choice(PHASE_SECONDS)
            simulated.compute_seconds = job["compute_seconds"] * effect.iteration
            simulated.interference = job["interference"] * effect.interference
            simulated.persist_seconds = job["persist_seconds"] * effect.write
            simulated.stall_seconds = job["stall_seconds"] * effect.stall
        before, bare_before, checkpoints = simulated.seconds, simulated.bare_seconds, len(simulated.starts)
        simulated.step()
        took = simulated.seconds - before
        record.iteration(took, simulated.controller, started=len(simulated.starts) > checkpoints)
        if record.seconds > 0:
            seconds += took
            bare_seconds += simulated.bare_seconds - bare_before
    return record, seconds / bare_seconds - 1 if bare_seconds > 0 else 0.0


# Real


def noisy_training(minutes: float, folder: Path, *, seed: int = 1) -> BudgetRecord:
    """Train on one CPU thread for `minutes`, while processes keep 0, 50 and 100 % of the cores busy by turns.

    It takes longer if that leaves fewer than LEAST_INTERVALS after the evidence phase, up to MOST_MINUTES.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    store = tempfile.mkdtemp(prefix=".bench-pacing-", dir=folder)
    trainer = context.Process(target=_train, args=(results, minutes, store))
    trainer.start()
    try:
        with contextlib.ExitStack() as load:
            chance, turn = random.Random(seed), seed
            while trainer.is_alive() and results.empty():
                load.close()
                turn += 1
                load.enter_context(busy_cores(SHARES[turn % len(SHARES)]))
                trainer.join(chance.choice(PHASE_SECONDS[:-1]))
        record: BudgetRecord = results.get(timeout=60)
        return record
    finally:
        trainer.join(30)
        trainer.kill()
        shutil.rmtree(store, ignore_errors=True)


@contextlib.contextmanager
def busy_cores(share: float) -> Iterator[None]:
    """Keep this share of the cores busy, rounded to whole ones, with a process each."""
    context = multiprocessing.get_context("spawn")
    cores = round(share * len(os.sched_getaffinity(0)))
    processes: list[BaseProcess] = [context.Process(target=_spin, args=(os.getpid(),)) for _ in range(cores)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _spin(parent: int) -> None:
    while os.getppid() == parent:
        sum(range(100_000))


def _train(results: Queue[BudgetRecord], minutes: float, store: str) -> None:
    import torch

    import holdfast
    from benchmarks.checkpoint.training import BenchmarkTraining

    torch.set_num_threads(1)
    training = BenchmarkTraining(SCALE)
    record = BudgetRecord()
    session = holdfast.Session(
        "noisy", model=training.model, optimizer=training.optimizer, store=store, budget=BUDGET, keep=2
    )
    with session:
        session.resume()
        began = ended = time.monotonic()
        while ended < began + 60 * minutes or (
            record.intervals < LEAST_INTERVALS and ended < began + 60 * MOST_MINUTES
        ):
            training.iterate()
            taken_at = session._boundary._taken_at
            session.step()
            before, ended = ended, time.monotonic()
            record.iteration(ended - before, session._controller, started=session._boundary._taken_at != taken_at)
    results.put(record)
