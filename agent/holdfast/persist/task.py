"""What writing a checkpoint needs to know besides the bytes; it goes to another process as it is."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.format.manifest import Shard, TensorRange
from holdfast.format.shards import RankShard
from holdfast.protocol.messages import CheckpointKind
from holdfast.snapshot.checkpoint_run import CheckpointRun, Origin


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint to write."""

    origin: Origin
    id: str
    iteration: int
    lineage: int
    kind: CheckpointKind
    created_at: float
    slots: list[TensorRange]
    views: dict[str, str]
    shards: dict[str, Shard] = {}
    own: set[str] = set()
    """Names of tensors that may differ between ranks."""
    alike: dict[str, str] = {}
    """Values that ranks which know them must agree on, or their parts do not belong together."""
    state: dict[str, Any]
    timings: dict[str, float]
    fingerprint: dict[str, str] = {}
    """Where and how it was trained, as far as the bits of a result depend on it."""
    seal: str | None = None
    """The file that says what the memory holds, where that outlives its process; see `sealing`."""

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
            own=contents.own,
            alike=contents.alike,
            state=contents.trees,
            timings={"snapshot_seconds": run.copy.seconds, "stall_seconds": run.stall_seconds},
            fingerprint=dict(request.fingerprint),
            # a survivor is sealed: while ranks did so once more, one after the other, it would be in pieces
            seal=None if request.survived else contents.arena.seal,
        )


class Written(msgspec.Struct, frozen=True, kw_only=True, tag="written"):
    """A checkpoint is durable; or a rank's part of one, which counts once rank 0 has committed them all."""

    write_seconds: float
    """What writing the payload took."""
    tries: int = 1
    part: RankShard | None = None
