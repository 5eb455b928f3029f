"""Compressed checkpoints as a job writes and restores them, compared with plain ones: sizes, CPU time and elapsed
time.

`python -m benchmarks.codecs.checkpoints` trains a GPT with AdamW in fp32, and repeats its tensors until the state
has the given size. The store is on a disk. Writes and restores of both kinds take turns.
"""

from __future__ import annotations

import argparse
import json
import mmap
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint import restore
from holdfast.format import manifest as fmt
from holdfast.save.draft import Draft
from holdfast.save.writer import write_checkpoint
from holdfast.store import open_store

from . import training

DIRECTORY = "/var/tmp"  # on a disk, unlike /tmp on some machines
JOB = "job"
KINDS = ("plain", "compressed")


@dataclass(slots=True)
class Cost:
    """Of the writes and restores of one kind, one entry each."""

    stored_bytes: int = 0
    write_seconds: list[float] = field(default_factory=list)
    write_cpu_seconds: list[float] = field(default_factory=list)
    encode_seconds: list[float] = field(default_factory=list)
    restore_seconds: list[float] = field(default_factory=list)
    restore_cpu_seconds: list[float] = field(default_factory=list)


class Payload:
    """A copied state in page-aligned memory, as a snapshot has it."""

    def __init__(self, tensors: dict[str, tuple[str, tuple[int, ...], memoryview]]) -> None:
        self.slots = fmt.lay_out((name, dtype, shape) for name, (dtype, shape, _) in tensors.items())
        self.size_bytes = self.slots[-1].end
        self.memory = memoryview(mmap.mmap(-1, self.size_bytes))
        for slot in self.slots:
            self.memory[slot.start : slot.end] = tensors[slot.name][2]

    def draft(self, iteration: int, *, compress: bool) -> Draft:
        return Draft(
            job=JOB, iteration=iteration, lineage=1, attempt=1, kind="scheduled", created_at=0.0, parent=None,
            world_size=1, compress=compress, slots=self.slots,
        )  # fmt: skip


def trained(size_bytes: int) -> Payload:
    """A GPT with AdamW in fp32 after 200 iterations."""
    state = training.train("GPT, AdamW, fp32", training.gpt_fp32()).base
    repeats = max(1, round(size_bytes / sum(tensor.nbytes for tensor in state.values())))
    return Payload(
        {
            f"{name}.{repeat}": ("F32", tuple(tensor.shape), _bytes(tensor))
            for name, tensor in state.items()
            for repeat in range(repeats)
        }
    )


def noise(size_bytes: int) -> Payload:
    """Random bytes in tensors of 16 MiB, which do not compress."""
    draw, part = random.Random(1), 16 << 20
    return Payload(
        {
            f"t{number}": ("F32", (part // 4,), memoryview(draw.randbytes(part)))
            for number in range(max(1, size_bytes // part))
        }
    )


def measure(payload: Payload, rounds: int, *, restores: bool = True) -> dict[str, Cost]:
    """Write, restore and delete a checkpoint of each kind, by turns."""
    found = {kind: Cost() for kind in KINDS}
    with tempfile.TemporaryDirectory(dir=DIRECTORY) as place:
        store = open_store(Path(place) / "store")
        store.acquire_attempt(JOB, "benchmark")
        for iteration in range(1, 2 * rounds + 3):
            kind = KINDS[iteration % 2]
            _take(store, payload, found[kind], iteration, compress=kind == "compressed", restores=restores)
            if iteration <= 2:  # the first of each touches memory and the disk for the first time
                found[kind] = Cost()
    return found


def _take(store: Any, payload: Payload, cost: Cost, iteration: int, *, compress: bool, restores: bool) -> None:
    draft = payload.draft(iteration, compress=compress)
    started, used = time.perf_counter(), time.process_time()
    written = write_checkpoint(store, draft, payload.memory)
    cost.write_seconds.append(time.perf_counter() - started)
    cost.write_cpu_seconds.append(time.process_time() - used)
    cost.encode_seconds.append(written.encode_seconds)
    cost.stored_bytes = sum(file.size_bytes for file in written.files)
    if restores:
        started, used = time.perf_counter(), time.process_time()
        restore.load(store, JOB, draft.id)
        cost.restore_seconds.append(time.perf_counter() - started)
        cost.restore_cpu_seconds.append(time.process_time() - used)
    store.delete(JOB, draft.id, 1)


def figures(size_bytes: int, rounds: int) -> dict[str, float]:
    """Print what compression costs and saves; return the figures."""
    payload = trained(size_bytes)
    costs = measure(payload, rounds)
    plain, compressed = (costs[kind] for kind in KINDS)
    print(f"\ncheckpoints of {payload.size_bytes / 1e6:,.0f} MB, medians of {rounds}")
    for kind, cost in costs.items():
        print(
            f"  {kind:<12} {cost.stored_bytes / 1e6:7.1f} MB,"
            f" write {_median(cost.write_seconds):6.2f} s (CPU {_median(cost.write_cpu_seconds):5.2f} s,"
            f" encoding {_median(cost.encode_seconds):5.2f} s),"
            f" restore {_median(cost.restore_seconds):6.2f} s (CPU {_median(cost.restore_cpu_seconds):5.2f} s)",
            flush=True,
        )
    idle = measure(noise(size_bytes), rounds, restores=False)
    off = [_median(idle[kind].write_cpu_seconds) for kind in KINDS]
    print(f"  a state that does not compress: CPU {off[0]:.3f} s plain, {off[1]:.3f} s with compression on")
    cpu_seconds = _median(compressed.write_cpu_seconds)
    return {
        "adam_fp32_ratio": payload.size_bytes / compressed.stored_bytes,
        "encode_mb_s": payload.size_bytes / 1e6 / min(compressed.encode_seconds),
        "cpu_seconds_per_checkpoint": cpu_seconds,
        "cpu_seconds_per_plain_checkpoint": _median(plain.write_cpu_seconds),
        "write_slowdown": _median(compressed.write_seconds) / _median(plain.write_seconds),
        "restore_slowdown": _median(compressed.restore_seconds) / _median(plain.restore_seconds),
        "off_overhead": max(
            0.0, _median(idle["compressed"].encode_seconds) / _median(idle["plain"].write_seconds)
        ),
    }


_median = statistics.median


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = figures(options.megabytes << 20, options.rounds)
    print(f"figures: {json.dumps({name: round(value, 4) for name, value in found.items()})}")


if __name__ == "__main__":
    main()
