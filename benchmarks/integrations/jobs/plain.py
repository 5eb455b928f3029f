"""A plain loop of PyTorch, with gradient accumulation."""

from __future__ import annotations

import torch
from torch import nn

import holdfast
from benchmarks.integrations import job


def main() -> None:
    args = job.arguments()
    log = job.UpdateLog(args.log)
    torch.manual_seed(job.SEED)
    model = job.classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 36)
    plain = torch.utils.data.DataLoader(
        job.AugmentedSamples(), batch_size=job.BATCH_SIZE, shuffle=True, num_workers=args.workers
    )
    loader = holdfast.DataLoader.from_torch(plain, seed=job.SEED)
    session = holdfast.Session(
        "plain", store=args.store, every=job.EVERY, model=model, optimizer=optimizer, scheduler=scheduler
    )
    for number, (features, classes, samples) in enumerate(session.batches(loader, epochs=job.EPOCHS), start=1):
        loss = nn.functional.cross_entropy(model(features), classes)
        (loss / job.ACCUMULATE).backward()
        log.batch(loss.item(), samples)
        if number % job.ACCUMULATE == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            log.update(session.iteration + 1)
            session.step(loss=loss)
    log.finished()
    session.close()


if __name__ == "__main__":
    main()
