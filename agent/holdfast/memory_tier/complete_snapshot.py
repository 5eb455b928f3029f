"""Complete checkpoints in memory: which completion markers form one, of one rank or of several. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from holdfast.format import manifest as fmt
from holdfast.format.shards import merge_ranks
from holdfast.persist.completion_marker import CompletionMarker, markers_of
from holdfast.persist.task import Task
from holdfast.persist.two_phase_commit import require_agreement
from holdfast.persist.writer import manifest_of
from holdfast.protocol.messages import parse_checkpoint_id


@dataclass(frozen=True, slots=True)
class CompleteSnapshot:
    """A checkpoint of which every rank of its job has sealed its part."""

    markers: tuple[CompletionMarker, ...]
    """By rank."""

    @property
    def task(self) -> Task:
        """Rank 0's."""
        return self.markers[0].task

    @property
    def place(self) -> tuple[int, int]:
        """Its lineage, and its iteration there."""
        iteration, lineage = parse_checkpoint_id(self.task.id)
        return lineage, iteration

    @property
    def numbers(self) -> list[int]:
        """Of the slots that it lies in, by rank."""
        return [marker.number for marker in self.markers]

    def manifest(self) -> fmt.Manifest:
        """As it would be committed.

        Raises:
            NotPrepared, IncompleteParts: the parts do not belong to one checkpoint.
        """
        require_agreement({marker.task.origin.rank: marker.task.alike for marker in self.markers})
        parts = [marker.part for marker in self.markers]
        return manifest_of(self.task, merge_ranks(parts, self.task.origin.world_size), 0.0)


def complete(markers: Iterable[CompletionMarker]) -> list[CompleteSnapshot]:
    """What these make, the newest lineage's latest iteration first; a rank's part by itself makes nothing.

    Parts of one checkpoint are told by where rank 0 began it in the store: an attempt may try the same iteration
    twice, and two attempts may both come to it.
    """
    groups: dict[object, list[CompletionMarker]] = {}
    for marker in markers:
        origin = marker.task.origin
        alone = marker.number if origin.world_size == 1 else None
        key = marker.task.id, origin.uid, origin.attempt, origin.world_size, origin.place, alone
        groups.setdefault(key, []).append(marker)
    found = [
        CompleteSnapshot(tuple(sorted(group, key=lambda marker: marker.task.origin.rank)))
        for group in groups.values()
        if sorted(marker.task.origin.rank for marker in group) == list(range(group[0].task.origin.world_size))
    ]
    return sorted(found, key=lambda each: each.place, reverse=True)


def complete_snapshots_in(folder: Path, job: str) -> list[CompleteSnapshot]:
    """The checkpoints of a job that lie in the slots of a supervisor, best first."""
    return complete(markers_of(folder, job))
