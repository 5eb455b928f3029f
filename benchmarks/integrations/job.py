"""What the training scripts share: their arguments, their data, their model, and the log that is compared.

python -m benchmarks.integrations.jobs.<framework> --resume-by holdfast --store DIR --log FILE
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

SAMPLES, FEATURES, CLASSES = 96, 16, 4
BATCH_SIZE, EPOCHS, ACCUMULATE, WORKERS = 4, 3, 2, 2
"""12 updates an epoch, each of 2 batches of 4 samples."""
EVERY = 3
"""Updates between two checkpoints."""
SEED = 7


def arguments(parser: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """Parse the arguments of every script, and those that `parser` has."""
    parser = parser or argparse.ArgumentParser()
    parser.add_argument("--resume-by", choices=("holdfast", "framework", "nothing"), required=True)
    parser.add_argument("--store", type=Path, required=True, help="directory of checkpoints")
    log = "file to which every update appends a line"
    parser.add_argument("--log", "--update-log", dest="log", type=Path, required=True, help=log)
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument(
        "--preempted", action="store_true", help="the script receives SIGTERM: use the framework's own handling"
    )
    return parser.parse_args()


class AugmentedSamples(Dataset[tuple[torch.Tensor, int, int]]):
    """Random features with noise drawn from torch and from Python at every read: (features, class, index)."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self._features = torch.randn(SAMPLES, FEATURES, generator=generator)
        self._classes = torch.randint(CLASSES, (SAMPLES,), generator=generator).tolist()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        noisy = self._features[index] + 0.1 * torch.randn(FEATURES)
        return noisy * (1 if random.random() < 0.5 else -1), self._classes[index], index


def classifier() -> nn.Sequential:
    """Return a model with dropout and batch statistics."""
    return nn.Sequential(
        nn.Linear(FEATURES, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, CLASSES)
    )


class UpdateLog:
    """Appends one line per update: its number, the bits of its loss, its samples, and the time."""

    def __init__(self, path: Path) -> None:
        if int(os.environ.get("RANK", "0")):  # rank 0 of a job with several ranks logs its own part
            path = Path(os.devnull)
        self._file = path.open("a", buffering=1)
        self._samples: list[int] = []
        self._losses: list[str] = []

    def batch(self, loss: float, samples: torch.Tensor | list[int]) -> None:
        """Record a batch that was trained on."""
        self._losses.append(float(loss).hex())
        self._samples += samples.tolist() if isinstance(samples, torch.Tensor) else samples

    def update(self, number: int) -> None:
        """Record the end of update `number`, from 1, before anything saves a checkpoint of it."""
        self._write(event="update", number=number, losses=self._losses, samples=self._samples)
        self._samples, self._losses = [], []

    def blocked(self, seconds: float) -> None:
        """Record for how long training stood still for a checkpoint."""
        self._write(event="blocked", seconds=seconds)

    def finished(self) -> None:
        self._write(event="finished")

    def close(self) -> None:
        self._file.close()

    def _write(self, **entry: Any) -> None:
        self._file.write(json.dumps(entry | {"at": time.time()}) + "\n")


def log_blocked_time(
    owner: Any, name: str, log: UpdateLog, *, where: Callable[..., bool] = lambda *_, **__: True
) -> None:
    """Log how long each call of a method takes that saves something."""
    save = getattr(owner, name)

    def timed(*arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        saved = save(*arguments, **options)
        if saved is not False and where(*arguments, **options):
            log.blocked(time.perf_counter() - started)
        return saved

    setattr(owner, name, timed)
