"""What each rank announces at a start, and what follows from it: who holds whose snapshot. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from holdfast.protocol.ids import parse_checkpoint_id


class HeldPart(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's part of a snapshot, which a slot of a host holds."""

    number: int
    """Slot number."""
    digest: str
    """Digest of the completion marker, which has the digests of the tensors."""
    id: str
    """Checkpoint id."""
    uid: str
    """Uid of the attempt that took it."""
    folder: str
    """Folder in the store in which its ranks began it; each has another one."""
    rank: int
    world_size: int


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank runs, and what its host holds."""

    machine: str
    """Identifies the machine."""
    host: str
    """Its name."""
    supervisor: str | None
    """Folder of the supervisor; None without one that holds memory."""
    address: str = ""
    port: int = 0
    token: bytes = b""
    uid: str = ""
    """Uid of the attempt that begins, if this is rank 0."""
    published_uids: list[str] = []
    """Uids of all attempts that this supervisor knows."""
    parts: list[HeldPart] = []
    unusable: str | None = None
    """Why the rank cannot keep snapshots in memory."""


@dataclass(frozen=True, slots=True)
class PartSource:
    """A copy of a part: a slot of a host, and the first rank there, which other ranks read it from."""

    place: int
    """Rank."""
    number: int
    digest: str


@dataclass(frozen=True, slots=True)
class DistributedSnapshot:
    """A snapshot of which some host holds each part."""

    id: str
    uid: str
    folder: str
    sources: list[list[PartSource]] = field(default_factory=list)
    """The copies of each part, by rank of the part."""

    @property
    def position(self) -> tuple[int, int]:
        """(lineage, iteration), in which a later checkpoint compares greater."""
        return parse_checkpoint_id(self.id)[::-1]


def is_one_host(places: Sequence[RankPlace]) -> bool:
    return len({place.machine for place in places}) < 2


def unusable_reason(places: Sequence[RankPlace]) -> str | None:
    """Return why the ranks cannot keep snapshots in memory; None if they can."""
    for rank, place in enumerate(places):
        if place.unusable is not None:
            return f"snapshots will not survive a crash, because of rank {rank} on {place.host}: {place.unusable}"
    by_machine: dict[str, list[RankPlace]] = {}
    for place in places:
        by_machine.setdefault(place.machine, []).append(place)
    for here in by_machine.values():
        if len({place.supervisor for place in here}) > 1:
            return (
                f"snapshots will not survive a crash, because the {len(here)} ranks on {here[0].host} do not run "
                "under one supervisor"
            )
    return None


def replica_targets(places: Sequence[RankPlace]) -> list[int]:
    """Return, by rank, the rank on the next host that holds its snapshots; hosts follow their first rank."""
    by_machine: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        by_machine.setdefault(place.machine, []).append(rank)
    hosts = list(by_machine.values())
    targets = [0] * len(places)
    for number, ranks in enumerate(hosts):
        following = hosts[(number + 1) % len(hosts)]
        for index, rank in enumerate(ranks):
            targets[rank] = following[index % len(following)]
    return targets


def complete_snapshots(places: Sequence[RankPlace]) -> list[DistributedSnapshot]:
    """Return the snapshots of which each part is held somewhere, the newest lineage's latest iteration first."""
    held: dict[tuple[str, str, str, int], dict[int, list[PartSource]]] = {}
    seen: set[tuple[str, int]] = set()
    for rank, place in enumerate(places):
        for part in place.parts:
            if (place.machine, part.number) in seen:  # each rank of a host announces all slots there
                continue
            seen.add((place.machine, part.number))
            key = part.id, part.uid, part.folder, part.world_size
            source = PartSource(rank, part.number, part.digest)
            held.setdefault(key, {}).setdefault(part.rank, []).append(source)
    found = [
        DistributedSnapshot(checkpoint, uid, folder, [sources[rank] for rank in range(world_size)])
        for (checkpoint, uid, folder, world_size), sources in held.items()
        if sorted(sources) == list(range(world_size))
    ]
    return sorted(found, key=lambda each: each.position, reverse=True)
