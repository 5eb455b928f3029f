"""What a rank takes of a checkpoint, and whether all that its state refers to is stored. Does not import torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.errors import DamagedCheckpoint
from holdfast.format import manifest as fmt

if TYPE_CHECKING:
    from holdfast.format.merged_ranks import MergedRanks

Groups = dict[tuple[str, int | None], list[fmt.Tensor]]
"""The stored tensors by name and rank; the rank is None for tensors that all ranks share."""


def _missing_names(keyword: str, rank: int, missing: set[str]) -> str | None:
    if not missing:
        return None
    return f"tensor {min(missing)}: {keyword!r} of rank {rank} refers to it, but it is not stored"


class Region(NamedTuple):
    """The part of a tensor that a rank holds."""

    offsets: tuple[int, ...]
    """Offsets in the global tensor, one per dimension."""
    shape: tuple[int, ...]


def require_complete(manifest: fmt.Manifest) -> None:
    """Raise DamagedCheckpoint when shards do not cover their tensor, or a tree refers to a missing tensor."""
    groups = grouped(manifest.tensors)
    for (name, _), stored in groups.items():
        if reason := shard_error(stored):
            raise DamagedCheckpoint(fmt.MANIFEST, f"tensor {name}: {reason}")
    if reason := missing_tensor(manifest, manifest.world_size, groups):
        raise DamagedCheckpoint(fmt.MANIFEST, reason)


def missing_tensor(merged: MergedRanks | fmt.Manifest, world_size: int, groups: Groups) -> str | None:
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
    stored: Sequence[fmt.Tensor],
    source: Callable[[fmt.Tensor], str] = lambda tensor: tensor.file,
    *,
    is_part: bool = False,
) -> str | None:
    """Return why shards do not cover a tensor exactly; None if they do.

    Args:
        source: names the writer of a shard.
        is_part: other ranks may have stored what is missing.
    """
    first = stored[0]
    if len(stored) == 1 and first.shape == first.global_shape and not any(first.offsets):
        return None
    from holdfast.format.merged_ranks import error_of_shards  # only for tensors of which ranks store parts

    return error_of_shards(stored, source, is_part=is_part)


def grouped(tensors: Iterable[fmt.Tensor]) -> Groups:
    """Group stored tensors by name and rank."""
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
