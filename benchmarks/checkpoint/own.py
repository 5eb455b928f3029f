"""Measurements of Holdfast alone: overhead without checkpoints, and memory growth."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from .contender import Contender
from .ours import HoldfastContender, open_session
from .processes import memory_bytes
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
        _bare(self._trainings[1], BLOCK_ITERATIONS)
        return _bare(self._trainings[0], BLOCK_ITERATIONS) / BLOCK_ITERATIONS

    def idle(self, pairs: int, held: int) -> list[float]:
        """Return (with - without) / without for each pair, with a session attached to training number `held`.

        Call it for both: two equal trainings differ by the location of their memory.
        """
        bare, training = self._trainings[1 - held], self._trainings[held]
        session = open_session(self._folder / f"idle-{held}", training)
        ratios = []
        with session, session.paused():
            _attached(session, training, BLOCK_ITERATIONS)
            for pair in range(pairs):
                if pair % 2:
                    seconds, without = (
                        _attached(session, training, BLOCK_ITERATIONS),
                        _bare(bare, BLOCK_ITERATIONS),
                    )
                else:
                    without, seconds = (
                        _bare(bare, BLOCK_ITERATIONS),
                        _attached(session, training, BLOCK_ITERATIONS),
                    )
                ratios.append(seconds / without - 1)
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

    def rest(self) -> None: ...

    def close(self) -> None: ...


def _bare(training: BenchmarkTraining, iterations: int) -> float:
    started = time.perf_counter()
    for _ in range(iterations):
        training.iterate()
    training.synchronize()
    return time.perf_counter() - started


def _attached(session: Any, training: BenchmarkTraining, iterations: int) -> float:
    started = time.perf_counter()
    for _ in range(iterations):
        training.iterate()
        session.step()
    training.synchronize()
    return time.perf_counter() - started
