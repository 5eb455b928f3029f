"""A script in the style of Accelerate's examples, with gradient accumulation and a scheduler."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

from benchmarks.integrations import job
from holdfast.integrations.accelerate import session as create_session


def main() -> None:
    args = job.arguments()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=job.ACCUMULATE)
    set_seed(job.SEED)
    log = job.UpdateLog(_log_of_rank(args.log, accelerator.process_index))
    model: Any = job.classifier()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 36 * accelerator.num_processes)
    loader: Any = torch.utils.data.DataLoader(
        job.AugmentedSamples(),
        batch_size=job.BATCH_SIZE // accelerator.num_processes,
        shuffle=True,
        num_workers=args.workers,
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    training = model, optimizer, scheduler, loader
    if args.resume_by == "holdfast":
        train_with_holdfast(args, accelerator, training, log)
    else:
        train_with_accelerate(args, accelerator, training, log)
    log.finished()
    accelerator.end_training()


def train_with_holdfast(args: Any, accelerator: Any, training: Any, log: job.UpdateLog) -> None:
    model, optimizer, scheduler, loader = training
    session = create_session(
        accelerator, "accelerate", store=args.store, every=job.EVERY, seed=job.SEED, model=model
    )
    for _ in range(session.epoch, job.EPOCHS):
        for batch in loader:
            loss = train_on(batch, accelerator, model, optimizer, scheduler, log)
            if accelerator.sync_gradients:
                log.update(session.iteration + 1)
            session.step(loss=loss)
    session.close()


def train_with_accelerate(args: Any, accelerator: Any, training: Any, log: job.UpdateLog) -> None:
    """Save and resume as in Accelerate's guide to checkpoints."""
    model, optimizer, scheduler, loader = training
    updates = 0
    if args.resume_by == "framework" and (last := _newest(args.store)) is not None:
        accelerator.load_state(str(last))
        updates = int(last.name.removeprefix("step_"))
    per_epoch = len(loader) // job.ACCUMULATE
    first, skipped = divmod(updates, per_epoch)
    for epoch in range(first, job.EPOCHS):
        batches = loader
        if epoch == first and skipped:
            batches = accelerator.skip_first_batches(loader, skipped * job.ACCUMULATE)
        for batch in batches:
            train_on(batch, accelerator, model, optimizer, scheduler, log)
            if accelerator.sync_gradients:
                updates += 1
                log.update(updates)
                if args.resume_by == "framework" and updates % job.EVERY == 0:
                    started = time.perf_counter()
                    accelerator.save_state(str(args.store / f"step_{updates}"))
                    log.blocked(time.perf_counter() - started)


def train_on(batch: Any, accelerator: Any, model: Any, optimizer: Any, scheduler: Any, log: job.UpdateLog) -> Any:
    features, classes, samples = batch
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(features), classes)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    log.batch(loss.item(), samples)
    return loss


def _newest(store: Path) -> Path | None:
    """Return the newest directory that `save_state` has written to its end: the scheduler is written late."""
    complete = [path for path in store.glob("step_*") if (path / "random_states_0.pkl").exists()]
    return max(complete, key=lambda path: int(path.name.removeprefix("step_")), default=None)


def _log_of_rank(log: Path, rank: int) -> Path:
    return log if rank == 0 else log.with_name(f"rank-{rank}-{log.name}")


if __name__ == "__main__":
    main()
