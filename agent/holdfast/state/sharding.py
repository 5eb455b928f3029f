"""What several ranks hold: whether a tensor is sharded, and which rank stores one that is whole on all of them.

Tensors that are whole on all ranks are
distributed among them for storing. A checksum shows whether they are equal: ranks that have diverged, by local
steps, or pipeline stages whose parameters have the same names, would be restored as a mixture.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from holdfast.format.manifest import Shard, digest
from holdfast.system.host_memory import bytes_of, is_plain

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
    return local_part(tensor) if is_sharded(tensor) else tensor


def storages(tensors: Iterable[torch.Tensor]) -> Iterator[int]:
    """Return the addresses of the local storages of these tensors."""
    return (local(tensor).untyped_storage().data_ptr() for tensor in tensors)


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


def local_part(dtensor: DTensor | Any) -> torch.Tensor:
    """Return the part of a sharded tensor in this rank's memory."""
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
