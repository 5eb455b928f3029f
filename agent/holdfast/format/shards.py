"""Checkpoints that several ranks wrote: their parts put together, and whether that is a whole. Knows no torch."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from holdfast.errors import DamagedCheckpoint, IncompleteParts
from holdfast.format import manifest as fmt

Groups = dict[tuple[str, int | None], list[fmt.Tensor]]
"""What is stored under each name: by all ranks together (None), or by one of them as its own."""


class RankShard(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank wrote of a checkpoint."""

    rank: int
    file: fmt.File
    tensors: list[fmt.Tensor]
    state: dict[str, Any]
    """All of this rank's trees."""


class Whole(msgspec.Struct, frozen=True):
    """What a manifest says of all ranks, in their order."""

    files: list[fmt.File]
    tensors: list[fmt.Tensor]
    state: dict[str, Any]
    rank_states: dict[str, dict[str, Any]]


def together(parts: Iterable[RankShard], world_size: int) -> Whole:
    """Put the parts of all ranks together.

    Raises:
        IncompleteParts: not every rank could go on from them: one is missing or there twice, the shards of a
            tensor are not exactly all of it, or a tree refers to a tensor that is not stored for its rank.
    """
    ordered = sorted(parts, key=lambda part: part.rank)
    _require_all(ordered, world_size)
    tensors = [tensor for part in ordered for tensor in part.tensors]
    groups = _grouped(tensors)
    for name, rank in groups:
        if rank is not None and (name, None) in groups:  # nobody could tell which of the two is meant
            raise IncompleteParts(f"tensor {name}: rank {rank} stored it as its own, another as shared by all")
    ranks = {part.file.name: f"rank {part.rank}" for part in ordered}
    for (name, _), stored in groups.items():
        if reason := fault(stored, lambda tensor: ranks[tensor.file]):
            raise IncompleteParts(f"tensor {name}: {reason}")
    whole = Whole([part.file for part in ordered], tensors, ordered[0].state, _otherwise(ordered))
    if reason := _missing(whole, world_size, groups):
        raise IncompleteParts(reason)
    return whole


def require_whole(manifest: fmt.Manifest) -> None:
    """DamagedCheckpoint when the shards of a tensor are not all of it, or a rank's trees refer to one that is not
    stored for it."""
    groups = _grouped(manifest.tensors)
    for (name, _), stored in groups.items():
        if reason := fault(stored):
            raise DamagedCheckpoint(fmt.MANIFEST, f"tensor {name}: {reason}")
    if reason := _missing(manifest, manifest.world_size, groups):
        raise DamagedCheckpoint(fmt.MANIFEST, reason)


def _missing(whole: Whole | fmt.Manifest, world_size: int, groups: Groups) -> str | None:
    """What a rank's trees refer to and is neither its own nor shared, in words."""
    shared = {name for name, rank in groups if rank is None}
    own: dict[int, set[str]] = {int(rank): set() for rank in whole.rank_states}
    for name, rank in groups:
        if rank is not None:
            own.setdefault(rank, set()).add(name)
    wanted = {keyword: names_in(tree) - shared for keyword, tree in whole.state.items()}
    first = {keyword: names for keyword, names in wanted.items() if names}
    # of ranks with nothing of their own one stands for all
    for rank in [*own, *itertools.islice((rank for rank in range(world_size) if rank not in own), 1)]:
        trees = whole.rank_states.get(str(rank), {})
        names = {keyword: names_in(tree) - shared for keyword, tree in trees.items()}
        for keyword, found in (first | names if trees else first).items():
            if missing := found - own.get(rank, set()):
                return f"tensor {min(missing)}: it is in {keyword!r} of rank {rank}, and not stored for it"
    return None


def fault(
    stored: Sequence[fmt.Tensor], told: Callable[[fmt.Tensor], str] = lambda tensor: tensor.file
) -> str | None:
    """Why these shards are not exactly one tensor, in words; None when they are.

    Args:
        told: who stored a shard, for people.
    """
    first = stored[0]
    if len(stored) == 1 and first.shape == first.global_shape and not any(first.offsets):
        return None
    for shard in stored:
        if _kind(shard) != _kind(first):
            return f"it is {_words(first)} on {told(first)}, {_words(shard)} on {told(shard)}"
        if not _is_inside(shard):
            return f"the shard of {told(shard)} ({_place(shard)}) lies outside of {first.global_shape}"
    filled = [shard for shard in stored if math.prod(shard.shape)]
    if pair := overlapping(filled):
        one, other = sorted(pair, key=lambda shard: shard.file)
        if _place(one) == _place(other):
            return f"{told(one)} and {told(other)} both stored the same of it ({_place(one)})"
        return f"the shards of {told(one)} ({_place(one)}) and {told(other)} ({_place(other)}) overlap"
    count = math.prod(first.global_shape)
    if missing := count - sum(math.prod(shard.shape) for shard in filled):
        there = ", ".join(told(shard) for shard in stored)
        return f"{missing:,} of its {count:,} elements are missing: only {there} stored some of it"
    return None


