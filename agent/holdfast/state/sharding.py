"""Sharded tensors: which part is on this rank, and which rank stores what several ranks hold.

The place of a DTensor (FSDP2, tensor parallelism) follows from its mesh. Tensors that are whole on all ranks are
distributed among them for storing. A checksum shows whether they are equal: ranks that have diverged, by local
steps, or pipeline stages whose parameters have the same names, would be restored as a mixture.
"""

from __future__ import annotations

import heapq
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from holdfast.format.manifest import Shard, digest
from holdfast.system.host_memory import bytes_of, is_plain
from holdfast.torch_internals import chunks_of, root_mesh

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
EDGE_BYTES = 64


def is_sharding_in_use() -> bool:
    """Whether sharded tensors can exist: their module has been imported."""
    return _dtensor() is not None


def is_sharded(tensor: torch.Tensor) -> bool:
    kind = _dtensor()
    return kind is not None and isinstance(tensor, kind)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor in this rank's memory: all of a plain one."""
    return _local(tensor) if is_sharded(tensor) else tensor


def storages(tensors: Iterable[torch.Tensor]) -> Iterator[int]:
    """Return the addresses of the local storages of these tensors."""
    return (local(tensor).untyped_storage().data_ptr() for tensor in tensors)


def place_of(name: str, tensor: torch.Tensor) -> Shard:
    """Return the place of this rank's part in a sharded tensor.

    Raises:
        TypeError: the ranks hold partial sums of it, or a part that is not one block.
    """
    dtensor: Any = tensor
    if any(placement.is_partial() for placement in dtensor.placements):
        raise TypeError(f"{name}: the ranks hold partial sums of it ({dtensor.placements}); redistribute it first")
    chunks = chunks_of(dtensor)
    own = tuple(_local(dtensor).shape)
    if len(chunks) != 1 or tuple(chunks[0].sizes) != own:
        raise TypeError(f"{name}: this rank's part of it ({dtensor.placements}) is not one block")
    return Shard(tuple(dtensor.shape), tuple(chunks[0].offsets))


def is_repeated(tensor: torch.Tensor) -> bool:
    """Whether other ranks have, or may have, this rank's part as well."""
    dtensor: Any = tensor
    mesh = dtensor.device_mesh
    return root_mesh(mesh) is not mesh or any(each.is_replicate() for each in dtensor.placements)


def is_stored_here(name: str, tensor: torch.Tensor) -> bool:
    """Whether this rank stores its part. Among ranks with the same part, the choice depends on the name."""
    dtensor: Any = tensor
    mesh, coordinate = dtensor.device_mesh, dtensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False  # this rank has no part of it
    root = root_mesh(mesh)
    if root is not mesh and mesh.mesh.min() != root.mesh.min():
        # FSDP's mesh with tensor parallelism, for example: another submesh of the same root holds all of it too
        return False
    index, count = 0, 1
    for dimension, placement in enumerate(dtensor.placements):
        if placement.is_replicate():
            index = index * mesh.size(dimension) + coordinate[dimension]
            count *= mesh.size(dimension)
    return index == zlib.crc32(name.encode()) % count


def shard_like(template: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return this rank's part as a tensor that is sharded like `template`."""
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


def assign_to_ranks(sizes: Iterable[tuple[str, int]], world_size: int) -> dict[str, int]:
    """Assign each (name, bytes) to a rank that stores it, so that all ranks write about as much.

    Deterministic: all ranks get the same result.
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
    """Return the class; `None` while its module has not been imported, so that no such tensor exists."""
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


class ReplicaChecksum:
    """Covers tensors in host memory: reading those on a device would make training wait."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], places: Mapping[str, Shard]) -> None:
        """`places` gives the place of each sharded tensor's local part."""
        found = [(name, t) for name, t in sorted(tensors.items()) if is_plain(t) and t.numel()]
        listed = [(name, places.get(name)) for name, _ in found]
        self.key = digest(msgspec.json.encode(listed))
        """Digest of names and places: equal on ranks that hold the same tensors or the same parts."""
        self._edges = [bytes_of(t.detach().reshape(-1).view(torch.uint8)[:EDGE_BYTES]) for _, t in found]

    def current_digest(self) -> str:
        """Return a digest of the current contents."""
        return digest(b"".join(self._edges))
