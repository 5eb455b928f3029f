"""Trainer for torchrun: ranks with loader workers train until SIGTERM ends them.

preempted_torchrun_trainer.py FOLDER JOB
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast


class ConstantDataset(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        return torch.full((16,), float(index % 7))


def main(folder, job):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    session = holdfast.Session(job, model=model, optimizer=optimizer, every=10**9)
    loader = holdfast.DataLoader(ConstantDataset(), batch_size=4, num_workers=1)
    ledger = os.open(Path(folder, f"ledger-{dist.get_rank()}"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for batch in session.batches(loader, epochs=None):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        os.write(ledger, f"{session.iteration + 1}\n".encode())
        session.step()


if __name__ == "__main__":
    main(*sys.argv[1:])
