"""Which part of a tensor lies on this rank, and which rank stores what several of them have.

A tensor of `torch.distributed.tensor` (FSDP2, tensor parallelism) says so itself. What lies whole on all ranks is
shared out among them.
"""

from __future__ import annotations

import heapq
import sys
import zlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from holdfast.format.manifest import Shard
from holdfast.torch_internals import chunks_of, root_mesh

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_possible() -> bool:
    """Whether there can be a sharded tensor: something has imported what makes them."""
    return _dtensor() is not None


def is_sharded(tensor: torch.Tensor) -> bool:
    kind = _dtensor()
    return kind is not None and isinstance(tensor, kind)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor lies in this rank's memory: all of a plain one."""
    return _local(tensor) if is_sharded(tensor) else tensor


def storages(tensors: Iterable[torch.Tensor]) -> Iterator[int]:
    """Where the memory of these begins that lies on this rank."""
    return (local(tensor).untyped_storage().data_ptr() for tensor in tensors)


def place_of(name: str, tensor: torch.Tensor) -> Shard:
    """Where this rank's part of a sharded tensor lies in it.

    Raises:
        TypeError: the ranks hold addends of it, or a part that is not one block.
    """
    dtensor: Any = tensor
    if any(placement.is_partial() for placement in dtensor.placements):
        raise TypeError(f"{name}: the ranks hold addends of it ({dtensor.placements}); redistribute it before")
    chunks = chunks_of(dtensor)
    own = tuple(_local(dtensor).shape)
    if len(chunks) != 1 or tuple(chunks[0].sizes) != own:
        raise TypeError(f"{name}: this rank's part of it ({dtensor.placements}) is not one block")
    return Shard(tuple(dtensor.shape), tuple(chunks[0].offsets))


def is_repeated(tensor: torch.Tensor) -> bool:
    """Several ranks have this rank's part of it, or may have."""
    dtensor: Any = tensor
    mesh = dtensor.device_mesh
    return root_mesh(mesh) is not mesh or any(each.is_replicate() for each in dtensor.placements)


def is_stored_here(name: str, tensor: torch.Tensor) -> bool:
    """Of the ranks that hold the same part, one stores it: another one for each tensor."""
    dtensor: Any = tensor
    mesh, coordinate = dtensor.device_mesh, dtensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False  # this rank has no part of it
    root = root_mesh(mesh)
    if root is not mesh and mesh.mesh.min() != root.mesh.min():
        # as of FSDP's mesh beside tensor parallelism's: others cut from the same one have all of it as well
        return False
    index, count = 0, 1
    for dimension, placement in enumerate(dtensor.placements):
        if placement.is_replicate():
            index = index * mesh.size(dimension) + coordinate[dimension]
            count *= mesh.size(dimension)
    return index == zlib.crc32(name.encode()) % count


def like(template: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """This rank's part as a tensor that is sharded as `template` is."""
    from torch.distributed.tensor import DTensor

    dtensor: Any = template
    return DTensor.from_local(
        part.to(_local(dtensor).device),
        dtensor.device_mesh,
        dtensor.placements,
        run_check=False,
        shape=dtensor.shape,
        stride=dtensor.stride(),
    )


def shared_out(sizes: Iterable[tuple[str, int]], world_size: int) -> dict[str, int]:
    """The rank that stores each of these (name, bytes), so that all have about as much to do.

    The same on every rank that asks about the same ones.
    """
    loads = [(0, rank) for rank in range(world_size)]
    found = {}
    for name, size in sorted(sizes, key=lambda each: (-each[1], each[0])):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + size, rank))
        found[name] = rank
    return found


def _local(dtensor: DTensor | Any) -> torch.Tensor:
    with torch.no_grad():  # with gradients it would be a view
        part: torch.Tensor = dtensor.to_local()
    return part


def _dtensor() -> type[DTensor] | None:
    """None where nothing has imported it: then there is no tensor of that kind either."""
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)
