"""The training script of the soak: one job of each kind, with a ledger that has the loss of each iteration.

python -m benchmarks.soak.job KIND FOLDER [LAST]

Files in FOLDER steer it: with `enough` it ends after its iteration, with `disk-full` no checkpoint can be written.
With LAST it trains up to this iteration without faults, checkpoints and pauses: the reference.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import random
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import holdfast
from holdfast.save.run import Run, RunState
from holdfast.store.local import LocalStore, LocalWriter
from tests.support.fault_injection import run_before

BATCH, SAMPLES, WIDTH, ROWS = 8, 4096, 32, 20_000
STEP_SECONDS = float(os.environ.get("SOAK_STEP_SECONDS", "0.1"))
RANKED = ("ddp", "fsdp", "peers")
OPTIONS: dict[str, dict[str, Any]] = {
    "incremental": {"incremental": True},
    "peers": {"peers": 1},
    "drain": {"drain": "s3://bucket/soak", "drain_every": 3, "drain_retention": "last 3"},
    "fork": {"host_state": "fork"},
}


class Samples(Dataset[tuple[int, Tensor]]):
    """Each sample has noise of every global generator."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.randn(6) + random.random() + float(np.random.rand()) + index / SAMPLES


class SparseTable(nn.Module):
    """A batch changes few rows, so that incremental checkpoints write few."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH + 6, 1)

    def forward(self, points: Tensor) -> Tensor:
        rows = (points[:, 0].abs() * 1000).long() % ROWS
        return self.head(torch.cat([self.table(rows), points], dim=1))


def model_of(kind: str) -> nn.Module:
    if kind == "incremental":
        return SparseTable()
    return nn.Sequential(nn.Linear(6, WIDTH), nn.Dropout(0.2), nn.ReLU(), nn.Linear(WIDTH, 1))


class Work:
    """What is trained: each loss depends on all of the state."""

    def __init__(self, kind: str) -> None:
        for seeded in (random.seed, np.random.seed, torch.manual_seed):
            seeded(7)
        self.kind, self.rank = kind, 0
        self.model: nn.Module = model_of(kind)
        dense = [p for name, p in self.model.named_parameters() if not name.startswith("table")]
        world_size = 1
        if kind in RANKED:
            dist.init_process_group("gloo")
            self.rank, world_size = dist.get_rank(), dist.get_world_size()
            if kind == "fsdp":
                from torch.distributed.fsdp import fully_shard

                fully_shard(self.model)
            else:
                self.model = DistributedDataParallel(self.model)
            dense = list(self.model.parameters())
            torch.manual_seed(self.rank)
        self.optimizer: Any = torch.optim.AdamW(dense, lr=1e-3)
        self.objects: dict[str, Any] = {}
        if kind == "incremental":
            self.objects["rows"] = torch.optim.SparseAdam(list(self.model.table.parameters()), lr=1e-3)  # type: ignore[union-attr,operator,arg-type]
        self.memory = holdfast.Variables(buffer=np.zeros((2048 if kind == "fork" else 1, 1024), np.float32))
        self.loader: Any = holdfast.DataLoader(
            Samples(), batch_size=BATCH, shuffle=True, seed=1, rank=self.rank, world_size=world_size,
            num_workers=2 if kind == "loader" else 0,
        )  # fmt: skip

    def iterate(self, points: Tensor, iteration: int) -> Tensor:
        """Train on a batch; the targets depend on an array that each iteration changes."""
        buffer = self.memory.buffer
        targets = points.sum(1, keepdim=True).sin() + float(buffer.ravel()[iteration * 1021 % buffer.size])
        loss = (self.model(points) - targets).square().mean()
        loss.backward()
        for optimizer in (self.optimizer, *self.objects.values()):
            optimizer.step()
            optimizer.zero_grad()
        buffer[iteration % len(buffer)] = float(loss.detach().sin())  # bounded, or it diverges
        return loss

    def is_any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        if self.kind not in RANKED:
            return flag
        flags = torch.tensor(float(flag))
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags)


class Ledger:
    """Appends whole lines, which a kill does not tear."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, *words: object) -> None:
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())

    def run_changed(self, run: Run, state: RunState) -> None:
        if state is RunState.DURABLE:
            self.write("durable", run.id)


def prepare_faults(folder: Path) -> None:
    deletions = Ledger(folder / "deletions")
    run_before(LocalStore, "delete", lambda _, job, checkpoint, attempt: deletions.write(checkpoint))

    def fail_if_full(*_: object) -> None:
        if (folder / "disk-full").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run_before(LocalWriter, "write", fail_if_full)
    if host := os.environ.get("SOAK_HOST"):  # hosts are distinguished by their boot id
        import holdfast.memory_tier.tier
        import holdfast.peers.tier

        for module in (holdfast.memory_tier.tier, holdfast.peers.tier):
            module.machine_id = lambda: host  # type: ignore[assignment]


def prepared(work: Work, options: dict[str, Any]) -> tuple[holdfast.Session, Iterator[Any]]:
    objects = {"memory": work.memory, **work.objects}
    if work.kind == "framework" and importlib.util.find_spec("accelerate"):
        from accelerate import Accelerator

        from holdfast.integrations.accelerate import session as session_of

        accelerator = Accelerator(cpu=True)
        plain = torch.utils.data.DataLoader(Samples(), batch_size=BATCH, shuffle=True)
        work.model, work.optimizer, loader = accelerator.prepare(work.model, work.optimizer, plain)
        session = session_of(accelerator, work.kind, seed=1, **objects, **options)
        return session, (batch for _ in iter(int, 1) for batch in loader)
    session = holdfast.Session(work.kind, model=work.model, optimizer=work.optimizer, **objects, **options)
    return session, session.batches(work.loader, epochs=None)


def main(kind: str, folder: Path, last: int) -> None:
    torch.set_num_threads(1)
    work = Work(kind)
    ledger = Ledger(folder / f"ledger-{work.rank}")
    prepare_faults(folder)
    options = OPTIONS.get(kind, {}) if not last else {}
    session, batches = prepared(work, {"every": 10**9 if last else 20, **options})
    if work.rank == 0:
        session.observe(ledger)
    for _, points in batches:
        loss = work.iterate(points, session.iteration)
        note = session.value("note", 1.0, low=0.0, high=1e6)
        bits = struct.pack("<f", loss.item()).hex()
        ledger.write(os.getpid(), session.attempt, session.lineage, session.iteration + 1, bits, note)
        session.step(loss=loss)
        is_last = session.iteration >= last if last else (folder / "enough").exists()
        if work.is_any(is_last):
            break
        if not last:
            time.sleep(STEP_SECONDS)
    session.close()
    if kind in RANKED:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
