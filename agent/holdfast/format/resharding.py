"""Assemble tensors, or the regions of them that a rank needs, from stored shards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt
from holdfast.format.dtypes import DTYPES, shape_of
from holdfast.format.shards import Region, shard_error


class ShardCopy(NamedTuple):
    """A part of a stored shard, and its offsets in a region."""

    shard: fmt.Tensor
    offsets: tuple[int, ...]
    """Offsets in the shard."""
    target: tuple[int, ...]
    """Offsets in the region."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorAssembly:
    """A tensor, or a region of one, and the parts of stored shards that it consists of."""

    dtype: str
    """Name of the dtype in safetensors."""
    shape: tuple[int, ...]
    """Shape in stored elements."""
    view: str | None
    copies: list[ShardCopy]

    def build(self, read: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Build the tensor from shards by the `id` of their entry; a single complete shard is not copied.

        The result is in host memory, whatever the default device of the script is.
        """
        if len(self.copies) == 1 and self.copies[0].shard.shape == self.copies[0].shape == self.shape:
            return read[id(self.copies[0].shard)]
        target = torch.empty(self.shape, dtype=DTYPES[self.dtype], device="cpu")
        for copy in self.copies:
            part = _part(read[id(copy.shard)], copy.offsets, copy.shape)
            _part(target, copy.target, copy.shape).copy_(part)
        return target


def plan_assembly(name: str, stored: Sequence[fmt.Tensor], region: Region | None = None) -> TensorAssembly:
    """Plan how to assemble a region of a tensor, or all of it.

    Raises:
        DamagedCheckpoint: the shards do not cover the tensor.
        ValueError: the region is outside of it.
    """
    first = stored[0]
    if reason := shard_error(stored):
        raise DamagedCheckpoint(fmt.MANIFEST, f"tensor {name}: {reason}")
    if region is None:
        copies = [
            ShardCopy(each, _zeros(each), each.offsets, each.shape) for each in stored if math.prod(each.shape)
        ]
        return TensorAssembly(first.dtype, first.global_shape, first.view, copies)
    inside = _as_stored(name, first, region)
    return TensorAssembly(first.dtype, inside.shape, first.view, copies_for(stored, inside))


def copies_for(stored: Sequence[fmt.Tensor], region: Region) -> list[ShardCopy]:
    """Plan what to copy from which shards, as torch.distributed.checkpoint does; empty for an empty region."""
    if not math.prod(region.shape):
        return []
    for shard in stored:
        if (shard.offsets, shard.shape) == region:  # an unchanged world size needs no planner
            return [ShardCopy(shard, _zeros(shard), _zeros(shard), shard.shape)]
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    filled = [shard for shard in stored if _meets(shard, region)]  # the planner looks at each of many ranks
    if not filled:
        return []
    metadata = TensorStorageMetadata(
        TensorProperties(DTYPES[filled[0].dtype]),
        torch.Size(filled[0].global_shape),
        [ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.shape)) for shard in filled],
    )
    chunk = ChunkStorageMetadata(torch.Size(region.offsets), torch.Size(region.shape))
    found = []
    for item in create_read_items_for_chunk_list(filled[0].name, metadata, [chunk]):
        number = item.storage_index.index
        assert number is not None
        parts = tuple(item.storage_offsets), tuple(item.dest_offsets), tuple(item.lengths)
        found.append(ShardCopy(filled[number], *parts))
    return found


def _meets(shard: fmt.Tensor, region: Region) -> bool:
    """Return whether a shard has elements of a region."""
    places = zip(shard.offsets, shard.shape, region.offsets, region.shape, strict=True)
    return 0 not in shard.shape and all(a < b + length and b < a + side for a, side, b, length in places)


def _as_stored(name: str, stored: fmt.Tensor, region: Region) -> Region:
    """Convert a region to stored elements, which have one more dimension where torch elements are pairs."""
    _, shape = shape_of(stored)
    sides = list(zip(region.offsets, region.shape, shape, strict=False))
    if not len(region.offsets) == len(region.shape) == len(shape) or any(
        start < 0 or length < 0 or start + length > end for start, length, end in sides
    ):
        raise ValueError(f"tensor {name}: {region.shape} at {region.offsets} is outside of {shape}")
    pair = stored.global_shape[len(shape) :]
    return Region((*region.offsets, *(0 for _ in pair)), (*region.shape, *pair))


def _part(tensor: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    for dimension, (start, length) in enumerate(zip(offsets, shape, strict=True)):
        tensor = tensor.narrow(dimension, start, length)
    return tensor


def _zeros(shard: fmt.Tensor) -> tuple[int, ...]:
    return (0,) * len(shard.shape)
