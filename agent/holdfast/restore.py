"""Choose a checkpoint, verify it, load it. Applying it to live objects is the session's, through `state`.

torch is imported by `load` alone: to choose and to verify, a machine without it will do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast import format as fmt
from holdfast.errors import DamagedCheckpoint, NoSuchCheckpoint
from holdfast.protocol import checkpoint_id, parse_checkpoint_id
from holdfast.store import Store

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Loaded:
    """A verified checkpoint in memory; its tensors are views into the files read."""

    id: str
    manifest: fmt.Manifest
    tensors: dict[str, torch.Tensor]

    @property
    def shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {name: (str(t.dtype), tuple(t.shape)) for name, t in self.tensors.items()}


def candidates(store: Store, job: str) -> Iterator[str]:
    """The checkpoints that a restarted job may go on from, best first.

    The newest of the current lineage, then back along it, then from the checkpoint it began at back along
    the lineage before: an abandoned branch is never picked up by itself.
    """
    committed = store.checkpoints(job)
    lineages = {lineage.number: lineage for lineage in store.lineages(job)}
    number = max(lineages, default=max((parse_checkpoint_id(c)[1] for c in committed), default=0))
    limit = 10**12
    while number:
        for checkpoint in reversed(committed):
            iteration, lineage = parse_checkpoint_id(checkpoint)
            if lineage == number and iteration <= limit:
                yield checkpoint
        parent = lineages[number].parent if number in lineages else None
        if parent is None:
            return
        limit, number = parse_checkpoint_id(parent)


def find(store: Store, job: str, iteration: int) -> str:
    """The checkpoint at `iteration`, of the newest lineage that has one.

    Raises:
        NoSuchCheckpoint: there is none; it names the nearest earlier one, which is never used unasked.
    """
    committed = store.checkpoints(job)
    at = [c for c in committed if parse_checkpoint_id(c)[0] == iteration]
    if at:
        return at[-1]
    nearest = next((c for c in reversed(committed) if parse_checkpoint_id(c)[0] < iteration), None)
    advice = (
        f"the nearest earlier one is at iteration {parse_checkpoint_id(nearest)[0]:,}"
        if nearest
        else "there is no earlier one either"
    )
    raise NoSuchCheckpoint(f"{job} has no checkpoint at iteration {iteration:,}; {advice}", nearest)


def manifest(store: Store, job: str, checkpoint: str) -> fmt.Manifest:
    """The manifest of a checkpoint; DamagedCheckpoint or UnknownFormat when it cannot be used."""
    found = fmt.decode_manifest(store.read_manifest(job, checkpoint), f"{checkpoint}/{fmt.MANIFEST}")
    if (found.job, checkpoint_id(found.iteration, found.lineage)) != (job, checkpoint):
        raise DamagedCheckpoint(
            f"{checkpoint}/{fmt.MANIFEST}",
            f"is that of {found.job}, iteration {found.iteration}, lineage {found.lineage}",
        )
    return found


def verify(store: Store, job: str, checkpoint: str) -> fmt.Manifest:
    """Read a checkpoint and compare every byte with its digests; DamagedCheckpoint names file and reason."""
    found = manifest(store, job, checkpoint)
    for file in found.files:
        fmt.check_file(found, file, store.read_file(job, checkpoint, file.name))
    return found


def load(store: Store, job: str, checkpoint: str) -> Loaded:
    """Read and verify a checkpoint; nothing is returned of one that is not whole."""
    found = manifest(store, job, checkpoint)
    tensors: dict[str, torch.Tensor] = {}
    for file in found.files:
        data = store.read_file(job, checkpoint, file.name)
        fmt.check_file(found, file, data)
        for tensor in fmt.tensors_of(found, file.name):
            tensors[tensor.name] = _view(tensor, data)
    return Loaded(checkpoint, found, tensors)


def _view(tensor: fmt.Tensor, data: memoryview) -> torch.Tensor:
    import torch

    from holdfast.snapshot import DTYPES

    dtype = DTYPES[tensor.dtype]
    if tensor.start == tensor.end:
        found = torch.empty(tensor.shape, dtype=dtype)
    else:
        flat = torch.frombuffer(data, dtype=torch.uint8)[tensor.start : tensor.end]
        found = flat.view(dtype).view(tensor.shape)
    if tensor.view is not None:
        found = torch.view_as_complex(found.clone())  # a clone, since the file aligns to elements only
    return found
