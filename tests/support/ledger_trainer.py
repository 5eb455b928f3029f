"""A small training job that writes the loss of each step, bit for bit, and its samples to a ledger.

Everything that a resume can get wrong is in it: dropout, BatchNorm's buffers, momentum, a scheduler, worker
processes, random augmentation, an epoch length that no batch size divides.
"""

from __future__ import annotations

import argparse
import os
import signal
import struct
import time

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, Dataset

import holdfast
import tests.support.eager_torch  # noqa: F401

SAMPLES = 211


class IndexedPoints(Dataset):
    """Each sample comes with its own index and a fresh random disturbance."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        angle = torch.tensor(index * 0.7)
        point = torch.stack([angle.sin(), angle.cos(), (2 * angle).sin()])
        return index, point + 0.1 * torch.randn(3), index % 3


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("ledger")
    parser.add_argument("--job", default="ledger")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--every", type=int, default=None)
    parser.add_argument("--slowly", action="store_true", help="give an operator time to act")
    parser.add_argument("--fail-at", type=int, help="an iteration that is not survived ...")
    parser.add_argument("--unless-there-is", metavar="FILE", help="... as long as there is no such file")
    parser.add_argument("--until-there-is", metavar="FILE", help="do not end before")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--start-method", choices=["fork", "spawn", "forkserver"], default="fork", help="of workers"
    )
    parser.add_argument("--loader", choices=["holdfast", "torch", "by hand"], default="holdfast")
    options = parser.parse_args()
    torch.manual_seed(7)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(3, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    session = holdfast.Session(
        options.job, model=model, optimizer=optimizer, scheduler=scheduler, every=options.every
    )
    reading = {"batch_size": 8, "shuffle": True, "num_workers": options.workers}
    if options.workers:
        reading["multiprocessing_context"] = options.start_method
    if options.loader == "holdfast":
        loader = holdfast.DataLoader(IndexedPoints(), seed=3, **reading)
    else:
        loader = DataLoader(IndexedPoints(), **reading)
    if options.loader == "by hand":
        session.resume()
        batches = (batch for _ in range(options.epochs) for batch in loader)
    else:
        batches = session.batches(loader, epochs=options.epochs)
    ledger = os.open(options.ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    for indices, points, kinds in batches:
        loss = F.cross_entropy(model(points), kinds)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        bits = struct.pack("<f", loss.item()).hex()
        samples = ",".join(map(str, indices.tolist()))
        # before step, which may go back to another iteration and lineage
        line = f"{os.getpid()} {session.lineage} {session.iteration + 1} {bits} {samples}\n"
        os.write(ledger, line.encode())
        session.step(loss=loss)
        if session.iteration == options.fail_at and not os.path.exists(options.unless_there_is):
            os.kill(os.getpid(), signal.SIGKILL)
        if options.slowly:
            time.sleep(0.02)
    while options.until_there_is and not os.path.exists(options.until_there_is):
        time.sleep(0.01)


if __name__ == "__main__":
    main()
