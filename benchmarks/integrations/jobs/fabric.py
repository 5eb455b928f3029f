"""A loop with Lightning Fabric, which has no loop state of its own."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn

import holdfast
from benchmarks.integrations import job


def main() -> None:
    args = job.arguments()
    log = job.UpdateLog(args.log)
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.seed_everything(job.SEED)
    model = job.classifier()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 36)
    plain = torch.utils.data.DataLoader(
        job.AugmentedSamples(), batch_size=job.BATCH_SIZE, shuffle=True, num_workers=args.workers
    )
    if args.resume_by == "holdfast":
        loader = holdfast.DataLoader.from_torch(plain, seed=job.SEED)
        session = holdfast.Session(
            "fabric", store=args.store, every=job.EVERY, model=model, optimizer=optimizer, scheduler=scheduler
        )
        for number, batch in enumerate(session.batches(loader, epochs=job.EPOCHS), start=1):
            is_update = number % job.ACCUMULATE == 0
            loss = train(fabric, model, optimizer, scheduler, fabric.to_device(batch), is_update, log)
            if is_update:
                log.update(session.iteration + 1)
                session.step(loss=loss)
        session.close()
    else:
        own_loop(args, fabric, model, optimizer, scheduler, fabric.setup_dataloaders(plain), log)
    log.finished()


def train(
    fabric: Fabric, model: Any, optimizer: Any, scheduler: Any, batch: Any, is_update: bool, log: job.UpdateLog
) -> torch.Tensor:
    """Train on a batch, and update the weights at the end of an accumulation."""
    features, classes, samples = batch
    with fabric.no_backward_sync(model, enabled=not is_update):
        loss: torch.Tensor = nn.functional.cross_entropy(model(features), classes)
        fabric.backward(loss / job.ACCUMULATE)
    log.batch(loss.item(), samples)
    if is_update:
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return loss


def own_loop(
    args: Any, fabric: Fabric, model: Any, optimizer: Any, scheduler: Any, loader: Any, log: job.UpdateLog
) -> None:
    """Save and resume with `fabric.save` and `fabric.load`, and skip the batches of an interrupted epoch."""
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0, "batch": 0, "update": 0}
    path = args.store / "last.ckpt"
    if args.resume_by == "framework" and path.exists():
        fabric.load(path, state)
    for epoch in range(state["epoch"], job.EPOCHS):
        for number, batch in enumerate(loader):
            if epoch == state["epoch"] and number < state["batch"]:
                continue
            is_update = (number + 1) % job.ACCUMULATE == 0
            train(fabric, model, optimizer, scheduler, batch, is_update, log)
            if not is_update:
                continue
            state |= {"epoch": epoch, "batch": number + 1, "update": state["update"] + 1}
            log.update(state["update"])
            if args.resume_by == "framework" and state["update"] % job.EVERY == 0:
                started = time.perf_counter()
                fabric.save(path, state)
                log.blocked(time.perf_counter() - started)


if __name__ == "__main__":
    main()
