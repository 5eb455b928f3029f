"""The description of a checkpoint to write, without the bytes; it is kept in the completion marker as well.

Also finds the files of the parent whose tensors did not change, so that they need not be written. A tensor is
unchanged if its bytes in this checkpoint have the digest (xxh3-128) that the manifest of the parent has for it,
and dtype, shape and place in the whole tensor are the same. The digest is computed from the copied bytes that
would be written otherwise, after the copy was checked to be of one instant. Version counters, and the parameters
that no optimizer trains, only choose the candidates: for others the write does not wait for digests. So a tensor
that changed without a new version, by a write through `.data`, a raw pointer or a CUDA graph, is written; one
that has a new version and the same bytes is written as well.

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

from holdfast.errors import HoldfastError
from holdfast.format import manifest as fmt
from holdfast.format import soundness
from holdfast.format.manifest import File, Shard, TensorRange
from holdfast.format.shards import RankShard
from holdfast.protocol.messages import CheckpointKind
from holdfast.retention import LoggedMetric
from holdfast.save.run import Run, RunOrigin, SnapshotContents
from holdfast.store import Store, read_manifest

MIN_SHARED_BYTES = 1 << 20
"""Fewer unchanged bytes are not worth a file."""
MIN_SHARED_SHARE = 0.05
"""A smaller share of the state is not worth the wait: digests are compared before the write."""
logger = logging.getLogger("holdfast")


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint to write."""

    origin: RunOrigin
    id: str
    iteration: int
    lineage: int
    kind: CheckpointKind
    created_at: float
    slots: list[TensorRange]
    views: dict[str, str]
    shards: dict[str, Shard] = {}
    rank_local: set[str] = set()
    """Names of tensors that may differ between ranks."""
    must_match: dict[str, str] = {}
    """Values that must be equal on all ranks that report the same key; otherwise the commit fails."""
    unchanged: set[str] = set()
    """Names of tensors that probably equal those of the parent. The writer compares their digests."""
    state: dict[str, Any]
    timings: dict[str, float]
    fingerprint: dict[str, str] = {}
    """Environment on which bitwise results depend."""
    metrics: dict[str, LoggedMetric] = {}
    """Newest value of each metric."""
    marker: str | None = None
    """Path of the completion marker; None if the memory does not outlive the process."""

    @classmethod
    def of(cls, run: Run) -> Task:
        request, contents = run.request, run.contents
        assert contents is not None
        return cls(
            origin=request.origin,
            id=run.id,
            iteration=request.iteration,
            lineage=request.lineage,
            kind=request.kind,
            created_at=request.started_at,
            slots=contents.slots,
            views=contents.views,
            shards=contents.shards,
            rank_local=contents.rank_local,
            must_match=contents.must_match,
            unchanged=_unchanged(run, contents),
            state=contents.trees,
            timings={"snapshot_seconds": run.copy.seconds, "stall_seconds": run.stall_seconds},
            fingerprint=dict(request.fingerprint),
            metrics=dict(request.metrics()),
            # a survivor has a marker: while ranks rewrite theirs one by one, the set would be incomplete
            marker=None if request.survived else contents.arena.marker,
        )


def _unchanged(run: Run, contents: SnapshotContents) -> set[str]:
    """Return the tensors whose version counter is that of the parent, or the frozen ones if that is unknown."""
    before = contents.parent_versions
    if before is None:
        names = contents.frozen
    else:
        names = {name for name, version in run.copy.versions.items() if before.get(name) == version}
    if not names:
        return set()
    found = {slot.name: slot.end - slot.start for slot in contents.slots if slot.name in names}
    return set(found) if is_worth_sharing(sum(found.values()), contents.size_bytes) else set()


def is_worth_sharing(unchanged_bytes: int, size_bytes: int) -> bool:
    """Return whether so much of a state of `size_bytes` is worth a file that later checkpoints share."""
    return unchanged_bytes >= max(MIN_SHARED_BYTES, MIN_SHARED_SHARE * size_bytes)


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """A durable checkpoint, or a rank's durable part of one."""

    write_seconds: float
    """Time to write the payload."""
    tries: int = 1
    part: RankShard | None = None
    files: list[File] = []
    """All files of the rank, linked ones included."""
    encode_seconds: float = 0.0
    """Time to encode its files."""
    not_linked: str | None = None
    """Why a file of the parent was written again; None if none was."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """What a rank need not write again, or later checkpoints need not."""

    files: Sequence[fmt.File] = ()
    """Files of the parent, all of whose tensors are unchanged."""
    tensors: Mapping[str, fmt.Tensor] = field(default_factory=dict)
    """The tensors in `files`, by name."""
    apart: Collection[str] = ()
    """Other tensors that are unchanged, or will be. In a file without other tensors they can be reused."""


def stem_of(rank: int, checkpoint: str | None = None) -> str:
    """Return how the names of a rank's files begin, or of those that `checkpoint` writes for later ones as well.

    There they have the same names.
    """
    return f"rank-{rank}" if checkpoint is None else f"rank-{rank}.{checkpoint}"


def find_unchanged(store: Store, task: Task, tensors: Future[list[fmt.Tensor]]) -> Reuse:
    """Compare the tensors of `task.unchanged` with the parent by digest.

    Waits for `tensors` only if there are any. If the parent cannot be read, all is written, in two files.
    """
    if not task.unchanged:
        return Reuse()
    before = _parent(store, task)
    if before is None:
        return Reuse(apart=task.unchanged)
    origin = task.origin
    now = {tensor.name: tensor for tensor in tensors.result() if tensor.name in task.unchanged}
    # each rank reuses the files of the same rank: two ranks cannot add the same file
    held: dict[str, list[fmt.Tensor]] = {
        file.name: [] for file in before.files if file.name.startswith(f"rank-{origin.rank}.")
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
        if equal and len(equal) == len(kept) and _is_reusable(file, task):
            files.append(msgspec.structs.replace(file, written_by=file.written_by or origin.parent))
            reused |= equal
    left = [tensor for name, tensor in now.items() if name in same and name not in reused]
    left_bytes = sum(tensor.end - tensor.start for tensor in left)
    return Reuse(files, reused, [each.name for each in left] if left_bytes >= MIN_SHARED_BYTES else ())


def _parent(store: Store, task: Task) -> fmt.Manifest | None:
    origin = task.origin
    if origin.parent is None or not origin.may_link:
        return None
    try:
        manifest = fmt.decode_manifest(read_manifest(store, origin.job, origin.parent))
        soundness.require_sound(manifest)
    except (HoldfastError, OSError) as error:
        logger.debug("checkpoint %s is written in full: %s", task.id, error)
        return None
    return manifest


def _is_reusable(file: fmt.File, task: Task) -> bool:
    """Return whether the file has a name that no file of the new checkpoint has, and the parity that it needs."""
    origin, code = task.origin, task.origin.parity
    source = file.written_by or origin.parent
    if source == task.id or not file.name.startswith(f"{stem_of(origin.rank, source)}."):
        return False
    return code is None or (file.parity is not None and file.parity.code == code)


def _content(tensor: fmt.Tensor) -> tuple[Any, ...]:
    places = tensor.shape, tensor.global_shape, tensor.offsets
    return tensor.digest, tensor.dtype, tensor.view, tensor.rank, *places
