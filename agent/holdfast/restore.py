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


def chain(store: Store, job: str) -> list[str]:
    """The committed checkpoints that the current lineage descends from, its own first, newest first."""
    committed = store.checkpoints(job)
    lineages = {lineage.number: lineage for lineage in store.lineages(job)}
    number = max(lineages, default=max((parse_checkpoint_id(c)[1] for c in committed), default=0))
    limit, found = 10**12, []
    while number:
        for checkpoint in reversed(committed):
            iteration, lineage = parse_checkpoint_id(checkpoint)
            if lineage == number and iteration <= limit:
                found.append(checkpoint)
        parent = lineages[number].parent if number in lineages else None
        limit, before = parse_checkpoint_id(parent) if parent else (0, 0)
        number = before if before < number else 0  # a record that names a later lineage is none to follow
    return found


def candidates(store: Store, job: str) -> Iterator[tuple[str, bool]]:
    """(checkpoint, whether it continues the current lineage) that a restarted job may go on from, best first.

    Back along the current lineage and those it descends from; only when none of these is sound, what else
    there is, newest trained first: better an abandoned branch than to start from nothing.
    """
    descent = chain(store, job)
    yield from ((checkpoint, True) for checkpoint in descent)
    strays = (c for c in store.checkpoints(job) if c not in descent)
    for checkpoint in sorted(strays, key=lambda c: parse_checkpoint_id(c)[::-1], reverse=True):
        yield checkpoint, False


def find(store: Store, job: str, iteration: int) -> str:
    """The checkpoint at `iteration`: the one that training descends from, else of the newest lineage.

    Raises:
        NoSuchCheckpoint: there is none; it names the nearest earlier one, which is never used unasked.
    """
    known = [*chain(store, job), *reversed(store.checkpoints(job))]
    at = next((c for c in known if parse_checkpoint_id(c)[0] == iteration), None)
    if at is not None:
        return at
    earlier = [c for c in known if parse_checkpoint_id(c)[0] < iteration]
    nearest = max(earlier, key=lambda c: parse_checkpoint_id(c)[0], default=None)  # the first of equals
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
        _read(store, job, checkpoint, found, file)
    return found


def load(store: Store, job: str, checkpoint: str) -> Loaded:
    """Read and verify a checkpoint; nothing is returned of one that is not whole."""
    found = manifest(store, job, checkpoint)
    tensors: dict[str, torch.Tensor] = {}
    for file in found.files:
        data = _read(store, job, checkpoint, found, file)
        for tensor in fmt.tensors_of(found, file.name):
            tensors[tensor.name] = _view(tensor, data)
    return Loaded(checkpoint, found, tensors)


def _read(store: Store, job: str, checkpoint: str, manifest: fmt.Manifest, file: fmt.File) -> memoryview:
    with store.open_file(job, checkpoint, file.name) as opened:
        fmt.check_layout(manifest, file, opened.size_bytes)
        data = memoryview(bytearray(file.size_bytes))
        opened.read_into(0, data)
    for piece in fmt.pieces(manifest, file):
        fmt.check_piece(file, piece, data[piece.start : piece.end])
    return data


def _view(tensor: fmt.Tensor, data: memoryview) -> torch.Tensor:
    import torch

    from holdfast.dtypes import DTYPES

    dtype = DTYPES[tensor.dtype]
    if tensor.start == tensor.end:
        found = torch.empty(tensor.shape, dtype=dtype)
    else:
        flat = torch.frombuffer(data, dtype=torch.uint8)[tensor.start : tensor.end]
        found = flat.view(dtype).view(tensor.shape)
    if tensor.view is not None:
        found = torch.view_as_complex(found.clone())  # a clone, since the file aligns to elements only
    return found
