"""Train 500 iterations, alone or under torchrun, and record the threads that start.

thread_recording_trainer.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

ITERATIONS = 500
started: list[str] = []
_start = threading.Thread.start


def start(thread: threading.Thread) -> None:
    started.append(thread.name)
    _start(thread)


threading.Thread.start = start  # type: ignore[method-assign]  # before anything else can start one

import holdfast  # noqa: E402


def train(folder: Path) -> None:
    several = "RANK" in os.environ
    rank = int(os.environ.get("RANK", "0"))
    if several:
        dist.init_process_group("gloo")
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
    (folder / f"threads-{rank}.json").write_text(json.dumps(started))
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    train(Path(sys.argv[1]))
