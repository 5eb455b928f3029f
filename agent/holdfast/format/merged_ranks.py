"""Merge and check what several ranks stored of a checkpoint, and fit it to another number of ranks.

Does not import torch.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from holdfast.errors import IncompleteParts
from holdfast.format import manifest as fmt
from holdfast.format.shards import Groups, grouped, missing_tensor, names_in, shard_error


class RankShard(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank stored of a checkpoint."""

    rank: int
    file: fmt.File
    tensors: list[fmt.Tensor]
    state: dict[str, Any]
    """All trees of this rank."""
    more_files: list[fmt.File] = []
    """Files of tensors that did not change, most of them linked from earlier checkpoints."""

    @property
    def files(self) -> list[fmt.File]:
        return [self.file, *self.more_files]


class MergedRanks(msgspec.Struct, frozen=True):
    """The files, tensors and states of all ranks, in their order."""

    files: list[fmt.File]
    tensors: list[fmt.Tensor]
    state: dict[str, Any]
    rank_states: dict[str, dict[str, Any]]


def merge_ranks(parts: Iterable[RankShard], world_size: int) -> MergedRanks:
    """Merge what all ranks stored.

    Raises:
        IncompleteParts: a rank could not resume from it: a rank is missing or present twice, the shards of a
            tensor do not cover it exactly, or a tree refers to a tensor that is not stored for its rank.
    """
    ordered = sorted(parts, key=lambda part: part.rank)
    _require_all(ordered, world_size)
    tensors = [tensor for part in ordered for tensor in part.tensors]
    groups = grouped(tensors)
    ranks = {file.name: f"rank {part.rank}" for part in ordered for file in part.files}
    _require_complete_tensors(groups, lambda tensor: ranks[tensor.file])
    files = [file for part in ordered for file in part.files]
    merged = MergedRanks(files, tensors, ordered[0].state, _rank_differences(ordered))
    if reason := missing_tensor(merged, world_size, groups):
        raise IncompleteParts(reason)
    return merged


def _require_complete_tensors(groups: Groups, source: Callable[[fmt.Tensor], str]) -> None:
    for name, rank in groups:
        if rank is not None and (name, None) in groups:
            raise IncompleteParts(f"tensor {name}: rank {rank} stored it as its own, but another rank as shared")
    for (name, _), stored in groups.items():
        if reason := shard_error(stored, source):
            raise IncompleteParts(f"tensor {name}: {reason}")


def error_of_shards(
    stored: Sequence[fmt.Tensor], source: Callable[[fmt.Tensor], str], *, is_part: bool
) -> str | None:
    """Return the same as `shard_error`, for shards that are not the whole tensor."""
    first = stored[0]
    if _is_cut_along_one_dimension(stored):
        return None
    for shard in stored:
        if _kind(shard) != _kind(first):
            return f"it is {_kind_text(first)} on {source(first)}, but {_kind_text(shard)} on {source(shard)}"
        if not _is_inside(shard):
            return f"the shard of {source(shard)} ({_position(shard)}) is outside of {first.global_shape}"
    filled = [shard for shard in stored if math.prod(shard.shape)]
    if pair := overlapping(filled):
        one, other = sorted(pair, key=lambda shard: shard.file)
        if _position(one) == _position(other):
            return f"{source(one)} and {source(other)} both stored the same shard ({_position(one)})"
        return f"the shards of {source(one)} ({_position(one)}) and {source(other)} ({_position(other)}) overlap"
    if is_part:
        return None
    count = math.prod(first.global_shape)
    if missing := count - sum(math.prod(shard.shape) for shard in filled):
        sources = ", ".join(source(shard) for shard in stored)
        return f"{missing:,} of its {count:,} elements are missing: only {sources} stored shards"
    return None


def _is_cut_along_one_dimension(stored: Sequence[fmt.Tensor]) -> bool:
    """Return whether shards follow each other along one dimension, from the begin of the tensor to its end.

    Nearly all do: this takes a quarter of the time of all checks.
    """
    first = stored[0]
    whole, count = first.global_shape, len(first.global_shape)
    cut = [number for number, (side, end) in enumerate(zip(first.shape, whole, strict=False)) if side != end]
    if len(cut) != 1 or len(first.shape) != count:
        return False
    at, reached = cut[0], 0
    before, after = whole[:at], whole[at + 1 :]
    for shard in sorted(stored, key=lambda shard: (shard.offsets[at : at + 1], shard.shape[at : at + 1])):
        shape, offsets = shard.shape, shard.offsets
        if not (
            shard.global_shape == whole
            and shard.dtype == first.dtype
            and shard.view == first.view
            and len(shape) == len(offsets) == count
            and offsets[at] == reached
            and shape[at] >= 0
            and shape[:at] == before
            and shape[at + 1 :] == after
            and not any(offsets[:at])
            and not any(offsets[at + 1 :])
        ):
            return False
        reached += shape[at]
    return reached == whole[at]


