"""A job of several ranks for torchrun whose first start ends as an argument says.

memory_tier_torchrun_trainer.py FOLDER KIND END    KIND: ddp or fsdp; END: see `ENDS`
"""

from __future__ import annotations

import errno
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.memory_tier.complete_snapshot import complete_snapshots_in
from holdfast.save import completion_marker
from holdfast.save.shared_buffers import SharedBuffer
from holdfast.store.local import LocalWriter
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.fault_injection import die, run_before
from tests.support.interruptible_trainer import InterruptibleWork

JOB = "tier"
ITERATIONS, EVERY, AT = 30, 5, 15
"""The checkpoint at AT is the first that does not become durable, for the disk fails then."""
ENDS = ("killed", "damaged", "unmarked")
"""Of rank 1: killed once all have sealed it; with a bit of rank 0's that is another; or before it has sealed."""
FOLDER = Path(os.environ.get("HOLDFAST_SUPERVISION", "."))


class RankedWork(InterruptibleWork):
    """Each rank has random numbers of its own, so that a resume of one as another shows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.trained: torch.nn.Module = self.model
        if kind == "ddp":
            self.trained = DistributedDataParallel(self.model)
        else:
            from torch.distributed.fsdp import fully_shard  # takes as long as the other imports together

            for part in (self.model[0], self.model[2], self.model):
                fully_shard(part)
        self.model, self.optimizer = self.trained, type(self.optimizer)(self.trained.parameters())
        torch.manual_seed(dist.get_rank())

    def outcome(self, loss: torch.Tensor) -> str:
        found = hashlib.blake2b(loss.detach().numpy().tobytes(), digest_size=12)
        for tensor in (*self.model.parameters(), *self.optimizer.moments, torch.get_rng_state()):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            found.update(local.detach().numpy().tobytes())
        return found.hexdigest()


def alone(stage: Any, kind: str) -> list[str]:
    """What this rank comes to where nothing happens, and without Holdfast."""
    work = RankedWork(kind)
    return [work.outcome(work.iterate()) for _ in range(ITERATIONS)]


def fill_disk() -> None:
    def full(writer: LocalWriter, *_: object) -> None:
        if int(writer._final.name.partition("-")[0]) >= AT:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    run_before(LocalWriter, "write", full)


def die_unsealed() -> None:
    """Once another rank has sealed what this one is about to."""

    def act(task: Any, _: object) -> None:
        if task.iteration == AT:
            eventually(
                lambda: any(marker.draft.iteration == AT for marker in completion_marker.markers_of(FOLDER, JOB)),
                "the completion marker of another rank",
            )
            die()

    run_before(completion_marker, "write_marker", act)


def end_at_once(end: str) -> None:
    def found() -> Any:
        return next((each for each in complete_snapshots_in(FOLDER, JOB) if each.draft.iteration == AT), None)

    eventually(found, "a complete snapshot")
    if end == "damaged":
        fd = SharedBuffer(FOLDER, found().numbers[0]).open()
        os.pwrite(fd, bytes([os.pread(fd, 1, 0)[0] ^ 1]), 0)
        os.close(fd)
    die()


def train(folder: Path, kind: str, end: str) -> None:
    dist.init_process_group("gloo")
    rank, first = dist.get_rank(), "HOLDFAST_PREVIOUS_EXIT" not in os.environ
    work = RankedWork(kind)
    session = holdfast.Session(
        JOB, model=work.model, optimizer=work.optimizer, loop=holdfast.Variables(), every=EVERY
    )
    if first:
        fill_disk()
    if first and rank == 1 and end == "unmarked":
        die_unsealed()
    session.resume()
    ledger = os.open(folder / f"ledger-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    while session.iteration < ITERATIONS:
        loss = work.iterate()
        place = f"{os.getpid()} {session.attempt} {session.lineage} {session.iteration + 1}"
        os.write(ledger, f"{place} {work.outcome(loss)}\n".encode())
        session.step(loss=loss)
        session.wait(PATIENCE_SECONDS)
        if first and rank == 1 and session.iteration == AT + 2:
            end_at_once(end)
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    train(Path(sys.argv[1]), *sys.argv[2:])
