"""`make bench-ranks`: what rank 0 does for a checkpoint of 64 to 4,096 ranks with 1,000 tensors each.

Simulated ranks, in threads that run in turn, commit with the code of a training; files are in memory. Figures of
each number of ranks; those of a *first* checkpoint include the exchange of the structure:

- `rank0_cpu_ms`: CPU time of the thread of rank 0 that commits, with the write of its own part, of which
  `part_ms` is as much on every rank.
- `rank0_bytes_per_rank`: bytes that rank 0 receives, divided by the number of ranks.
- `manifest_mb`: what is stored besides the files of the ranks; `described_kb_per_rank`: with those of each rank,
  but for the payload.
- `read_cpu_s`: CPU time to read the description of a checkpoint, by one process; `plan_cpu_s`: to plan and read
  what a rank needs that restores it on half as many ranks.
- `growth_1024_to_4096`: how many times as much CPU rank 0 needs with four times as many ranks.
"""

from __future__ import annotations

import gc
import json
import resource
import shutil
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import memory_folder, run, scratch
from holdfast.checkpoint import restore
from holdfast.checkpoint.stored_manifest import read_stored
from holdfast.format.shards import Region

from .world import JOB, WIDTH, LargeJob

RANKS = [64, 256, 1024, 4096]


def main(ranks: list[int] = RANKS, tensors: int = 1000, rounds: int = 2) -> dict[str, float]:
    """Measure each number of ranks.

    Args:
        rounds: checkpoints after the first one
    """
    figures: dict[str, float] = {}
    for count in ranks:
        with scratch(memory_folder()) as folder:
            measured = measure(folder, count, tensors, rounds)
        print(f"{count:>5} ranks  {json.dumps(measured)}", flush=True)
        figures |= {f"{name}_{count}": value for name, value in measured.items()}
        gc.collect()
    if {"rank0_cpu_ms_1024", "rank0_cpu_ms_4096"} <= figures.keys():
        figures["growth_1024_to_4096"] = round(figures["rank0_cpu_ms_4096"] / figures["rank0_cpu_ms_1024"], 2)
    return figures


def measure(folder: Path, ranks: int, tensors: int, rounds: int) -> dict[str, float]:
    """Return the figures of one number of ranks."""
    job = LargeJob(folder, ranks, tensors)
    job.start()
    first = job.commit()
    later = []
    for _ in range(rounds):
        before = job.checkpoint
        later.append(job.commit())
        shutil.rmtree(job.store.path(JOB, before))  # memory holds one
    cpu_seconds = statistics.median(each.cpu_seconds for each in later)
    measured = {
        "first_cpu_ms": first.cpu_seconds * 1e3,
        "first_bytes_per_rank": first.received_bytes / ranks,
        "rank0_cpu_ms": cpu_seconds * 1e3,
        "part_ms": statistics.median(each.part_seconds for each in later) * 1e3,
        "rank0_bytes_per_rank": statistics.median(each.received_bytes for each in later) / ranks,
    }
    sizes = {path.name: path.stat().st_size for path in job.store.path(JOB, job.checkpoint).glob("*.json")}
    measured["manifest_mb"] = sum(size for name, size in sizes.items() if not name.startswith("rank-")) / 1e6
    measured["described_kb_per_rank"] = sum(sizes.values()) / 1e3 / ranks
    measured |= read_back(job)
    measured["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return {name: round(value, 2) for name, value in measured.items()}


def read_back(job: LargeJob) -> dict[str, float]:
    """Return the CPU time to read a description, and to restore a rank of half as many."""
    import torch.distributed.checkpoint  # noqa: F401  its import is not part of the plan

    began = time.process_time()
    stored = read_stored(job.store, JOB, job.checkpoint)
    read = time.process_time()
    rows = max(1, -(-job.world_size // max(1, job.world_size // 2)))

    def regions(trees: Mapping[str, Any], shapes: Mapping[str, restore.Shape]) -> dict[str, Region]:
        return {name: Region((0, 0), (rows, WIDTH)) for name in shapes if name != "rng.torch"}

    loaded = restore.load(job.store, JOB, job.checkpoint, known=stored, regions=regions)
    assert len(loaded.tensors) == job.tensors + 1
    return {"read_cpu_s": read - began, "plan_cpu_s": time.process_time() - read}


if __name__ == "__main__":
    run(main)
