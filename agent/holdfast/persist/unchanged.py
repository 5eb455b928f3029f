"""Find the tensors of a checkpoint that equal those of its parent, and the files of the parent that hold them.

Only files are shared: a link to a file of the parent keeps its bytes when retention deletes the parent. Does not
import torch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast.errors import HoldfastError
from holdfast.format import manifest as fmt
from holdfast.persist.task import MIN_LINKED_BYTES, Task
from holdfast.store import Store, read_manifest

logger = logging.getLogger("holdfast")

SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class LinkedFile:
    """A file of the parent that a checkpoint can link."""

    source: str
    """Name of the file in the parent."""
    file: fmt.File
    """The file in the new checkpoint, under a name that none of its own files has."""
    tensors: list[fmt.Tensor]
    """The tensors of the new checkpoint that it holds."""


@dataclass(frozen=True, slots=True)
class Unchanged:
    """What a rank need not write again."""

    names: set[str] = field(default_factory=set)
    """Tensors that equal those of the parent."""
    links: Sequence[LinkedFile] = ()
    """Files that hold most of them."""


def find_unchanged(store: Store, task: Task, tensors: Future[list[fmt.Tensor]]) -> Unchanged:
    """Compare the tensors of `task.unchanged` with the parent by digest; nothing is unchanged if that fails."""
    origin, parent = task.origin, task.origin.parent
    if parent is None or not (task.unchanged and origin.may_link):
        return Unchanged()
    try:
        manifest = fmt.decode_manifest(read_manifest(store, origin.job, parent))
        fmt.require_sound(manifest)
    except (HoldfastError, OSError) as error:
        logger.debug("checkpoint %s is written in full: %s", task.id, error)
        return Unchanged()
    # each rank links the files of the same rank: two ranks cannot add the same file
    own = {file.name: file for file in manifest.files if file.name.startswith(f"rank-{origin.rank}.")}
    before = {tensor.name: tensor for tensor in manifest.tensors if tensor.file in own}
    names, found = set[str](), dict[str, list[fmt.Tensor]]()
    for tensor in tensors.result():
        earlier = before.get(tensor.name) if tensor.name in task.unchanged else None
        if earlier is not None and _content(earlier) == _content(tensor):
            names.add(tensor.name)
            found.setdefault(earlier.file, []).append(earlier)
    links = [_linked(own[name], parent, kept) for name, kept in found.items() if _is_worth(own[name], kept)]
    return Unchanged(names, links)


def is_enough(tensors: Iterable[fmt.Tensor | fmt.TensorRange]) -> bool:
    """Return whether tensors are worth a file of their own."""
    return sum(tensor.end - tensor.start for tensor in tensors) >= MIN_LINKED_BYTES


def _is_worth(file: fmt.File, kept: Sequence[fmt.Tensor]) -> bool:
    """At least half of a linked file must be in use, so that checkpoints take at most twice their size."""
    return is_enough(kept) and 2 * sum(tensor.end - tensor.start for tensor in kept) >= file.size_bytes


def _content(tensor: fmt.Tensor) -> tuple[Any, ...]:
    places = tensor.shape, tensor.global_shape, tensor.offsets
    return tensor.digest, tensor.dtype, tensor.view, tensor.rank, *places


def _linked(file: fmt.File, parent: str, kept: Sequence[fmt.Tensor]) -> LinkedFile:
    name, writer = file.name, file.written_by
    if writer is None:
        name, writer = f"{name.removesuffix(SUFFIX)}.{parent}{SUFFIX}", parent
    tensors = [msgspec.structs.replace(tensor, file=name) for tensor in kept]
    return LinkedFile(file.name, msgspec.structs.replace(file, name=name, written_by=writer), tensors)
