"""Compressed checkpoints as a job writes and restores them, compared with plain ones: sizes, CPU time and elapsed
time.

`python -m benchmarks.codecs.checkpoints` trains a GPT with AdamW in fp32, and repeats its tensors until the state
has the given size. The store is on a disk. Writes and restores of both kinds take turns.
"""

from __future__ import annotations

import mmap
import random
from collections import defaultdict
from statistics import median
from typing import Any

import torch

from benchmarks.harness import cost_of, run, scratch
from holdfast.checkpoint import restore
from holdfast.format import manifest as fmt
from holdfast.save.draft import Draft
from holdfast.save.writer import write_checkpoint
from holdfast.store import open_store
from holdfast.system.host_memory import bytes_of

from . import training

DIRECTORY = "/var/tmp"  # on a disk, unlike /tmp on some machines
JOB = "job"
KINDS = ("plain", "compressed")
Costs = defaultdict[str, list[float]]
"""Of the writes and restores of one kind, one entry each."""


class Payload:
    """A copied state in page-aligned memory, as a snapshot has it."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.slots = fmt.lay_out((name, "F32", tuple(tensor.shape)) for name, tensor in tensors.items())
        self.size_bytes = self.slots[-1].end
        self.memory = memoryview(mmap.mmap(-1, self.size_bytes))
        for slot in self.slots:
            self.memory[slot.start : slot.end] = bytes_of(tensors[slot.name].contiguous())

    def draft(self, iteration: int, *, compress: bool) -> Draft:
        return Draft(
            job=JOB, iteration=iteration, lineage=1, attempt=1, kind="scheduled", created_at=0.0, parent=None,
            world_size=1, compress=compress, slots=self.slots,
        )  # fmt: skip


def trained(size_bytes: int) -> Payload:
    """A GPT with AdamW in fp32 after 200 iterations."""
    state = training.train("GPT, AdamW, fp32", training.gpt_fp32()).base
    repeats = max(1, round(size_bytes / sum(tensor.nbytes for tensor in state.values())))
    return Payload({f"{name}.{n}": tensor for name, tensor in state.items() for n in range(repeats)})


def noise(size_bytes: int) -> Payload:
    """Random bytes in tensors of 16 MiB, which do not compress."""
    draw, part = random.Random(1), 16 << 20
    parts = (bytearray(draw.randbytes(part)) for _ in range(max(1, size_bytes // part)))
    return Payload({f"t{n}": torch.frombuffer(each, dtype=torch.float32) for n, each in enumerate(parts)})


def measure(payload: Payload, rounds: int, *, restores: bool = True) -> dict[str, Costs]:
    """Write, restore and delete a checkpoint of each kind, by turns."""
    found = {kind: Costs(list) for kind in KINDS}
    with scratch(DIRECTORY) as place:
        store = open_store(place / "store")
        store.acquire_attempt(JOB, "benchmark")
        for iteration in range(1, 2 * rounds + 3):
            kind = KINDS[iteration % 2]
            _take(store, payload.draft(iteration, compress=kind == "compressed"), payload, found[kind], restores)
            if iteration <= 2:  # the first of each touches memory and the disk for the first time
                found[kind] = Costs(list)
    return found


def _take(store: Any, draft: Draft, payload: Payload, costs: Costs, restores: bool) -> None:
    seconds, cpu, written = cost_of(lambda: write_checkpoint(store, draft, payload.memory))
    taken = {"write": seconds, "write CPU": cpu, "encode": written.encode_seconds}
    if restores:
        taken["restore"], taken["restore CPU"], _ = cost_of(lambda: restore.load(store, JOB, draft.id))
    for what, value in taken.items():
        costs[what].append(value)
    costs["stored_bytes"] = [sum(file.size_bytes for file in written.files)]
    store.delete(JOB, draft.id, 1)


def figures(size_bytes: int, rounds: int) -> dict[str, float]:
    """Print what compression costs and saves; return the figures."""
    payload = trained(size_bytes)
    costs = measure(payload, rounds)
    medians = {kind: {what: median(values) for what, values in each.items()} for kind, each in costs.items()}
    print(f"\ncheckpoints of {payload.size_bytes / 1e6:,.0f} MB, medians of {rounds}")
    for kind, of in medians.items():
        print(
            f"  {kind:<12} {of['stored_bytes'] / 1e6:7.1f} MB, write {of['write']:5.2f} s (CPU "
            f"{of['write CPU']:5.2f} s, encoding {of['encode']:5.2f} s), restore {of['restore']:5.2f} s (CPU "
            f"{of['restore CPU']:5.2f} s)",
            flush=True,
        )
    idle = measure(noise(size_bytes), rounds, restores=False)
    off = [median(idle[kind]["write CPU"]) for kind in KINDS]
    print(f"  a state that does not compress: CPU {off[0]:.3f} s plain, {off[1]:.3f} s with compression on")
    plain, compressed = (medians[kind] for kind in KINDS)
    return {
        "adam_fp32_ratio": payload.size_bytes / compressed["stored_bytes"],
        "encode_mb_s": payload.size_bytes / 1e6 / min(costs["compressed"]["encode"]),
        "cpu_seconds_per_checkpoint": compressed["write CPU"],
        "cpu_seconds_per_plain_checkpoint": plain["write CPU"],
        "write_slowdown": compressed["write"] / plain["write"],
        "restore_slowdown": compressed["restore"] / plain["restore"],
        "off_overhead": max(0.0, median(idle["compressed"]["encode"]) / median(idle["plain"]["write"])),
    }


def main(megabytes: int = 512, rounds: int = 5) -> dict[str, float]:
    torch.set_num_threads(1)
    return figures(megabytes << 20, rounds)


if __name__ == "__main__":
    run(main)
