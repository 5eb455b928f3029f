"""What a matrix of crashes trains with: each way to write files, as a short training with retention."""

from __future__ import annotations

import mmap
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from holdfast.checkpoint import restore
from holdfast.checkpoint.scrub import scrub
from holdfast.format import manifest as fmt
from holdfast.format.parity_file import ParityCode
from holdfast.protocol.ids import checkpoint_id, parse_checkpoint_id
from holdfast.save.draft import Draft
from holdfast.save.writer import write_checkpoint
from holdfast.store import Store

JOB = "job"
COUNT = 1100
ROWS, ROW_BYTES = 40, 128
IDS = [checkpoint_id(iteration, 1) for iteration in range(8)]

Acknowledge = Callable[[list[str]], object]
"""Called with the checkpoints that must be there from now on."""


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many kinds of write in a file of a few blocks as there are in one of a gigabyte."""
    monkeypatch.setattr("holdfast.store.local_writer.WRITE_BYTES", fmt.BLOCK_BYTES)
    monkeypatch.setattr("holdfast.store.local_writer.DIRECT_BYTES", fmt.BLOCK_BYTES)
    monkeypatch.setattr("holdfast.save.reuse.MIN_SHARED_BYTES", 1)
    monkeypatch.setattr("holdfast.format.file_transforms.OWN_BLOCK_BYTES", 1024)
    monkeypatch.setattr("holdfast.incremental.planner.LEAST_TENSOR_BYTES", ROW_BYTES)


def numbers(seed: int) -> bytes:
    draw = random.Random(seed)
    return struct.pack(f"<{COUNT}f", *(draw.gauss(0, 1) for _ in range(COUNT)))


def base(iteration: int) -> bytes:
    """Return a tensor that never changes."""
    return numbers(-1)


def table(iteration: int) -> bytes:
    """Return rows of which each iteration changes one."""
    rows = [random.Random(row).randbytes(ROW_BYTES) for row in range(ROWS)]
    for each in range(1, iteration + 1):
        rows[each * 7 % ROWS] = random.Random(-each).randbytes(ROW_BYTES)
    return b"".join(rows)


def tenth(iteration: int) -> bytes:
    """Return rows of which each iteration changes a tenth, so that soon a new base is written."""
    rows, count = [random.Random(row).randbytes(ROW_BYTES) for row in range(ROWS)], ROWS // 10
    for each in range(count, count * (iteration + 1)):
        rows[each % ROWS] = random.Random(-each).randbytes(ROW_BYTES)
    return b"".join(rows)


Tensors = dict[str, tuple[str, tuple[int, ...], Callable[[int], bytes]]]
"""By name: dtype, shape, and the bytes after an iteration."""
ADAPTED: Tensors = {"base": ("F32", (COUNT,), base), "adapter": ("F32", (COUNT,), numbers)}
TABLE: Tensors = {"table": ("U8", (ROWS, ROW_BYTES), table), "step": ("U8", (8,), lambda each: bytes([each]) * 8)}


@dataclass
class Feature:
    """A way to write files, and a training with it."""

    tensors: Tensors
    draft: dict[str, Any] = field(default_factory=dict)
    """Fields of the drafts."""
    is_incremental: bool = False
    is_encoded: bool = False
    iterations: int = 3
    kept: int = 2
    """Number of checkpoints that retention keeps."""

    def planner(self) -> Any:
        if not self.is_incremental:
            return None
        from holdfast.incremental.planner import IncrementalPlanner

        return IncrementalPlanner(True, most_regions=1)

    def commit(
        self,
        store: Store,
        planner: Any,
        iteration: int,
        parent: str | None,
        attempt: int = 1,
        parity: ParityCode | None = None,
    ) -> Draft:
        """Commit the state after an iteration."""
        slots = fmt.lay_out([(name, dtype, shape) for name, (dtype, shape, _) in self.tensors.items()])
        payload = memoryview(mmap.mmap(-1, slots[-1].end))
        for slot in slots:
            payload[slot.start : slot.end] = self.tensors[slot.name][2](iteration)
        draft = Draft(
            job=JOB, iteration=iteration, lineage=1, attempt=attempt, kind="scheduled", created_at=0.0,
            parent=parent, world_size=1, parity=parity, slots=slots, **self.draft,
        )  # fmt: skip
        written = write_checkpoint(store, draft, payload, planner=planner)
        if planner is not None:
            planner.settle(draft.id, is_durable=True)
        return written

    def train(self, store: Store, acknowledge: Acknowledge = list, parity: ParityCode | None = None) -> None:
        """Train one attempt, in which retention removes the first checkpoints."""
        planner = self.planner()
        for iteration in range(1, self.iterations + 1):
            self.commit(store, planner, iteration, IDS[iteration - 1] if iteration > 1 else None, 1, parity)
            kept = IDS[max(1, iteration - self.kept) : iteration + 1]
            acknowledge(kept)
            if len(kept) > self.kept:
                acknowledge(kept[1:])  # from here on the oldest may be gone
                store.delete(JOB, kept[0], 1)

    def go_on(self, store: Store, attempt: int, parent: str | None, parity: ParityCode | None) -> list[str]:
        """Commit two checkpoints in a new process; return them."""
        planner, found = self.planner(), []
        for iteration in 6, 7:
            found.append(self.commit(store, planner, iteration, parent, attempt, parity).id)
            parent = found[-1]
        return found

    def require_sound(self, store: Store) -> list[str]:
        """Load and scrub every listed checkpoint; return the list."""
        there = store.checkpoints(JOB)
        for checkpoint in there:
            found, iteration = restore.load(store, JOB, checkpoint), parse_checkpoint_id(checkpoint)[0]
            for name, (_, _, content) in self.tensors.items():
                assert bytes(found.tensors[name].view(-1).view(torch.uint8).numpy()) == content(iteration)
            assert not self.is_encoded or all(file.encoding is not None for file in found.manifest.files)
            assert scrub(store, JOB, checkpoint).state == "sound"
        return there


FEATURES = {
    "plain": Feature(TABLE),
    "links": Feature(ADAPTED, {"unchanged": {"base"}}, kept=1),
    "planes": Feature(ADAPTED, {"unchanged": {"base"}, "compress": True}, is_encoded=True, kept=1),
    "incremental": Feature(TABLE, is_incremental=True, iterations=4),
    "new base": Feature({"table": ("U8", (ROWS, ROW_BYTES), tenth)}, is_incremental=True, iterations=5, kept=3),
}
