"""A job of several ranks on several hosts, for torchrun. Each rank has a ledger in the folder of the test.

hosts_trainer.py FOLDER ITERATIONS
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

import holdfast
from tests.support.memory_tier_torchrun_trainer import RankedWork

JOB, EVERY = "hosts", 5
STEP_SECONDS = 0.02
"""So that a host can be lost within a few iterations."""


def alone(stage: Any, iterations: int) -> list[str]:
    """What this rank comes to where nothing happens, and without Holdfast."""
    work = RankedWork("ddp")
    return [work.outcome(work.iterate()) for _ in range(iterations)]


def train(folder: Path, iterations: int) -> None:
    dist.init_process_group("gloo")
    work = RankedWork("ddp")
    session = holdfast.Session(
        JOB, model=work.model, optimizer=work.optimizer, loop=holdfast.Variables(), every=EVERY
    )
    session.resume()
    ledger = os.open(folder / f"ledger-{session.rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    while session.iteration < iterations:
        loss = work.iterate()
        place = f"{os.getpid()} {session.attempt} {session.lineage} {session.iteration + 1}"
        os.write(ledger, f"{place} {work.outcome(loss)}\n".encode())
        session.step(loss=loss)
        time.sleep(STEP_SECONDS)
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]))
