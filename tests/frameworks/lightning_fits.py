"""Fits of small modules with Lightning, which end after an update and are fitted again in another Trainer."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.integrations import job
from holdfast.integrations.lightning import Checkpoint

UPDATES_PER_EPOCH = 12


class Ended(Exception):
    """Stands for a crash of the training process."""


class Module(pl.LightningModule):
    """Trains a classifier, and records the loss and the samples of every batch."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.model = job.classifier()
        self._seen = seen

    def loss(self, batch: Any) -> torch.Tensor:
        features, classes, samples = batch
        loss = nn.functional.cross_entropy(self.model(features), classes)
        self._seen.append((loss.item().hex(), samples.tolist()))
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        features, classes, _ = batch
        self.log("val_loss", nn.functional.cross_entropy(self.model(features), classes))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        scheduler = {"scheduler": plateau, "monitor": "train_loss_epoch", "interval": "epoch"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Record(Callback):
    """Collects what a module saw in each update, and ends the training after one of them."""

    def __init__(self, end_after: int | None, checkpoint: Checkpoint) -> None:
        self.seen: list[Any] = []
        self.updates: list[tuple[int, list[Any]]] = []
        self._end_after, self._global_step = end_after, 0
        self._checkpoint = checkpoint

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._global_step = trainer.global_step
        self.seen.clear()  # of trial fits, in which this callback takes no part

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            self.updates.append((self._global_step, list(self.seen)))
            self.seen.clear()
            if self._end_after == self._global_step and self._checkpoint.session is not None:
                self._wait()  # for the first checkpoint of an attempt, which measures what one costs
                self._checkpoint.session.checkpoint()

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._end_if_due()

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._end_if_due()

    def _end_if_due(self) -> None:
        if self._end_after is not None and self._global_step >= self._end_after:
            self._wait()
            raise Ended

    def _wait(self) -> None:
        if self._checkpoint.session is not None:
            self._checkpoint.session.wait(300)


def torch_loader(**arguments: Any) -> DataLoader[Any]:
    return DataLoader(job.AugmentedSamples(), batch_size=job.BATCH_SIZE, shuffle=True, **arguments)


class Stream(IterableDataset[Any]):
    """The samples in order, without a length."""

    def __iter__(self) -> Iterator[Any]:
        return map(job.AugmentedSamples().__getitem__, range(job.SAMPLES))


def fit(
    store: Path,
    *,
    end_after: int | None = None,
    module: Callable[[list[Any]], pl.LightningModule] = Module,
    train: Callable[[], Any] = torch_loader,
    callbacks: Callable[[], list[Callback]] = list,
    fit_arguments: Callable[[], dict[str, Any]] = dict,
    job_name: str = "fit",
    settings: dict[str, Any] | None = None,
    **trainer_arguments: Any,
) -> tuple[Record, pl.Trainer]:
    """Fit a new module in a new Trainer, with a checkpoint of the update after which it ends."""
    checkpoint = Checkpoint(job_name, **{"store": store, "every": 1000} | (settings or {}))
    record = Record(end_after, checkpoint)
    pl.seed_everything(job.SEED)
    random.seed(job.SEED)
    arguments = {"max_epochs": 3, "accumulate_grad_batches": job.ACCUMULATE, "val_check_interval": 0.5}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[record, *callbacks(), checkpoint],
            **{"logger": False, "enable_checkpointing": False} | arguments | trainer_arguments,
        )
        validation = DataLoader(job.AugmentedSamples(), batch_size=32)
        try:
            given = fit_arguments()
            loaders = () if "datamodule" in given else (train(), validation)
            trainer.fit(module(record.seen), *loaders, **given)
        except Ended:
            assert end_after is not None
    return record, trainer


def end_and_resume(folder: Path, ends: list[int], **arguments: Any) -> list[int]:
    """Fit once without and once with ends after these updates. Assert that both are the same, bit for bit.

    Return the first update of each start.
    """
    expected, whole = fit(folder / "whole", job_name="whole", **arguments)
    starts = []
    for end_after in (*ends, None):
        record, trainer = fit(folder / "ended", end_after=end_after, job_name="ended", **arguments)
        starts.append(record.updates[0][0] if record.updates else -1)
        for update in record.updates:
            assert update == dict_of(expected)[update[0]], f"update {update[0]} after starts at {starts}"
    assert_equal(trainer.lightning_module.state_dict(), whole.lightning_module.state_dict())
    assert_equal(dict(trainer.callback_metrics), dict(whole.callback_metrics))
    assert trainer.current_epoch == whole.current_epoch
    assert trainer.global_step == whole.global_step
    for one, other in zip(trainer.optimizers, whole.optimizers, strict=True):
        assert_equal(one.state_dict(), other.state_dict())
    return starts


def dict_of(record: Record) -> dict[int, tuple[int, list[Any]]]:
    return {update[0]: update for update in record.updates}


def assert_equal(one: Any, other: Any, path: str = "") -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_equal(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal(a, b, f"{path}.{number}")
    else:
        assert one == other, path
