"""Workloads that capture sharded models through the registry."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import holdfast
from holdfast.state.adapters import adapter_for
from holdfast.state.encoder import Encoder
from holdfast.state.registry import Registry
from holdfast.state.sharded_tensors import shard_like
from holdfast.state.sharding import local


class ShardedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(6, 5), nn.Linear(5, 6), nn.BatchNorm1d(6)
        self.tied = nn.Linear(6, 5, bias=False)
        self.tied.weight = self.one.weight

    def forward(self, x):
        return self.norm(self.two(self.one(x) + self.tied(x)))


def built(kind):
    torch.manual_seed(0)
    net, world_size = ShardedModel(), dist.get_world_size()
    if kind == "ddp":
        return DistributedDataParallel(net)
    if kind == "compiled ddp":
        return torch.compile(DistributedDataParallel(net), backend="eager")
    if kind in ("fsdp", "hsdp"):
        shape, dimensions = ((world_size,), ("s",)) if kind == "fsdp" else ((2, world_size // 2), ("r", "s"))
        fully_shard(net, mesh=init_device_mesh("cpu", shape, mesh_dim_names=dimensions))
    return net


def trained(kind):
    model = built(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    registry = Registry({"model": model, "optimizer": optimizer}, dist.get_rank(), dist.get_world_size())
    return model, optimizer, registry


def iterate(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()


def stored(stage, kind):
    """(shape, offsets) of what this rank stores, `own` for its own."""
    model, optimizer, registry = trained(kind)
    iterate(model, optimizer)
    captured = registry.capture({})
    return {
        name: "own"
        if name in captured.rank_local
        else (tuple(tensor.shape), captured.shards[name].offsets if name in captured.shards else None)
        for name, tensor in captured.tensors.items()
    }


def structures(stage, kind):
    """Whether each capture after the first finds everything where it was, and sees what has changed."""
    model, optimizer, registry = trained(kind)
    found = []
    for _ in range(4):
        iterate(model, optimizer)
        captured = registry.capture({})
        now = {f"model.{name.removeprefix('module.')}": local(t) for name, t in model.state_dict().items()}
        equal = all(torch.equal(t, now[name]) for name, t in captured.tensors.items() if name in now)
        steps = {float(t) for name, t in captured.tensors.items() if ".step." in name}
        found.append((captured.structure, equal, steps))
    first = found[0][0]
    return [(structure is first, equal, sorted(steps)) for structure, equal, steps in found]


def refusal(stage):
    """Of a tensor of which the ranks hold partial sums."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    try:
        Registry({"loop": holdfast.Variables(sum=tensor)}).capture({})
    except TypeError as error:
        return str(error)


def averaged(stage):
    """An average of a replicated model is no replicated model: nothing keeps it the same on all ranks."""
    model = built("ddp")
    average = AveragedModel(model.module)
    captured = Registry({"model": model, "average": average}, dist.get_rank(), dist.get_world_size()).capture({})
    return sorted(name for name in captured.rank_local if name.startswith("average"))


def subgroup(stage):
    """Replicated among some of the ranks only."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    net = ShardedModel()
    with torch.no_grad():
        net.one.bias.fill_(dist.get_rank() // 2)
    model = DistributedDataParallel(net, process_group=groups[dist.get_rank() // 2])
    captured = Registry({"model": model}, dist.get_rank(), dist.get_world_size()).capture({})
    return float(captured.tensors["model.one.bias"][0]), "model.one.bias" in captured.rank_local


def plain_sharded(stage):
    """Put back into tensors of a script's own that are sharded."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    loop = holdfast.Variables(table=distribute_tensor(torch.arange(10.0), mesh, [Shard(0)]))
    registry = Registry({"loop": loop}, dist.get_rank(), dist.get_world_size())
    captured = registry.capture({})
    tensors = {name: tensor.clone() for name, tensor in captured.tensors.items()}
    loop.table = distribute_tensor(torch.zeros(10), mesh, [Shard(0)])
    shapes = dict.fromkeys(captured.shards, ("torch.float32", (10,)))
    registry.apply(captured.trees, tensors, shapes)
    return loop.table.full_tensor().tolist()


def moments_after_their_source_is_overwritten(stage, rows):
    """Of an optimizer that is loaded from memory which is then used for something else: as they were, or not."""
    mesh, world_size = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_world_size()

    def trained():
        whole = torch.arange(world_size * rows * 16.0).reshape(-1, 16)
        parameter = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        optimizer = torch.optim.AdamW([parameter], lr=0.1)
        parameter.grad = distribute_tensor(whole + 1.0, mesh, [Shard(0)])
        optimizer.step()
        return parameter, optimizer

    (parameter, optimizer), (other, target) = trained(), trained()
    encoder = Encoder((), set())
    tree = adapter_for("optimizer", optimizer).encode(optimizer.state_dict(), encoder, {})
    borrowed = {name: local(tensor).clone() for name, tensor in encoder.tensors.items()}
    given = {
        name: shard_like(encoder.sharded[name], t) if name in encoder.sharded else t
        for name, t in borrowed.items()
    }
    target.state[other].clear()  # as at a start; in place it is filled where it lies
    adapter_for("optimizer", target).load(tree, given, adopt=False)
    for tensor in borrowed.values():
        tensor.fill_(7.0)
    found, expected = target.state[other], optimizer.state[parameter]
    return {name: torch.equal(local(found[name]), local(tensor)) for name, tensor in expected.items()}
