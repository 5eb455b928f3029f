"""A script without a line of Holdfast: python -m tests.frameworks.lightning_script LOG DEVICES BATCH-SECONDS"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.integrations import job
from benchmarks.integrations.jobs.lightning import LogUpdates


class Module(pl.LightningModule):
    def __init__(self, log: job.UpdateLog, seconds: float) -> None:
        super().__init__()
        self.model = job.classifier()
        self._log, self._seconds = log, seconds

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        features, classes, samples = batch
        loss = nn.functional.cross_entropy(self.model(features), classes)
        self._log.batch(loss.item(), samples)
        time.sleep(self._seconds)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    log = job.UpdateLog(Path(f"{sys.argv[1]}.{os.environ.get('LOCAL_RANK', 0)}"))
    devices = int(sys.argv[2])
    pl.seed_everything(job.SEED)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_epochs=2,
        accumulate_grad_batches=2,
        callbacks=[LogUpdates(log)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    data = DataLoader(job.AugmentedSamples(), batch_size=job.BATCH_SIZE, shuffle=True, num_workers=1)
    trainer.fit(Module(log, float(sys.argv[3])), data)
    log.finished()


if __name__ == "__main__":
    main()