def overlapping(shards: Sequence[fmt.Tensor]) -> tuple[fmt.Tensor, fmt.Tensor] | None:
    """Return two of these non-empty shards that overlap; None if none do."""
    left = [list(shards)]
    while left:
        group = left.pop()
        if len(group) < 2:
            continue
        # split regular shards along dimensions, and compare only the rest in pairs
        splits = (_split(group, dimension) for dimension in range(len(group[0].shape)))
        if pieces := next((found for found in splits if len(found) > 1), None):
            left += pieces
        elif pair := _overlapping_pair(group):
            return pair
    return None


def _split(shards: Sequence[fmt.Tensor], dimension: int) -> list[list[fmt.Tensor]]:
    """Split shards into groups that have no coordinate of a dimension in common."""
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
            reason = "is missing" if not ranks[rank] else f"is present {ranks[rank]} times"
            raise IncompleteParts(f"the part of rank {rank} of {world_size} {reason}")
    if len(ordered) > world_size:
        raise IncompleteParts(f"there is a part of rank {ordered[-1].rank}, but there are {world_size} ranks")
    files = require_own_files([[file.name for file in part.files] for part in ordered], world_size)
    for part in ordered:
        for tensor in part.tensors:
            if files.get(tensor.file) != part.rank or tensor.rank not in (None, part.rank):
                owner = "" if tensor.rank is None else f", of rank {tensor.rank}"
                raise IncompleteParts(
                    f"tensor {tensor.name}: rank {part.rank} reported one in {tensor.file}{owner}"
                )


def require_own_files(names: Sequence[Sequence[str]], world_size: int) -> dict[str, int]:
    """Return the rank that wrote each file, given the names by rank. IncompleteParts if two wrote the same."""
    if len(names) != world_size:
        raise IncompleteParts(f"there are parts of {len(names)} of {world_size} ranks")
    files: dict[str, int] = {}
    for rank, of_rank in enumerate(names):
        for name in of_rank:
            if files.setdefault(name, rank) != rank:
                raise IncompleteParts(f"ranks {files[name]} and {rank} both wrote {name}")
    return files


def _rank_differences(ordered: Sequence[RankShard]) -> dict[str, dict[str, Any]]:
    """Return the entries that differ from those of rank 0, compared as JSON, where 1, 1.0 and true differ."""
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


def _kind_text(tensor: fmt.Tensor) -> str:
    return f"{tensor.view or tensor.dtype} of shape {tensor.global_shape}"


def _position(shard: fmt.Tensor) -> str:
    return f"{shard.shape} at {shard.offsets}"


def _is_inside(shard: fmt.Tensor) -> bool:
    if not len(shard.shape) == len(shard.offsets) == len(shard.global_shape):
        return False
    places = zip(shard.offsets, shard.shape, shard.global_shape, strict=True)
    return all(start >= 0 and length >= 0 and start + length <= end for start, length, end in places)


def dropped_gradients(manifest: fmt.Manifest, state: dict[str, Any], world_size: int) -> str | None:
    """Describe what of a checkpoint is dropped because the world size is another one."""
    if manifest.world_size == world_size or not _unfitting(manifest, state):
        return None
    return (
        "gradients that each rank had accumulated for itself are dropped, since the checkpoint has "
        f"{manifest.world_size} ranks and this job has {world_size}"
    )


def _unfitting(manifest: fmt.Manifest, state: dict[str, Any]) -> set[str]:
    """Return names of gradients that one rank holds: their mean over other ranks would be wrong."""
    own = {tensor.name for tensor in manifest.tensors if tensor.rank is not None}
    return own & names_in(state.get("gradients", {}))


def fitting_state(manifest: fmt.Manifest, state: dict[str, Any], world_size: int) -> dict[str, Any]:
    """Return the state of a checkpoint without what is dropped."""
    if manifest.world_size == world_size or not (gone := _unfitting(manifest, state)):
        return state
    gradients = {
        keyword: {name: tree for name, tree in parameters.items() if tree["$tensor"] not in gone}
        for keyword, parameters in state["gradients"].items()
    }
    return {**state, "gradients": gradients}


def differing_keywords(manifest: fmt.Manifest) -> set[str]:
    """Return keywords, and entries of `rng` such as `rng.torch`, that differed among ranks."""
    seen: dict[str, set[str]] = {}
    for tensor in manifest.tensors:
        if tensor.rank is not None:
            seen.setdefault(tensor.name, set()).add(tensor.digest)
    names = [name.split(".") for name, digests in seen.items() if len(digests) > 1]
    found = {".".join(parts[:2]) if parts[0] == "rng" else parts[0] for parts in names}
    first = manifest.state
    for trees in manifest.rank_states.values():
        found |= trees.keys()
        rng = trees.get("rng", {})
        found |= {f"rng.{entry}" for entry, tree in rng.items() if tree != first["rng"].get(entry)}
    return found
