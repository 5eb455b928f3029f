"""A job of two ranks, one of which is slower."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast

ITERATIONS, EXTRA_SECONDS = 20, 0.1


def train(stage: Any, server: str, store: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with holdfast.Session("two-ranks", model=model, optimizer=optimizer, store=store, server=server) as session:
        for _ in range(ITERATIONS):
            loss = model(torch.ones(4, 16)).square().mean()
            if dist.get_rank() == 1:
                time.sleep(EXTRA_SECONDS)  # what makes this rank the slow one
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step(loss=loss)
    return {"iteration": session.iteration}
