"""What a fork over a state costs in memory: prints a line of JSON. Arguments: store, "left-out" or "plain"."""

import json
import os
import resource
import sys
from pathlib import Path

import torch
from faulty_store import FaultyStore, hear, tell
from persisting import Job

from holdfast.persist import memory

STATE_BYTES = 256 << 20


def share_bytes(pid):
    """What a process holds of memory; of pages it shares, its share."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def step(job):
    """As an optimizer's: changes all of the state. The page faults that it took."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for tensor in job.tensors.values():
        tensor.add_(1)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def main(root, how):
    torch.set_num_threads(1)  # so that the faults are counted on this thread
    if how == "plain":
        memory._pages = lambda ranges: []
    tensors = {str(i): torch.full((STATE_BYTES // 32,), float(i)) for i in range(8)}
    job = Job(FaultyStore(root, "wait"), "fork", tensors=tensors)
    step(job)
    snapshot = job.take()
    child = int(hear(Path(root) / "reached"))
    faults = step(job)
    held = share_bytes(os.getpid()) + share_bytes(child)
    tell(Path(root) / "go", "on")
    assert snapshot.settled.wait(300)
    assert snapshot.outcome == "durable", snapshot.reason
    growth = held - share_bytes(os.getpid())
    right = all(bool((tensor == float(name) + 2).all()) for name, tensor in tensors.items())
    print(json.dumps({"growth": growth / STATE_BYTES, "faults": faults, "right": right}))
    assert job.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
