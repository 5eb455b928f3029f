"""A LightningModule under a Trainer: validation within an epoch, accumulated gradients, metrics by epoch."""

from __future__ import annotations

import argparse
import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.integrations import job


class Classifier(pl.LightningModule):
    def __init__(self, log: job.UpdateLog) -> None:
        super().__init__()
        self.model = job.classifier()
        self._log = log

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        features, classes, samples = batch
        loss = nn.functional.cross_entropy(self.model(features), classes)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self._log.batch(loss.item(), samples)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        features, classes, _ = batch
        self.log("val_loss", nn.functional.cross_entropy(self.model(features), classes))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        # steps with a loss of the whole epoch: a resume that loses a part of it trains on with another rate
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        scheduler = {"scheduler": plateau, "monitor": "train_loss_epoch", "interval": "epoch"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class LogUpdates(Callback):
    """Logs each update before a checkpoint of it is saved."""

    def __init__(self, log: job.UpdateLog) -> None:
        self._log, self._global_step = log, 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._global_step = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            self._log.update(trainer.global_step)


class TimedModelCheckpoint(ModelCheckpoint):
    """Logs how long a checkpoint blocks training."""

    def __init__(self, log: job.UpdateLog, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._log = log

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        started = time.perf_counter()
        super()._save_checkpoint(trainer, filepath)
        self._log.blocked(time.perf_counter() - started)


def trainer_arguments(args: argparse.Namespace, log: job.UpdateLog) -> tuple[list[Callback], str | None]:
    """Return the callbacks that save, and the checkpoint to resume from."""
    if args.resume_by == "holdfast":
        from holdfast.integrations.lightning import Checkpoint

        return [Checkpoint("lightning", store=args.store, every=job.EVERY)], None
    if args.resume_by == "framework":
        saved = TimedModelCheckpoint(log, dirpath=args.store, every_n_train_steps=job.EVERY, save_last=True)
        return [saved], "last"
    return [], None


def main() -> None:
    args = job.arguments()
    log = job.UpdateLog(args.log)
    pl.seed_everything(job.SEED)
    callbacks, ckpt_path = trainer_arguments(args, log)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=job.EPOCHS,
        accumulate_grad_batches=job.ACCUMULATE,
        val_check_interval=0.5,
        callbacks=[LogUpdates(log), *callbacks],
        enable_checkpointing=args.resume_by == "framework",
        enable_progress_bar=False,
        logger=False,
    )
    data = job.AugmentedSamples()
    train = DataLoader(data, batch_size=job.BATCH_SIZE, shuffle=True, num_workers=args.workers)
    validation = DataLoader(data, batch_size=32)
    trainer.fit(Classifier(log), train, validation, ckpt_path=ckpt_path)
    log.finished()


if __name__ == "__main__":
    main()
