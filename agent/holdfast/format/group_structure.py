"""Whether ranks store every shard of a state once, found out in groups of ranks. Does not import torch.

A group merges what its ranks store: adjacent shards become one region. So what one group sends to the next has an
entry for each tensor, however many ranks store a part of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from holdfast.errors import IncompleteParts
from holdfast.format import manifest as fmt
from holdfast.format.manifest_files import TensorStructure
from holdfast.format.shards import shard_error


class StoredRegion(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A region of a tensor that one rank stores, or several ranks without a gap."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    first: int
    """The lowest of the ranks."""
    last: int
    """The highest of the ranks."""


class SharedTensor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor that all ranks use, and what a group stores of it."""

    dtype: str
    view: str | None
    global_shape: tuple[int, ...]
    regions: list[StoredRegion]

    @property
    def is_complete(self) -> bool:
        """Return whether the regions are joined to the whole tensor."""
        return len(self.regions) == 1 and self.regions[0].shape == self.global_shape

    def shards(self, name: str) -> Iterator[fmt.Tensor]:
        """Yield the regions as shards, whose file is the text that names their ranks."""
        for each in self.regions:
            ranks = f"rank {each.first}" if each.first == each.last else f"ranks {each.first} to {each.last}"
            yield fmt.Tensor(
                name=name,
                dtype=self.dtype,
                shape=each.shape,
                global_shape=self.global_shape,
                offsets=each.offsets,
                file=ranks,
                start=0,
                end=0,
                digest="",
                view=self.view,
            )


class GroupStructure(msgspec.Struct, frozen=True):
    """What a group of ranks stores of a state, without the bytes."""

    shared: dict[str, SharedTensor]
    own: dict[str, int]
    """Tensors that a rank stores for itself, with the lowest of these ranks."""
    wanted: dict[str, tuple[str, int]]
    """Tensors that ranks of other groups must store: the entry of the state that refers to it, and the lowest rank
    that has this entry."""

    def require_complete(self) -> None:
        """Raise IncompleteParts unless every rank could resume from what the group stores: it has all ranks."""
        for name, tensor in self.shared.items():
            if not (tensor.is_complete and _has_places(tensor)):
                _require(name, shard_error(list(tensor.shards(name))))
        for name, (keyword, rank) in sorted(
            self.wanted.items(), key=lambda item: (item[1][1], item[1][0], item[0])
        ):
            _require(name, f"{keyword!r} of rank {rank} refers to it, but it is not stored")


def structure_of_rank(
    rank: int, tensors: Sequence[TensorStructure], refers: Mapping[str, Iterable[str]]
) -> GroupStructure:
    """Return what one rank stores.

    Args:
        refers: names of the tensors that its trees refer to, by entry of the state.

    Raises:
        IncompleteParts: it has not stored each of its own tensors once, or shards that overlap.
    """
    shared: dict[str, SharedTensor] = {}
    own: dict[str, int] = {}
    for each in tensors:
        shape = each.shape if each.global_shape is None else each.global_shape
        offsets = fmt.zeros(len(each.shape)) if each.offsets is None else each.offsets
        stored = SharedTensor(each.dtype, each.view, shape, [StoredRegion(offsets, each.shape, rank, rank)])
        if each.is_own:
            is_whole = each.name not in own and stored.is_complete and _has_places(stored)
            _require(each.name, None if is_whole else f"rank {rank} has not stored one whole tensor of its own")
            own[each.name] = rank
        elif (same := shared.get(each.name)) is not None:
            shared[each.name] = _merged(each.name, [same, stored])
        else:
            shared[each.name] = stored
    wanted = {
        name: (keyword, rank)
        for keyword, names in refers.items()
        for name in names
        if name not in shared and name not in own
    }
    return GroupStructure(shared, own, wanted)


def merge_groups(groups: Sequence[GroupStructure]) -> GroupStructure:
    """Return what several groups of ranks store together. IncompleteParts: they contradict each other."""
    stored: dict[str, list[SharedTensor]] = {}
    own: dict[str, int] = {}
    wanted: dict[str, tuple[str, int]] = {}
    for group in groups:
        for name, tensor in group.shared.items():
            stored.setdefault(name, []).append(tensor)
        for name, rank in group.own.items():
            own[name] = min(rank, own.get(name, rank))
        for name, entry in group.wanted.items():
            wanted[name] = min(entry, wanted.get(name, entry), key=lambda each: each[1])
    for name in own.keys() & stored.keys():
        _require(name, f"rank {own[name]} stored it as its own, but another rank as shared")
    shared = {name: _merged(name, tensors) for name, tensors in stored.items()}
    return GroupStructure(shared, own, {name: entry for name, entry in wanted.items() if name not in shared})


def _merged(name: str, tensors: Sequence[SharedTensor]) -> SharedTensor:
    first = tensors[0]
    if len(tensors) == 1:
        return first
    regions = [region for tensor in tensors for region in tensor.regions]
    kinds = {(tensor.dtype, tensor.view, tensor.global_shape) for tensor in tensors}
    joined = _joined(regions) if len(kinds) == 1 and all(map(_has_places, tensors)) else []
    if len(joined) != 1:  # otherwise none of them overlap
        shards = [shard for tensor in tensors for shard in tensor.shards(name)]
        _require(name, shard_error(shards, is_part=True))
    return SharedTensor(first.dtype, first.view, first.global_shape, joined)


def _has_places(tensor: SharedTensor) -> bool:
    """Return whether all regions are inside of the tensor."""
    for region in tensor.regions:
        if not len(region.offsets) == len(region.shape) == len(tensor.global_shape):
            return False
        for start, side, end in zip(region.offsets, region.shape, tensor.global_shape, strict=True):
            if start < 0 or side < 0 or start + side > end:
                return False
    return True


def _joined(regions: list[StoredRegion]) -> list[StoredRegion]:
    """Join regions that do not overlap where they are adjacent along one dimension after the other."""
    filled = [region for region in regions if math.prod(region.shape)]
    if not filled:
        return regions[:1]
    for dimension in reversed(range(len(filled[0].shape))):
        if any(region.offsets[dimension] != filled[0].offsets[dimension] for region in filled):
            filled = _joined_along(dimension, filled)
    return filled


def _joined_along(dimension: int, regions: Sequence[StoredRegion]) -> list[StoredRegion]:
    after = dimension + 1
    placed = []
    for region in regions:
        offsets, shape = region.offsets, region.shape
        others = offsets[:dimension], offsets[after:], shape[:dimension], shape[after:]
        placed.append((others, offsets[dimension], region))
    placed.sort(key=lambda each: each[:2])
    joined, row, end = list[StoredRegion](), None, 0
    for others, start, region in placed:
        side = region.shape[dimension]
        if others == row and start == end:
            first = joined.pop()
            shape = (*first.shape[:dimension], first.shape[dimension] + side, *first.shape[after:])
            ranks = min(first.first, region.first), max(first.last, region.last)
            region = StoredRegion(first.offsets, shape, *ranks)
        joined.append(region)
        row, end = others, start + side
    return joined


def _require(name: str, reason: str | None) -> None:
    if reason is not None:
        raise IncompleteParts(f"tensor {name}: {reason}")
