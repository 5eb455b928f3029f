"""What of a checkpoint applies to a job with another number of ranks."""

from __future__ import annotations

from typing import Any

from holdfast.checkpoint.restore import LoadedCheckpoint
from holdfast.format.shards import names_in


def dropped_gradients(loaded: LoadedCheckpoint, world_size: int) -> str | None:
    """Describe what of a checkpoint is dropped because the world size is another one."""
    if loaded.manifest.world_size == world_size or not _unfitting(loaded):
        return None
    return (
        "gradients that each rank had accumulated for itself are dropped, since the checkpoint has "
        f"{loaded.manifest.world_size} ranks and this job has {world_size}"
    )


def _unfitting(loaded: LoadedCheckpoint) -> set[str]:
    """Return names of gradients that one rank holds: their mean over other ranks would be wrong."""
    own = {tensor.name for tensor in loaded.manifest.tensors if tensor.rank is not None}
    return own & names_in(loaded.state.get("gradients", {}))


def fitting_state(loaded: LoadedCheckpoint, world_size: int) -> dict[str, Any]:
    """Return the state of a checkpoint without what is dropped."""
    if loaded.manifest.world_size == world_size or not (gone := _unfitting(loaded)):
        return loaded.state
    gradients = {
        keyword: {name: tree for name, tree in parameters.items() if tree["$tensor"] not in gone}
        for keyword, parameters in loaded.state["gradients"].items()
    }
    return {**loaded.state, "gradients": gradients}


def differing_keywords(loaded: LoadedCheckpoint) -> set[str]:
    """Return keywords, and entries of `rng` such as `rng.torch`, that differed among ranks."""
    seen: dict[str, set[str]] = {}
    for tensor in loaded.manifest.tensors:
        if tensor.rank is not None:
            seen.setdefault(tensor.name, set()).add(tensor.digest)
    names = [name.split(".") for name, digests in seen.items() if len(digests) > 1]
    found = {".".join(parts[:2]) if parts[0] == "rng" else parts[0] for parts in names}
    first = loaded.manifest.state
    for trees in loaded.manifest.rank_states.values():
        found |= trees.keys()
        rng = trees.get("rng", {})
        found |= {f"rng.{entry}" for entry, tree in rng.items() if tree != first["rng"].get(entry)}
    return found
