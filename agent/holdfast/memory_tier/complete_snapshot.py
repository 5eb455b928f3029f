"""Complete checkpoints in memory: the completion markers of all their ranks. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from holdfast.format import manifest as fmt
from holdfast.format.shards import merge_ranks
from holdfast.protocol.ids import parse_checkpoint_id
from holdfast.save.completion_marker import CompletionMarker, markers_of
from holdfast.save.reuse import Task
from holdfast.save.two_phase_commit import require_agreement
from holdfast.save.writer import manifest_of


@dataclass(frozen=True, slots=True)
class CompleteSnapshot:
    """A checkpoint in memory that has a completion marker of every rank."""

    markers: tuple[CompletionMarker, ...]
    """Completion markers, by rank."""

    @property
    def task(self) -> Task:
        """The task of rank 0."""
        return self.markers[0].task

    @property
    def position(self) -> tuple[int, int]:
        """(lineage, iteration), in which a later checkpoint compares greater."""
        iteration, lineage = parse_checkpoint_id(self.task.id)
        return lineage, iteration

    @property
    def numbers(self) -> list[int]:
        """Slot numbers, by rank."""
        return [marker.number for marker in self.markers]

    def manifest(self) -> fmt.Manifest:
        """Return the manifest that a commit would write. Raises NotPrepared and IncompleteParts."""
        require_agreement({marker.task.origin.rank: marker.task.must_match for marker in self.markers})
        parts = [marker.part for marker in self.markers]
        return manifest_of(self.task, merge_ranks(parts, self.task.origin.world_size), 0.0)


def complete(markers: Iterable[CompletionMarker]) -> list[CompleteSnapshot]:
    """Group markers into complete snapshots, the newest lineage's latest iteration first.

    Parts of one checkpoint share the folder in which rank 0 began it: one attempt may try an iteration twice, and
    two attempts may both reach it. Markers of checkpoints that lack a rank are ignored.
    """
    groups: dict[object, list[CompletionMarker]] = {}
    for marker in markers:
        origin = marker.task.origin
        alone = marker.number if origin.world_size == 1 else None
        key = marker.task.id, origin.uid, origin.attempt, origin.world_size, origin.folder, alone
        groups.setdefault(key, []).append(marker)
    found = [
        CompleteSnapshot(tuple(sorted(group, key=lambda marker: marker.task.origin.rank)))
        for group in groups.values()
        if sorted(marker.task.origin.rank for marker in group) == list(range(group[0].task.origin.world_size))
    ]
    return sorted(found, key=lambda each: each.position, reverse=True)


def complete_snapshots_in(folder: Path, job: str) -> list[CompleteSnapshot]:
    """Return the complete snapshots of a job in a supervisor's slots, best first."""
    return complete(markers_of(folder, job))
