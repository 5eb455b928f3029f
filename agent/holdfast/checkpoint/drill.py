"""Load a stored checkpoint into host memory as a start would, without a device and without a script."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import msgspec
import torch

from holdfast.checkpoint import restore
from holdfast.checkpoint.reading import FileRange
from holdfast.checkpoint.repair import read_repairing
from holdfast.checkpoint.restore import LoadedCheckpoint
from holdfast.checkpoint.stored_manifest import read_stored
from holdfast.errors import DamagedCheckpoint, HoldfastError
from holdfast.format import manifest as fmt
from holdfast.state.rng import require_rng
from holdfast.state.tree import decode, require_readable
from holdfast.store import Store
from holdfast.store.base import Pace
from holdfast.system.host_memory import available_bytes
from holdfast.units import format_bytes

DrillState = Literal["loads", "repairable", "damaged", "unreadable", "removed"]
"""`repairable`: it loads, after damage was repaired in memory from parity. `unreadable`: whether it loads is not
known, since the store or this host could not read it. `removed`: retention removed it meanwhile."""


class DrilledCheckpoint(msgspec.Struct, kw_only=True):
    """The outcome of a drill."""

    job: str
    checkpoint: str
    state: DrillState = "loads"
    ranks: int = 0
    """Number of ranks whose state was decoded."""
    tensors: int = 0
    """Number of tensors that were loaded."""
    read_bytes: int = 0
    seconds: float = 0.0
    reason: str | None = None

    @property
    def is_loadable(self) -> bool:
        return self.state in ("loads", "repairable")


def drill(
    store: Store,
    job: str,
    checkpoint: str,
    *,
    pace: Pace | None = None,
    progress: Callable[[int, int], None] = lambda done_bytes, total_bytes: None,
) -> DrilledCheckpoint:
    """Read every byte of a checkpoint from its storage device, verify it, and decode the state of every rank.

    The tensors that ranks share are loaded once, assembled from their shards as for a start on one process.

    Args:
        pace: called with a number of bytes before they are read, and may wait.
        progress: called with the bytes read so far and the total.
    """
    result = DrilledCheckpoint(job=job, checkpoint=checkpoint)
    started = time.monotonic()
    try:
        repaired = _load_all(store, result, pace, progress)
    except DamagedCheckpoint as error:
        is_listed = checkpoint in store.checkpoints(job)
        result.state, result.reason = "damaged" if is_listed else "removed", str(error)
    except (HoldfastError, OSError, MemoryError) as error:
        result.state, result.reason = "unreadable", str(error) or type(error).__name__
    else:
        if repaired:
            result.state, result.reason = "repairable", "; ".join(dict.fromkeys(repaired))
    result.seconds = time.monotonic() - started
    return result


def _load_all(
    store: Store, result: DrilledCheckpoint, pace: Pace | None, progress: Callable[[int, int], None]
) -> list[str]:
    """Load what each rank would load and decode its state. Return the damage that was repaired in memory."""
    job, checkpoint = result.job, result.checkpoint
    stored = read_stored(store, job, checkpoint)
    manifest = stored.manifest
    memory_bytes = sum(file.raw_bytes for file in manifest.files)
    if memory_bytes > (available := available_bytes()):
        raise MemoryError(
            f"it takes {format_bytes(memory_bytes)} of memory, and this host has {format_bytes(available)} "
            "available: run the drill on a host with more memory"
        )
    headers = [FileRange(file, [next(fmt.digest_ranges(manifest, file))]) for file in manifest.files]
    repaired = stored.damage + read_repairing(store, job, checkpoint, headers, keep=False, pace=pace)
    result.read_bytes = sum(file.size_bytes for file in manifest.files)
    shared: dict[str, torch.Tensor] = {}
    for rank, names in _tensors_of_ranks(manifest):
        loaded = restore.load(
            store, job, checkpoint,
            only=names, rank=rank, known=stored, from_disk=True, pace=pace, progress=progress,
        )  # fmt: skip
        repaired += loaded.repaired
        result.tensors += len(loaded.tensors)
        result.ranks = rank + 1
        if rank == 0:
            local = {tensor.name for tensor in manifest.tensors if tensor.rank is not None}
            shared = {name: tensor for name, tensor in loaded.tensors.items() if name not in local}
        _decode(loaded, shared | loaded.tensors)
    return repaired


def _tensors_of_ranks(manifest: fmt.Manifest) -> Iterator[tuple[int, set[str] | None]]:
    """Yield each rank with the names of the tensors to load for it: all for rank 0, its own for the others."""
    own: dict[int, set[str]] = {rank: set() for rank in range(manifest.world_size)}
    for tensor in manifest.tensors:
        if tensor.rank is not None:
            own[tensor.rank].add(tensor.name)
    yield 0, None
    yield from ((rank, own[rank]) for rank in range(1, manifest.world_size))


def _decode(loaded: LoadedCheckpoint, tensors: Mapping[str, torch.Tensor]) -> None:
    """Decode the state of a rank. DamagedCheckpoint: it cannot be decoded."""
    shapes = restore.shapes(loaded.manifest, loaded.rank)
    for keyword, tree in loaded.state.items():
        state = require_readable(keyword, tree, shapes)
        try:
            if keyword == "rng":
                require_rng(state)
            decode(tree, tensors, copy=False)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
            reason = f"state.{keyword} of rank {loaded.rank}: {type(error).__name__}: {error}"
            raise DamagedCheckpoint(fmt.MANIFEST, reason) from error
