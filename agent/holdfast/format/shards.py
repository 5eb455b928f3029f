"""Merge and check what several ranks stored of a checkpoint. Does not import torch."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from holdfast.errors import DamagedCheckpoint, IncompleteParts
from holdfast.format import manifest as fmt
from holdfast.format.manifest_files import TensorStructure

Groups = dict[tuple[str, int | None], list[fmt.Tensor]]
"""The stored tensors by name and rank; the rank is None for tensors that all ranks share."""


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


class RankStructure(msgspec.Struct, frozen=True):
    """What one rank stores of a state, without the bytes."""

    tensors: list[TensorStructure]
    refers: dict[str, list[str]]
    """Names of the tensors that its trees refer to, by entry of the state."""


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
    groups = _grouped(tensors)
    ranks = {file.name: f"rank {part.rank}" for part in ordered for file in part.files}
    _require_complete_tensors(groups, lambda tensor: ranks[tensor.file])
    files = [file for part in ordered for file in part.files]
    merged = MergedRanks(files, tensors, ordered[0].state, _rank_differences(ordered))
    if reason := _missing(merged, world_size, groups):
        raise IncompleteParts(reason)
    return merged


def require_complete_ranks(ranks: Sequence[RankStructure]) -> None:
    """Raise IncompleteParts unless the ranks, in their order, could resume from what they store."""
    tensors = [
        tensor.placed(rank, f"rank {rank}", 0, 0, "", None)
        for rank, each in enumerate(ranks)
        for tensor in each.tensors
    ]
    groups = _grouped(tensors)
    _require_complete_tensors(groups)
    shared = {name for name, rank in groups if rank is None}
    for rank, each in enumerate(ranks):
        stored = shared.union(tensor.name for tensor in each.tensors)
        for keyword, names in each.refers.items():
            if reason := _missing_names(keyword, rank, set(names) - stored):
                raise IncompleteParts(reason)


def _require_complete_tensors(
    groups: Groups, source: Callable[[fmt.Tensor], str] = lambda tensor: tensor.file
) -> None:
    for name, rank in groups:
        if rank is not None and (name, None) in groups:
            raise IncompleteParts(f"tensor {name}: rank {rank} stored it as its own, but another rank as shared")
    for (name, _), stored in groups.items():
        if reason := shard_error(stored, source):
            raise IncompleteParts(f"tensor {name}: {reason}")


def _missing_names(keyword: str, rank: int, missing: set[str]) -> str | None:
    if not missing:
        return None
    return f"tensor {min(missing)}: {keyword!r} of rank {rank} refers to it, but it is not stored"


def require_complete(manifest: fmt.Manifest) -> None:
    """Raise DamagedCheckpoint when shards do not cover their tensor, or a tree refers to a missing tensor."""
    groups = _grouped(manifest.tensors)
    for (name, _), stored in groups.items():
        if reason := shard_error(stored):
            raise DamagedCheckpoint(fmt.MANIFEST, f"tensor {name}: {reason}")
    if reason := _missing(manifest, manifest.world_size, groups):
        raise DamagedCheckpoint(fmt.MANIFEST, reason)


def _missing(merged: MergedRanks | fmt.Manifest, world_size: int, groups: Groups) -> str | None:
    """Describe the first tensor that a tree refers to but that is not stored for its rank; None if all are."""
    shared = {name for name, rank in groups if rank is None}
    own: dict[int, set[str]] = {int(rank): set() for rank in merged.rank_states}
    for name, rank in groups:
        if rank is not None:
            own.setdefault(rank, set()).add(name)
    wanted = {keyword: names_in(tree) - shared for keyword, tree in merged.state.items()}
    first = {keyword: names for keyword, names in wanted.items() if names}
    # one of the ranks without own tensors represents all of them
    for rank in [*own, *itertools.islice((rank for rank in range(world_size) if rank not in own), 1)]:
        trees = merged.rank_states.get(str(rank), {})
        names = {keyword: names_in(tree) - shared for keyword, tree in trees.items()}
        for keyword, found in (first | names if trees else first).items():
            if reason := _missing_names(keyword, rank, found - own.get(rank, set())):
                return reason
    return None


def shard_error(
    stored: Sequence[fmt.Tensor], source: Callable[[fmt.Tensor], str] = lambda tensor: tensor.file
) -> str | None:
    """Return why shards do not cover a tensor exactly; None if they do. `source` names the writer of a shard."""
    first = stored[0]
    if len(stored) == 1 and first.shape == first.global_shape and not any(first.offsets):
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
    count = math.prod(first.global_shape)
    if missing := count - sum(math.prod(shard.shape) for shard in filled):
        sources = ", ".join(source(shard) for shard in stored)
        return f"{missing:,} of its {count:,} elements are missing: only {sources} stored shards"
    return None


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


def _grouped(tensors: Iterable[fmt.Tensor]) -> Groups:
    found: Groups = {}
    for tensor in tensors:
        found.setdefault((tensor.name, tensor.rank), []).append(tensor)
    return found


def names_in(tree: Any) -> set[str]:
    """Return the names of the tensors that a tree refers to."""
    found, left = set(), [tree]
    while left:
        item = left.pop()
        if isinstance(item, list):
            left += item
        elif isinstance(item, dict):
            if "$tensor" in item:
                name = item["$tensor"]
                found.add(name if isinstance(name, str) else repr(name))  # no tensor has this name
            else:
                left += item.values()
    return found


def is_module(tree: Any) -> bool:
    """Return whether a tree is the state of a module, and not of another object."""
    return isinstance(tree, dict) and tree.keys() == {"state", "metadata", "buffers", "frozen"}


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


def saved_rank(manifest: fmt.Manifest, rank: int) -> int:
    """Return the saved rank whose tensors and trees a rank takes; with more ranks now, several take the same."""
    return rank % manifest.world_size


def tensors_for(manifest: fmt.Manifest, rank: int) -> dict[str, list[fmt.Tensor]]:
    """Return the tensors of a rank by name: its own tensor, or else the shards of the shared one."""
    saved = saved_rank(manifest, rank)
    shared: dict[str, list[fmt.Tensor]] = {}
    own: dict[str, list[fmt.Tensor]] = {}
    for tensor in manifest.tensors:
        if tensor.rank is None:
            shared.setdefault(tensor.name, []).append(tensor)
        elif tensor.rank == saved:
            own.setdefault(tensor.name, []).append(tensor)
    return shared | own if own else shared


def state_for(manifest: fmt.Manifest, rank: int) -> dict[str, Any]:
    """Return the state of a rank: its own entries, or else the shared ones."""
    own = manifest.rank_states.get(str(saved_rank(manifest, rank)))
    if not own:
        return manifest.state
    return {keyword: tree for keyword, tree in (manifest.state | own).items() if tree != fmt.ABSENT}


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
