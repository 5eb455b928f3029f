"""The description of a checkpoint to write, without the bytes; it is kept in the completion marker as well."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.format.manifest import File, Shard, TensorRange
from holdfast.format.shards import RankShard
from holdfast.protocol.messages import CheckpointKind
from holdfast.protocol.retention import LoggedMetric
from holdfast.snapshot.checkpoint_run import CheckpointRun, RunOrigin, SnapshotContents


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
    def of(cls, run: CheckpointRun) -> Task:
        request, contents = run.request, run.contents
        assert contents is not None
        origin, spread = request.origin, request.over_seconds
        if spread > 0:
            origin = msgspec.structs.replace(origin, bytes_per_second=contents.size_bytes / spread)
        return cls(
            origin=origin,
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


MIN_SHARED_BYTES = 1 << 20
"""Fewer unchanged bytes are not worth a file."""
MIN_SHARED_SHARE = 0.05
"""A smaller share of the state is not worth the wait: digests are compared before the write."""


def _unchanged(run: CheckpointRun, contents: SnapshotContents) -> set[str]:
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
    not_linked: str | None = None
    """Why a file of the parent was written again; None if none was."""
