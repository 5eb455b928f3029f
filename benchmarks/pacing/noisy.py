"""The interval of real training while other work takes 0, 50 and 100 % of the cores by turns.

The record has the share of training time in which the overhead that the session reports for its newest window
exceeds the budget, by any amount. Time and changes of the interval count from EVIDENCE_CHECKPOINTS checkpoints
after the first plan on.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.checkpoint.scale import TrainingScale
from benchmarks.harness import in_process, scratch, talking
from holdfast.pacing import Controller

BUDGET = 0.035
EVIDENCE_CHECKPOINTS = 10
SHARES = (0.0, 0.5, 1.0)
PHASE_SECONDS = (3, 5, 8, 12, 20, 40)
SCALE = TrainingScale(layers=3, width=128, tokens=64)
"""Short iterations, of which a checkpoint is a large part."""
UNLIMITED = "1000TB/day"
"""A write budget that never decides, so that the overhead budget does."""
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
    changes: int = 0
    """Changes of the interval after the evidence phase."""
    _first: int | None = field(default=None, repr=False)
    _over: int = field(default=0, repr=False)
    _at_one: int = field(default=0, repr=False)

    @property
    def changes_an_hour(self) -> float:
        return 3600 * self.changes / self.seconds if self.seconds > 0 else 0.0

    def iteration(self, seconds: float, controller: Controller, *, started: bool) -> None:
        """Add an iteration; `started`: a checkpoint began at its end."""
        self.checkpoints += started
        plan, overhead = controller.plan, controller.measured_overhead
        if plan is None or plan.interval is None:
            return
        is_changed, self.interval = plan.interval != self.interval, plan.interval
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
        self.changes += is_changed
        if started:
            self.intervals += 1
            self._over = self._over + 1 if is_over else 0
            self.longest_over = max(self.longest_over, self._over)


def noisy_training(minutes: float, folder: Path, *, seed: int = 1, compress: bool = False) -> BudgetRecord:
    """Train on one CPU thread for `minutes`, while processes keep 0, 50 and 100 % of the cores busy by turns.

    It takes longer if that leaves fewer than LEAST_INTERVALS after the evidence phase, up to MOST_MINUTES.
    """
    chance, turn = random.Random(seed), seed
    with scratch(folder) as store, in_process(_train, minutes, store, compress) as trainer:
        while not trainer.done():
            turn += 1
            with busy_cores(SHARES[turn % len(SHARES)]):
                wait([trainer], chance.choice(PHASE_SECONDS[:-1]))
        record: BudgetRecord = trainer.result()
        return record


@contextlib.contextmanager
def busy_cores(share: float) -> Iterator[None]:
    """Keep this share of the cores busy, rounded to whole ones, with a process each."""
    with contextlib.ExitStack() as load:
        for _ in range(round(share * len(os.sched_getaffinity(0)))):
            load.enter_context(talking(_spin, patience=0))
        yield


def _spin(_: Connection) -> None:
    while True:
        sum(range(100_000))


def _train(minutes: float, store: Path, compress: bool) -> BudgetRecord:
    import torch

    import holdfast
    from benchmarks.checkpoint.training import BenchmarkTraining

    torch.set_num_threads(1)
    training = BenchmarkTraining(SCALE)
    record = BudgetRecord()
    session = holdfast.Session(
        "noisy", model=training.model, optimizer=training.optimizer, store=store, policy="checkfreq",
        budget=BUDGET, write_budget=UNLIMITED, compress=compress, keep=2,
    )  # fmt: skip
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
    return record
