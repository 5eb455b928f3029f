"""Finds the files of the parent whose tensors did not change, so that they need not be written.

A tensor is unchanged if its bytes in this checkpoint have the digest (xxh3-128) that the manifest of the parent
has for it, and dtype, shape and place in the whole tensor are the same. The digest is computed from the copied
bytes that would be written otherwise, after the copy was checked to be of one instant. Version counters, and the
parameters that no optimizer trains, only choose the candidates: for others the write does not wait for digests. So
a tensor that changed without a new version, by a write through `.data`, a raw pointer or a CUDA graph, is written;
one that has a new version and the same bytes is written as well.

Only whole files are shared, and each checkpoint has its own hard link or copy of them: it does not depend on the
parent, which may be removed or repaired at any time. Does not import torch.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast.checkpoint.stored_manifest import read_stored
from holdfast.disabled import is_disabled
from holdfast.errors import HoldfastError
from holdfast.format import manifest as fmt
from holdfast.format.manifest import TensorRange
from holdfast.save.draft import Draft
from holdfast.store import Store

MIN_SHARED_BYTES = 1 << 20
"""Least number of unchanged bytes that are worth a file."""
MIN_SHARED_SHARE = 0.05
"""Smallest share of the state that is worth the wait: digests are compared before the write."""
logger = logging.getLogger("holdfast")


def worth_sharing(slots: Sequence[TensorRange], names: Collection[str]) -> set[str]:
    """Return those of `names` that are tensors of the state, if they are worth a file that others share."""
    if not names:
        return set()
    found = {slot.name: slot.end - slot.start for slot in slots if slot.name in names}
    return set(found) if is_worth_sharing(sum(found.values()), slots[-1].end) else set()


def is_worth_sharing(unchanged_bytes: int, size_bytes: int) -> bool:
    """Return whether this part of a state of `size_bytes` is worth a file that later checkpoints share."""
    return unchanged_bytes >= max(MIN_SHARED_BYTES, MIN_SHARED_SHARE * size_bytes)


@dataclass(frozen=True, slots=True)
class Reuse:
    """Tensors that a rank, or later checkpoints, need not write again."""

    files: Sequence[fmt.File] = ()
    """Files of the parent, all of whose tensors are unchanged."""
    tensors: Mapping[str, fmt.Tensor] = field(default_factory=dict)
    """The tensors in `files`, by name."""
    apart: Collection[str] = ()
    """Other tensors that are unchanged, or will be. In a file without other tensors they can be reused."""


def stem_of(rank: int, checkpoint: str | None = None) -> str:
    """Return the prefix of a rank's file names, or of files that `checkpoint` writes for later ones too.

    Later checkpoints use the same names.
    """
    return f"rank-{rank}" if checkpoint is None else f"rank-{rank}.{checkpoint}"


def find_unchanged(store: Store, draft: Draft, tensors: Future[list[fmt.Tensor]]) -> Reuse:
    """Compare the tensors of `draft.unchanged` with the parent by digest.

    Waits for `tensors` only if there are any. If the parent cannot be read, all is written, in two files.
    """
    if not draft.unchanged or is_disabled("links"):
        return Reuse()
    before = _parent(store, draft)
    if before is None:
        return Reuse(apart=draft.unchanged)
    now = {tensor.name: tensor for tensor in tensors.result() if tensor.name in draft.unchanged}
    # each rank reuses the files of the same rank: two ranks cannot add the same file
    held: dict[str, list[fmt.Tensor]] = {
        file.name: [] for file in before.files if file.name.startswith(f"rank-{draft.rank}.")
    }
    for tensor in before.tensors:
        if tensor.file in held:
            held[tensor.file].append(tensor)
    same: set[str] = set()
    files: list[fmt.File] = []
    reused: dict[str, fmt.Tensor] = {}
    for file in before.files:
        kept = held.get(file.name, ())
        equal = {
            each.name: each for each in kept if each.name in now and _content(each) == _content(now[each.name])
        }
        same.update(equal)
        if equal and len(equal) == len(kept) and _is_reusable(file, draft):
            files.append(msgspec.structs.replace(file, written_by=file.written_by or draft.parent))
            reused |= equal
    left = [tensor for name, tensor in now.items() if name in same and name not in reused]
    left_bytes = sum(tensor.end - tensor.start for tensor in left)
    return Reuse(files, reused, [each.name for each in left] if left_bytes >= MIN_SHARED_BYTES else ())


def _parent(store: Store, draft: Draft) -> fmt.Manifest | None:
    if draft.parent is None or not draft.may_link:
        return None
    try:
        return read_stored(store, draft.job, draft.parent, only=draft.rank).manifest
    except (HoldfastError, OSError) as error:
        logger.debug("checkpoint %s is written in full: %s", draft.id, error)
        return None


def _is_reusable(file: fmt.File, draft: Draft) -> bool:
    """Return whether the new checkpoint has no other file of this name, and would write the same content."""
    source, code = file.written_by or draft.parent, draft.parity
    if source == draft.id or not file.name.startswith(f"{stem_of(draft.rank, source)}."):
        return False
    if file.encoding is not None and file.keeps_positions:  # it is linked only with what is laid over it
        return False
    if (file.encoding and is_disabled("planes")) or (file.parity and is_disabled("parity")):
        return False
    return code is None or (file.parity is not None and file.parity.code == code)


def _content(tensor: fmt.Tensor) -> tuple[Any, ...]:
    places = tensor.shape, tensor.global_shape, tensor.offsets
    return tensor.digest, tensor.dtype, tensor.view, tensor.rank, *places
