"""The parts of sharded tensors (FSDP2, tensor parallelism), whose places follow from their meshes."""

from __future__ import annotations

import zlib
from collections.abc import Collection
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.format.manifest import Shard
from holdfast.state.sharding import local_part
from holdfast.torch_internals import chunks_of, root_mesh


def place_of(name: str, tensor: torch.Tensor) -> Shard:
    """Return the place of this rank's part in a sharded tensor.

    Raises:
        TypeError: the ranks hold partial sums of it, or a part that is not one block.
    """
    dtensor: Any = tensor
    if any(placement.is_partial() for placement in dtensor.placements):
        raise TypeError(f"{name}: the ranks hold partial sums of it ({dtensor.placements}); redistribute it first")
    chunks = chunks_of(dtensor)
    own = tuple(local_part(dtensor).shape)
    if len(chunks) != 1 or tuple(chunks[0].sizes) != own:
        raise TypeError(f"{name}: this rank's part of it ({dtensor.placements}) is not one block")
    return Shard(tuple(dtensor.shape), tuple(chunks[0].offsets))


def is_repeated(tensor: torch.Tensor) -> bool:
    """Whether other ranks have, or may have, this rank's part as well."""
    dtensor: Any = tensor
    mesh = dtensor.device_mesh
    return root_mesh(mesh) is not mesh or any(each.is_replicate() for each in dtensor.placements)


def is_stored_here(name: str, tensor: torch.Tensor, stage_ranks: Collection[int] = ()) -> bool:
    """Whether this rank stores its part. Among ranks with the same part, the choice depends on the name.

    `stage_ranks` are those with the same stages of a pipeline: the others have other tensors.
    """
    dtensor: Any = tensor
    mesh, coordinate = dtensor.device_mesh, dtensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False  # this rank has no part of it
    root = root_mesh(mesh)
    if root is not mesh:
        # FSDP's mesh with tensor parallelism, for example: another submesh of the same root holds all of it too
        holders = root.mesh.flatten().tolist()
        if mesh.mesh.min() != min(each for each in holders if not stage_ranks or each in stage_ranks):
            return False
    index, count = 0, 1
    for dimension, placement in enumerate(dtensor.placements):
        if placement.is_replicate():
            index = index * mesh.size(dimension) + coordinate[dimension]
            count *= mesh.size(dimension)
    return index == zlib.crc32(name.encode()) % count


def shard_like(template: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return this rank's part as a tensor that is sharded like `template`."""
    dtensor: Any = template
    sharded: torch.Tensor = DTensor.from_local(
        part.to(local_part(dtensor).device),
        dtensor.device_mesh,
        dtensor.placements,
        run_check=False,
        shape=dtensor.shape,
        stride=dtensor.stride(),
    )
    return sharded
