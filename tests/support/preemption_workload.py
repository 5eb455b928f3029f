"""A job of several ranks in which one rank receives SIGTERM."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast

TOLD_AT = 10


def train(stage: Any, store: str, told: int) -> dict[str, Any]:
    """Train until SIGTERM reaches rank `told`; return the last iteration and exit status of this rank."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = holdfast.Session("leaving", model=model, optimizer=optimizer, store=store, every=10**9)
    try:
        while session.iteration < 10_000:
            model(torch.ones(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if (session.iteration, dist.get_rank()) == (TOLD_AT, told):
                os.kill(os.getpid(), signal.SIGTERM)
            session.step()
    except SystemExit as end:
        return {"iteration": session.iteration, "exit": end.code}
    finally:
        session.close()
    return {"iteration": session.iteration, "exit": None}
