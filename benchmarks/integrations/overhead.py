"""Cost of an adapter in an iteration without a checkpoint: the same training with and without it, in turn.

Measured in CPU time of the training thread, which depends little on other work of the machine. Batches are read on
this thread, without workers.
"""

from __future__ import annotations

import itertools
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness import scratch
from benchmarks.integrations import job

ROUNDS, UPDATES, WARM_UP = 4, 300, 50
"""Pairs of trainings, updates of each, and updates of each that do not count."""
WORKERS = (job.WORKERS, 0)
NO_CHECKPOINT = 10**9
"""An interval in which no checkpoint falls."""

Train = Callable[[Path | None, int], list[float]]
"""Train with a session in a store, or without one, and with a number of loader workers.

Return the CPU times at which the updates ended.
"""


@dataclass(frozen=True, kw_only=True)
class Cost:
    script: str
    workers: int
    """Loader workers; without them, training reads and seeds each sample itself."""
    without: list[float]
    """Seconds of each iteration."""
    with_holdfast: list[float]

    @property
    def median_microseconds(self) -> float:
        return 1e6 * (statistics.median(self.with_holdfast) - statistics.median(self.without))

    @property
    def undisturbed_microseconds(self) -> float:
        """Difference of the 10th percentiles, which other work on the machine changes least."""
        return 1e6 * (_p10(self.with_holdfast) - _p10(self.without))


def measure(rounds: int = ROUNDS) -> list[Cost]:
    """Measure a plain session and the adapters."""
    warnings.simplefilter("ignore")
    logging.getLogger("holdfast").setLevel(logging.WARNING)
    return [_measure(name, train, workers, rounds) for name, train in TRAININGS.items() for workers in WORKERS]


def _measure(name: str, train: Train, workers: int, rounds: int) -> Cost:
    cost = Cost(script=name, workers=workers, without=[], with_holdfast=[])
    for _ in range(rounds):
        cost.without.extend(_seconds(train(None, workers)))
        with scratch() as store:
            cost.with_holdfast.extend(_seconds(train(store, workers)))
    return cost


def _seconds(ends: list[float]) -> Iterator[float]:
    return (end - begin for begin, end in itertools.pairwise(ends[WARM_UP:]))


def _p10(values: list[float]) -> float:
    return statistics.quantiles(values, n=10)[0]


def _training() -> tuple[nn.Module, torch.optim.Optimizer, torch.utils.data.Dataset[Any], list[float]]:
    torch.manual_seed(job.SEED)
    model = job.classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ends: list[float] = []
    optimizer.register_step_post_hook(lambda *_: ends.append(time.thread_time()))
    samples = job.BATCH_SIZE * UPDATES
    features, classes = torch.randn(samples, job.FEATURES), torch.randint(job.CLASSES, (samples,))
    return model, optimizer, torch.utils.data.TensorDataset(features, classes), ends


def _loop(
    batches: Iterable[Any], model: Any, optimizer: Any, session: Any, backward: Callable[[Any], None]
) -> None:
    for features, classes in batches:
        backward(nn.functional.cross_entropy(model(features), classes))
        optimizer.step()
        optimizer.zero_grad()
        if session is not None:
            session.step()


def _plain(store: Path | None, workers: int) -> list[float]:
    import holdfast

    model, optimizer, data, ends = _training()
    options: dict[str, Any] = {"batch_size": job.BATCH_SIZE, "shuffle": True, "num_workers": workers}
    if store is None:
        _loop(torch.utils.data.DataLoader(data, **options), model, optimizer, None, torch.Tensor.backward)
        return ends
    objects = {"model": model, "optimizer": optimizer}
    with holdfast.Session("overhead", store=store, every=NO_CHECKPOINT, **objects) as session:
        batches = session.batches(holdfast.DataLoader(data, seed=job.SEED, **options))
        _loop(batches, model, optimizer, session, torch.Tensor.backward)
    return ends


def _accelerate(store: Path | None, workers: int) -> list[float]:
    from accelerate import Accelerator

    from holdfast.integrations.accelerate import session as session_of

    model, optimizer, data, ends = _training()
    accelerator = Accelerator(cpu=True)
    loader = torch.utils.data.DataLoader(data, batch_size=job.BATCH_SIZE, shuffle=True, num_workers=workers)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    session = session_of(accelerator, "overhead", store=store, every=NO_CHECKPOINT) if store is not None else None
    _loop(loader, model, optimizer, session, accelerator.backward)
    if session is not None:
        session.close()
    return ends


class _WithLoss(nn.Module):
    """A model that returns its loss, as the Trainer of Transformers expects."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.model(features), labels)}


def _transformers(store: Path | None, workers: int) -> list[float]:
    from transformers import Trainer, TrainingArguments

    import holdfast.integrations.transformers

    model, optimizer, data, ends = _training()
    arguments = TrainingArguments(
        tempfile.gettempdir(), num_train_epochs=1, per_device_train_batch_size=job.BATCH_SIZE, use_cpu=True,
        dataloader_num_workers=workers,
        save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip

    def collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
        features, labels = zip(*samples, strict=True)
        return {"features": torch.stack(features), "labels": torch.stack(labels)}

    trainer = Trainer(
        model=_WithLoss(model), args=arguments, train_dataset=data, data_collator=collate,
        optimizers=(optimizer, None),
    )  # fmt: skip
    if store is not None:
        holdfast.integrations.transformers.attach(trainer, "overhead", store=store, every=NO_CHECKPOINT)
    trainer.train()
    return ends


def _lightning(store: Path | None, workers: int) -> list[float]:
    import lightning.pytorch as pl

    from holdfast.integrations.lightning import Checkpoint

    model, optimizer, data, ends = _training()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            features, classes = batch
            return nn.functional.cross_entropy(self.model(features), classes)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    callbacks = [Checkpoint(f"overhead{os.urandom(4).hex()}", store=store, every=NO_CHECKPOINT)] if store else []
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=callbacks, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(
        Module(), torch.utils.data.DataLoader(data, batch_size=job.BATCH_SIZE, shuffle=True, num_workers=workers)
    )
    return ends


TRAININGS: dict[str, Train] = {
    "plain": _plain,
    "accelerate": _accelerate,
    "transformers": _transformers,
    "lightning": _lightning,
}
