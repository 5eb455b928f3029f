"""Which parts of which stored shards make up what a rank wants of a tensor, and putting them there."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from holdfast.errors import DamagedCheckpoint, IncompatibleCheckpoint
from holdfast.format import manifest as fmt
from holdfast.format.dtypes import DTYPES, PAIRED, dtype_of_view
from holdfast.format.shards import fault


class Region(NamedTuple):
    """What a rank holds of a tensor."""

    offsets: tuple[int, ...]
    """Within the global tensor, one a dimension."""
    shape: tuple[int, ...]


class Copy(NamedTuple):
    """A part of a stored shard that belongs into a region."""

    shard: fmt.Tensor
    offsets: tuple[int, ...]
    """Within the shard."""
    target: tuple[int, ...]
    """Its offsets within the region."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor, or a region of one, and what of the stored shards it is made of."""

    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]
    """Of the stored elements."""
    view: str | None
    copies: list[Copy]

    def made_of(self, read: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """From the shards that were read, by the `id` of their entry; a shard that is all of it is not copied.

        In host memory, whatever the script's default device is.
        """
        if len(self.copies) == 1 and self.copies[0].shard.shape == self.copies[0].shape == self.shape:
            return read[id(self.copies[0].shard)]
        whole = torch.empty(self.shape, dtype=DTYPES[self.dtype], device="cpu")
        for copy in self.copies:
            part = _part(read[id(copy.shard)], copy.offsets, copy.shape)
            _part(whole, copy.target, copy.shape).copy_(part)
        return whole


def wanted(name: str, stored: Sequence[fmt.Tensor], region: Region | None = None) -> Wanted:
    """What a region of a tensor is made of; all of it without one.

    Raises:
        DamagedCheckpoint: the shards are not the whole tensor.
        ValueError: the region lies outside of it.
    """
    first = stored[0]
    if reason := fault(stored):
        raise DamagedCheckpoint(fmt.MANIFEST, f"tensor {name}: {reason}")
    if region is None:
        copies = [Copy(each, _zeros(each), each.offsets, each.shape) for each in stored if math.prod(each.shape)]
        return Wanted(first.dtype, first.global_shape, first.view, copies)
    inside = _as_stored(name, first, region)
    return Wanted(first.dtype, inside.shape, first.view, plan(stored, inside))


def plan(stored: Sequence[fmt.Tensor], region: Region) -> list[Copy]:
    """What to copy from which shards, as torch.distributed.checkpoint would; nothing for an empty region."""
    if not math.prod(region.shape):
        return []
    for shard in stored:
        if (shard.offsets, shard.shape) == region:  # as many ranks as before: no need to import what plans
            return [Copy(shard, _zeros(shard), _zeros(shard), shard.shape)]
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    filled = [shard for shard in stored if math.prod(shard.shape)]
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
        found.append(Copy(filled[number], *parts))
    return found


def shape_of(stored: fmt.Tensor) -> tuple[str, tuple[int, ...]]:
    """Dtype and global shape of a stored tensor as torch has them."""
    dtype, is_paired = _kind(stored.dtype, stored.view)
    return dtype, stored.global_shape[:-1] if is_paired else stored.global_shape


@functools.cache
def _kind(dtype: str, view: str | None) -> tuple[str, bool]:
    """The dtype as torch says it, and whether each element is stored as a pair."""
    found = dtype_of(dtype, view)
    return str(found), found in PAIRED


def dtype_of(dtype: str, view: str | None) -> torch.dtype:
    """Torch's dtype of a stored tensor.

    Raises:
        IncompatibleCheckpoint: this torch has none of that name.
        DamagedCheckpoint: it is none that is stored in that way.
    """
    if view is None:
        return DTYPES[dtype]
    try:
        found = dtype_of_view(view)
    except ValueError as error:
        raise IncompatibleCheckpoint(str(error)) from error
    if found not in PAIRED and found.itemsize != 1:
        raise DamagedCheckpoint(fmt.MANIFEST, f"a tensor stored as {dtype} cannot be viewed as {view}")
    return found


def _as_stored(name: str, stored: fmt.Tensor, region: Region) -> Region:
    """Of the stored elements, which have one dimension more where torch's are pairs of them."""
    _, shape = shape_of(stored)
    sides = list(zip(region.offsets, region.shape, shape, strict=False))
    if not len(region.offsets) == len(region.shape) == len(shape) or any(
        start < 0 or length < 0 or start + length > end for start, length, end in sides
    ):
        raise ValueError(f"tensor {name}: {region.shape} at {region.offsets} lies outside of {shape}")
    pair = stored.global_shape[len(shape) :]
    return Region((*region.offsets, *(0 for _ in pair)), (*region.shape, *pair))


def _part(tensor: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    for dimension, (start, length) in enumerate(zip(offsets, shape, strict=True)):
        tensor = tensor.narrow(dimension, start, length)
    return tensor


def _zeros(shard: fmt.Tensor) -> tuple[int, ...]:
    return (0,) * len(shard.shape)
