"""Complete checkpoints in memory: the completion markers of all their ranks. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from holdfast.format import manifest as fmt
from holdfast.format.merged_ranks import merge_ranks
from holdfast.save.completion_marker import CompletionMarker, markers_of
from holdfast.save.draft import Draft, manifest_of
from holdfast.save.rank_votes import require_agreement


@dataclass(frozen=True, slots=True)
class CompleteSnapshot:
    """A checkpoint in memory that has a completion marker of every rank."""

    markers: tuple[CompletionMarker, ...]
    """Completion markers, by rank."""

    @property
    def draft(self) -> Draft:
        """The draft of rank 0."""
        return self.markers[0].draft

    @property
    def position(self) -> tuple[int, int]:
        """(lineage, iteration), in which a later checkpoint compares greater."""
        return self.draft.lineage, self.draft.iteration

    @property
    def numbers(self) -> list[int]:
        """Slot numbers, by rank."""
        return [marker.number for marker in self.markers]

    def manifest(self) -> fmt.Manifest:
        """Return the manifest that a commit would write. Raises NotPrepared and IncompleteParts."""
        drafts = [marker.draft for marker in self.markers]
        require_agreement({draft.rank: draft.must_match for draft in drafts})
        return manifest_of(self.draft, merge_ranks((draft.part for draft in drafts), self.draft.world_size))


def complete(markers: Iterable[CompletionMarker]) -> list[CompleteSnapshot]:
    """Group markers into complete snapshots, the newest lineage's latest iteration first.

    Parts of one checkpoint share the folder in which rank 0 began it: one attempt may try an iteration twice, and
    two attempts may both reach it. Markers of checkpoints that lack a rank are ignored. A supervisor may hold the
    same part twice: the rank's own, and the copy that it held for the rank while that ran on another host.
    """
    groups: dict[object, list[CompletionMarker]] = {}
    for marker in markers:
        draft = marker.draft
        alone = marker.number if draft.world_size == 1 else None
        key = draft.id, draft.uid, draft.attempt, draft.world_size, draft.folder, alone
        group = groups.setdefault(key, [])
        if all(other.draft != draft for other in group):
            group.append(marker)
    found = [
        CompleteSnapshot(tuple(sorted(group, key=lambda marker: marker.draft.rank)))
        for group in groups.values()
        if sorted(marker.draft.rank for marker in group) == list(range(group[0].draft.world_size))
    ]
    return sorted(found, key=lambda each: each.position, reverse=True)


def complete_snapshots_in(folder: Path, job: str) -> list[CompleteSnapshot]:
    """Return the complete snapshots of a job in a supervisor's slots, best first."""
    return complete(markers_of(folder, job))
