"""Train 500 iterations and record the threads that start: a workload of a fork server, and of several ranks."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast

ITERATIONS = 500


def train(stage: Any, folder: str, variables: dict[str, str]) -> None:
    """Of one process, or of a rank of a process group; `variables` are those of the environment."""
    started, start = [], threading.Thread.start

    def recorded_start(thread: threading.Thread) -> None:
        started.append(thread.name)
        start(thread)

    threading.Thread.start = recorded_start  # type: ignore[method-assign]  # a fork server has started none
    os.environ.update(variables)
    several = dist.is_initialized()
    rank = dist.get_rank() if several else 0
    torch.manual_seed(rank)
    model: torch.nn.Module = torch.nn.Linear(64, 64)
    if several:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    session = holdfast.Session("threads", model=model, optimizer=optimizer, every=5)
    with session:
        session.resume()
        while session.iteration < ITERATIONS:
            loss = model(torch.randn(32, 64)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step(loss=loss)
    Path(folder, f"threads-{rank}.json").write_text(json.dumps(started))


def live(stage: Any, **options: Any) -> None:
    import tests.support.eager_torch  # noqa: F401  not for several ranks

    stage.ready()
    train(stage, **options)
