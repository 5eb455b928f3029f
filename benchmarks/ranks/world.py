"""A job of many ranks that each store shards of the same tensors, as `fully_shard` divides a model."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.format import manifest as fmt
from holdfast.format.manifest import Shard
from holdfast.protocol.ids import checkpoint_id
from holdfast.save.draft import Draft
from holdfast.save.structures import KnownStructures
from holdfast.save.two_phase_commit import RankCommit
from holdfast.save.writer import write_checkpoint
from holdfast.store import LocalStore
from tests.support.simulated_ranks import SimulatedLink, SimulatedWorld

JOB = "large"
WIDTH = 2
PARTS = ("attention.wq", "attention.wk", "attention.wv", "attention.wo", "feed_forward.w1", "feed_forward.w2")
KINDS = ("model.{}.weight", "optimizer.state.exp_avg.{}.weight", "optimizer.state.exp_avg_sq.{}.weight")


def names(count: int) -> list[str]:
    """Return names as long as those of a large model and its optimizer."""
    layers = math.ceil(count / len(PARTS) / len(KINDS))
    every = [kind.format(f"layers.{layer}.{part}") for kind in KINDS for layer in range(layers) for part in PARTS]
    return every[:count]


@dataclass
class Committed:
    """What one checkpoint took on rank 0."""

    cpu_seconds: float
    """CPU time of the thread of rank 0 that commits, with the write of its own part."""
    part_seconds: float
    """Its part of that in which rank 0 writes its own part, as every rank does."""
    received_bytes: int


@dataclass
class LargeJob:
    """Ranks that write to a directory, with the code that training uses, over a simulated network."""

    root: Path
    world_size: int
    tensors: int
    iteration: int = 0
    attempt: int = 1
    known: list[KnownStructures] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = LocalStore(self.root)
        self.world = SimulatedWorld(self.world_size)
        self._names = names(self.tensors)
        self._tree = {name: {"$tensor": name} for name in self._names}
        slots = [(name, "F32", (1, WIDTH)) for name in self._names]
        self._slots = fmt.lay_out([*slots, ("rng.torch", "U8", (16,))])

    def start(self) -> None:
        """Start the next attempt, whose ranks know nothing of each other."""
        self.attempt = self.store.acquire_attempt(JOB, "attempt").number
        self.world = SimulatedWorld(self.world_size)
        self.known = [KnownStructures() for _ in range(self.world_size)]

    @property
    def checkpoint(self) -> str:
        """The newest one."""
        return checkpoint_id(self.iteration, 1)

    def commit(self) -> Committed:
        """Take the next checkpoint on all ranks."""
        self.iteration += 1
        self.world.received.clear()
        part_seconds, cpu_seconds = 0.0, 0.0

        def take(link: SimulatedLink) -> None:
            nonlocal part_seconds, cpu_seconds
            payload = self.payload(link.rank)

            def write(draft: Draft) -> Draft:
                nonlocal part_seconds
                began = time.thread_time()
                written = write_checkpoint(self.store, draft, payload)
                if link.rank == 0:
                    part_seconds += time.thread_time() - began
                return written

            draft, began = self.draft(link.rank), time.thread_time()
            RankCommit(link, self.store, known=self.known[link.rank]).commit(self.iteration, draft, None, write)
            if link.rank == 0:
                cpu_seconds = time.thread_time() - began

        for outcome in self.world.run(take):
            if outcome is not None:
                raise outcome
        return Committed(cpu_seconds, part_seconds, sum(self.world.received[0]))

    def payload(self, rank: int) -> memoryview:
        """Return the tensors of a rank as bytes."""
        return memoryview(bytes([rank % 251, self.iteration % 251]) * (self._slots[-1].end // 2))

    def draft(self, rank: int) -> Draft:
        """Return what a rank has copied of the next checkpoint."""
        shape = self.world_size, WIDTH
        return Draft(
            job=JOB, iteration=self.iteration, lineage=1, attempt=self.attempt, kind="scheduled", created_at=0.0,
            parent=checkpoint_id(self.iteration - 1, 1) if self.iteration > 1 else None,
            rank=rank, world_size=self.world_size, slots=self._slots,
            shards=dict.fromkeys(self._names, Shard(shape, (rank, 0))), rank_local={"rng.torch"},
            must_match={"data": f"{self.iteration} batches", "replicas 1": "0" * 32},
            state={"model": self._tree, "rng": {"torch": {"$tensor": "rng.torch"}}, "session": {"rank": rank}},
        )  # fmt: skip
