"""Measurements of Holdfast alone: overhead without checkpoints, and memory growth."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from benchmarks.harness import memory_bytes

from .contender import Contender
from .ours import HoldfastContender, open_session
from .scale import TrainingScale
from .training import BenchmarkTraining

BLOCK_ITERATIONS = 25
"""Iterations per comparison: a quarter of a second."""
LOOK_EVERY_CHECKPOINTS = 10


class HoldfastMeasurements:
    """The calls of a worker."""

    def start(self, device: str, folder: Path) -> float:
        """Build two small trainings; return the seconds of an iteration."""
        torch.set_num_threads(1)
        self._folder = folder
        folder.mkdir(parents=True)
        scale = TrainingScale(layers=2, width=64, tokens=64, device=device)
        self._trainings = [BenchmarkTraining(scale), BenchmarkTraining(scale)]
        self._trainings[1].seconds(BLOCK_ITERATIONS)
        return self._trainings[0].seconds(BLOCK_ITERATIONS) / BLOCK_ITERATIONS

    def idle(self, pairs: int, held: int) -> list[float]:
        """Return (with - without) / without for each pair, with a session attached to training number `held`.

        Call it for both: two equal trainings differ by the location of their memory.
        """
        bare, training = self._trainings[1 - held], self._trainings[held]
        session, ratios = open_session(self._folder / f"idle-{held}", training), []

        def iterate() -> None:
            training.iterate()
            session.step()

        with session, session.paused():
            training.seconds(BLOCK_ITERATIONS, iterate)
            for pair in range(pairs):
                turns = {"with": lambda: training.seconds(BLOCK_ITERATIONS, iterate),
                         "without": lambda: bare.seconds(BLOCK_ITERATIONS)}  # fmt: skip
                seconds = {name: turns[name]() for name in sorted(turns, reverse=not pair % 2)}
                ratios.append(seconds["with"] / seconds["without"] - 1)
        return ratios

    def growth(self, checkpoints: int) -> list[tuple[int, int]]:
        """Return (checkpoints taken, bytes of memory) at several points."""
        folder = self._folder / "growth"
        folder.mkdir()
        training = self._trainings[0]
        contender: Contender = HoldfastContender(training, folder)
        contender.prepare()
        seen = []
        for step in range(1, checkpoints + 1):
            training.iterate()
            contender.save(step)
            if step % LOOK_EVERY_CHECKPOINTS == 0:
                contender.finish()
                seen.append((step, memory_bytes(os.getpid())))
        contender.close()
        return seen

    def close(self) -> None: ...
