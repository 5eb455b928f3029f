"""What writing a checkpoint needs to know, but for the bytes themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.format import Shard, Slot
from holdfast.shards import Part

if TYPE_CHECKING:
    from holdfast.snapshot import Snapshot


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Who writes a checkpoint, and after which one."""

    job: str
    attempt: int
    uid: str = ""
    """Of the attempt, by which its own store knows it."""
    parent: str | None
    rank: int = 0
    world_size: int = 1
    place: str | None = None
    """Where in the store rank 0 has begun the checkpoint; None for one that this process writes alone."""
    versions: dict[str, str]
    replaces: bool = False
    """A checkpoint of the same name was found to be damaged."""
    bytes_per_second: float | None = None
    """Write no faster than this, so that training goes first."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint to write; it goes to another process as it is."""

    origin: Origin
    id: str
    iteration: int
    lineage: int
    kind: str
    created_at: float
    slots: list[Slot]
    views: dict[str, str]
    shards: dict[str, Shard] = {}
    own: set[str] = set()
    """Names of tensors that may be otherwise on other ranks."""
    alike: dict[str, str] = {}
    """What ranks that know it must say the same of, or their parts do not belong together."""
    state: dict[str, Any]
    timings: dict[str, float]
    fingerprint: dict[str, str] = {}
    """Where and how it was trained, as far as the bits of a result depend on it."""
    seal: str | None = None
    """The file that says what the memory holds, where that outlives its process; see `sealing`."""

    @classmethod
    def of(cls, snapshot: Snapshot, origin: Origin) -> Task:
        return cls(
            origin=origin,
            id=snapshot.id,
            iteration=snapshot.iteration,
            lineage=snapshot.lineage,
            kind=snapshot.kind,
            created_at=snapshot.started_at,
            slots=snapshot.slots,
            views=snapshot.views,
            shards=snapshot.shards,
            own=snapshot.own,
            alike=snapshot.alike,
            state=snapshot.trees,
            timings={"snapshot_seconds": snapshot.seconds, "stall_seconds": snapshot.stall_seconds},
            fingerprint=snapshot.fingerprint,
            # sealed it is already: while ranks did so once more, one after the other, it would be in pieces
            seal=None if snapshot.survived else snapshot.arena.seal,
        )


class Written(msgspec.Struct, frozen=True, kw_only=True, tag="written"):
    """A checkpoint is durable; or a rank's part of one, which counts once rank 0 has committed them all."""

    write_seconds: float
    """Of these, what writing the payload took."""
    tries: int = 1
    part: Part | None = None
