"""The description of a checkpoint to write, without the bytes; it is sent to helper processes."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.format.manifest import Shard, TensorRange
from holdfast.format.shards import RankShard
from holdfast.protocol.messages import CheckpointKind
from holdfast.protocol.retention import LoggedMetric
from holdfast.snapshot.checkpoint_run import CheckpointRun, RunOrigin


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
            state=contents.trees,
            timings={"snapshot_seconds": run.copy.seconds, "stall_seconds": run.stall_seconds},
            fingerprint=dict(request.fingerprint),
            metrics=dict(request.metrics()),
            # a survivor has a marker: while ranks rewrite theirs one by one, the set would be incomplete
            marker=None if request.survived else contents.arena.marker,
        )


class Written(msgspec.Struct, frozen=True, kw_only=True, tag="written"):
    """A durable checkpoint, or a rank's durable part of one."""

    write_seconds: float
    """Time to write the payload."""
    tries: int = 1
    part: RankShard | None = None
