"""Workloads of incremental checkpoints over several ranks."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from holdfast.checkpoint import restore
from holdfast.store import open_store

ROWS, WIDTH = 30_000, 32


def table(updates):
    """The whole table after some updates, each of which changes a few rows."""
    found = torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH).clone()
    for number in range(1, updates + 1):
        found[torch.arange(number, ROWS, 997)] += number
    return found


def train(stage, root, updates):
    """Resume and train; return where it began, whether exactly, and the number of region files at the end."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world_size,))
    sharded = distribute_tensor(table(0), mesh, [Shard(0)])
    loop = holdfast.Variables(table=sharded)
    with holdfast.Session("job", store=root, every=10**9, incremental=True, loop=loop) as session:
        begun = session.resume()
        is_same = torch.equal(loop.table.full_tensor(), table(begun))
        for number in range(begun + 1, updates + 1):
            at = rank * len(sharded.to_local())
            loop.table.to_local().copy_(table(number)[at : at + len(sharded.to_local())])
            session.checkpoint()
            session.step()
            assert all(outcome.is_durable for outcome in session.wait(60))
    store = open_store(root)
    newest = store.checkpoints("job")[-1]
    names = [file.name for file in restore.manifest(store, "job", newest).files]
    return begun, is_same, sum(name.endswith(".rows") for name in names)