def overlapping(shards: Sequence[fmt.Tensor]) -> tuple[fmt.Tensor, fmt.Tensor] | None:
    """Two that have an element in common, of shards that have one at all."""
    left = [list(shards)]
    while left:
        group = left.pop()
        if len(group) < 2:
            continue
        # what is sharded evenly or by rows falls apart into single shards; only the rest is compared in pairs
        splits = (_split(group, dimension) for dimension in range(len(group[0].shape)))
        if pieces := next((found for found in splits if len(found) > 1), None):
            left += pieces
        elif pair := _overlapping_pair(group):
            return pair
    return None


def _split(shards: Sequence[fmt.Tensor], dimension: int) -> list[list[fmt.Tensor]]:
    """Groups with no coordinate of this dimension in common."""
    found: list[list[fmt.Tensor]] = []
    reached = 0
    for shard in sorted(shards, key=lambda shard: shard.offsets[dimension]):
        start = shard.offsets[dimension]
        if not found or start >= reached:
            found.append([])
        found[-1].append(shard)
        reached = max(reached, start + shard.shape[dimension])
    return found


def _overlapping_pair(shards: Sequence[fmt.Tensor]) -> tuple[fmt.Tensor, fmt.Tensor] | None:
    for one, other in itertools.combinations(shards, 2):
        sides = zip(one.offsets, one.shape, other.offsets, other.shape, strict=True)
        if all(a < b + length_b and b < a + length_a for a, length_a, b, length_b in sides):
            return one, other
    return None


def _require_all(ordered: Sequence[RankShard], world_size: int) -> None:
    ranks = collections.Counter(part.rank for part in ordered)
    for rank in range(world_size):
        if ranks[rank] != 1:
            told = "is missing" if not ranks[rank] else f"is there {ranks[rank]} times"
            raise IncompleteParts(f"the part of rank {rank} of {world_size} {told}")
    if len(ordered) > world_size:
        raise IncompleteParts(f"there is a part of rank {ordered[-1].rank}, of {world_size} ranks")
    files: dict[str, int] = {}
    for part in ordered:
        if files.setdefault(part.file.name, part.rank) != part.rank:
            raise IncompleteParts(f"ranks {files[part.file.name]} and {part.rank} both wrote {part.file.name}")
        for tensor in part.tensors:
            if tensor.file != part.file.name or tensor.rank not in (None, part.rank):
                owner = "" if tensor.rank is None else f", of rank {tensor.rank}"
                raise IncompleteParts(
                    f"tensor {tensor.name}: rank {part.rank} told of one in {tensor.file}{owner}"
                )


def _grouped(tensors: Iterable[fmt.Tensor]) -> Groups:
    found: Groups = {}
    for tensor in tensors:
        found.setdefault((tensor.name, tensor.rank), []).append(tensor)
    return found


def names_in(tree: Any) -> set[str]:
    """The tensors that a tree refers to."""
    found, left = set(), [tree]
    while left:
        item = left.pop()
        if isinstance(item, list):
            left += item
        elif isinstance(item, dict):
            if "$tensor" in item:
                name = item["$tensor"]
                found.add(name if isinstance(name, str) else repr(name))  # of which there is no tensor
            else:
                left += item.values()
    return found


def is_module(tree: Any) -> bool:
    """Whether a tree is that of a module, rather than of another object."""
    return isinstance(tree, dict) and tree.keys() == {"state", "metadata", "buffers", "frozen"}


def _otherwise(ordered: Sequence[RankShard]) -> dict[str, dict[str, Any]]:
    """Entries that are not those of the first rank; compared as JSON, where 1, 1.0 and true are three things."""
    encoded = [{keyword: msgspec.json.encode(tree) for keyword, tree in part.state.items()} for part in ordered]
    found: dict[str, dict[str, Any]] = {}
    for part, trees in zip(ordered[1:], encoded[1:], strict=True):
        different = {key: part.state[key] for key, data in trees.items() if data != encoded[0].get(key)}
        different |= {keyword: fmt.ABSENT for keyword in encoded[0] if keyword not in trees}
        if different:
            found[str(part.rank)] = different
    return found


def _kind(tensor: fmt.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.view, tensor.global_shape


def _words(tensor: fmt.Tensor) -> str:
    return f"{tensor.view or tensor.dtype} of shape {tensor.global_shape}"


def _place(shard: fmt.Tensor) -> str:
    return f"{shard.shape} at {shard.offsets}"


def _is_inside(shard: fmt.Tensor) -> bool:
    if not len(shard.shape) == len(shard.offsets) == len(shard.global_shape):
        return False
    places = zip(shard.offsets, shard.shape, shard.global_shape, strict=True)
    return all(start >= 0 and length >= 0 and start + length <= end for start, length, end in places)
