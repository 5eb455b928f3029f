"""A training job whose data has samples that are not numbers, for `holdfast run`: left_out_trainer.py LEDGER.

It writes the lineage, the iteration and the loss of each update to a ledger, bit for bit. With `--without` it is a
plain loop over the order of the data without the batches of these numbers.
"""

from __future__ import annotations

import argparse
import os
import struct
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import holdfast
import tests.support.eager_torch  # noqa: F401

SAMPLES, BATCH_SIZE = 96, 4
BAD_SAMPLE = 17


class PointsWithNan(Dataset[Tensor]):
    """Points with a fresh random disturbance each time, of which one is not a number."""

    def __init__(self, bad: int | None) -> None:
        self.points = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
        if bad is not None:
            self.points[bad] = float("nan")

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return self.points[index] + 0.01 * torch.randn(4)


class Job:
    def __init__(self, workers: int, bad: int | None) -> None:
        torch.manual_seed(1)
        torch.set_num_threads(1)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-2)
        self.loader = holdfast.DataLoader(
            PointsWithNan(bad), batch_size=BATCH_SIZE, shuffle=True, seed=3, num_workers=workers
        )

    def update(self, batch: Tensor) -> float:
        loss = self.model(batch).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ledger")
    parser.add_argument("--job", default="left-out")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--bad", type=int, help="index of a sample that is not a number")
    parser.add_argument("--without", help="train a plain loop without these batches, as in 3,4,5")
    parser.add_argument("--restart", action="store_true", help="cannot be restored in place")
    parser.add_argument("--seconds", type=float, default=0.0, help="time of an iteration, at least")
    parser.add_argument("--wait-at", type=int, help="an iteration to wait at ...")
    parser.add_argument("--until-there-is", help="... until there is this file")
    options = parser.parse_args()
    job, ledger = (
        Job(options.workers, options.bad),
        os.open(options.ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT),
    )
    if options.without is not None:
        left_out = set(map(int, filter(None, options.without.split(","))))
        everything = enumerate(batch for _ in range(options.epochs) for batch in job.loader)
        trained = (batch for number, batch in everything if number not in left_out)
        for iteration, batch in enumerate(trained, start=1):
            _write(ledger, 0, iteration, job.update(batch))
        return
    session = holdfast.Session(
        options.job, model=job.model, optimizer=job.optimizer, every=5, keep=50,
        on_trouble="restore 1000 in 100000", restorable_in_place=False if options.restart else None,
    )  # fmt: skip
    for batch in session.batches(job.loader, epochs=options.epochs):
        loss = job.update(batch)
        _write(ledger, session.lineage, session.iteration + 1, loss)
        session.step(loss=loss)
        time.sleep(options.seconds)
        while session.iteration == options.wait_at and not Path(options.until_there_is).exists():
            time.sleep(0.01)
    session.close()


def _write(ledger: int, lineage: int, iteration: int, loss: float) -> None:
    os.write(ledger, f"{os.getpid()} {lineage} {iteration} {struct.pack('<d', loss).hex()}\n".encode())


if __name__ == "__main__":
    main()
