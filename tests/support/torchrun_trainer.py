"""Trainer for torchrun: one rank hangs once, and is killed once if requested.

torchrun_trainer.py FOLDER JOB [hangs] [dies] [paced]
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.support.eventually import PATIENCE_SECONDS
from tests.support.interruptible_trainer import InterruptibleWork

ITERATIONS, EVERY = 40, 5
PACE_SECONDS = 0.1
"""So that there is time for an order within a few iterations."""
DIES_AT, HANGS_AT = 13, 27
"""Of rank 1, once each."""


def made() -> InterruptibleWork:
    work = InterruptibleWork(seed=dist.get_rank())
    work.model = DistributedDataParallel(work.model)
    return work


def alone(stage: Any) -> list[str]:
    """What this rank comes to where nothing happens, and without Holdfast."""
    work = made()
    return [work.outcome(work.iterate()) for _ in range(ITERATIONS)]


def stuck_for_ever() -> None:
    while True:
        time.sleep(60)


def first_time(note: Path) -> bool:
    try:
        note.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def train(folder: Path, job: str, *ends: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    work = made()
    session = holdfast.Session(
        job, model=work.model, optimizer=work.optimizer, loop=holdfast.Variables(), every=EVERY
    )
    session.resume()
    ledger = os.open(folder / f"ledger-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    while session.iteration < ITERATIONS:
        loss = work.iterate()
        place = f"{os.getpid()} {session.attempt} {session.lineage} {session.iteration + 1}"
        os.write(ledger, f"{place} {work.outcome(loss)}\n".encode())
        session.step(loss=loss)
        if "paced" in ends:
            time.sleep(PACE_SECONDS)
        end = {DIES_AT: "dies", HANGS_AT: "hangs"}.get(session.iteration)
        if rank == 1 and end in ends and first_time(folder / end):
            session.wait(PATIENCE_SECONDS)
            os.kill(os.getpid(), signal.SIGKILL) if end == "dies" else stuck_for_ever()
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    train(Path(sys.argv[1]), *sys.argv[2:])
