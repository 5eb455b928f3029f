"""Checkpoints that lie in memory: which seals, of one rank or of several, make one together. Knows no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from holdfast.format import manifest as fmt
from holdfast.format.shards import together
from holdfast.persist.completion_marker import Seal, seals_of
from holdfast.persist.task import Task
from holdfast.persist.two_phase_commit import require_alike
from holdfast.persist.writer import manifest_of
from holdfast.protocol.messages import parse_checkpoint_id


@dataclass(frozen=True, slots=True)
class CompleteSnapshot:
    """A checkpoint of which every rank of its job has sealed its part."""

    seals: tuple[Seal, ...]
    """By rank."""

    @property
    def task(self) -> Task:
        """Rank 0's."""
        return self.seals[0].task

    @property
    def place(self) -> tuple[int, int]:
        """Its lineage, and its iteration there."""
        iteration, lineage = parse_checkpoint_id(self.task.id)
        return lineage, iteration

    @property
    def numbers(self) -> list[int]:
        """Of the slots that it lies in, by rank."""
        return [seal.number for seal in self.seals]

    def manifest(self) -> fmt.Manifest:
        """As it would be committed.

        Raises:
            NotPrepared, IncompleteParts: the parts do not belong together.
        """
        require_alike({seal.task.origin.rank: seal.task.alike for seal in self.seals})
        parts = [seal.part for seal in self.seals]
        return manifest_of(self.task, together(parts, self.task.origin.world_size), 0.0)


def complete(seals: Iterable[Seal]) -> list[CompleteSnapshot]:
    """What these make, the newest lineage's latest iteration first; a rank's part by itself makes nothing.

    Parts of one checkpoint are told by where rank 0 began it in the store: an attempt may try the same iteration
    twice, and two attempts may both come to it.
    """
    groups: dict[object, list[Seal]] = {}
    for seal in seals:
        origin = seal.task.origin
        alone = seal.number if origin.world_size == 1 else None
        key = seal.task.id, origin.uid, origin.attempt, origin.world_size, origin.place, alone
        groups.setdefault(key, []).append(seal)
    found = [
        CompleteSnapshot(tuple(sorted(group, key=lambda seal: seal.task.origin.rank)))
        for group in groups.values()
        if sorted(seal.task.origin.rank for seal in group) == list(range(group[0].task.origin.world_size))
    ]
    return sorted(found, key=lambda each: each.place, reverse=True)


def sealed_in(folder: Path, job: str) -> list[CompleteSnapshot]:
    """The checkpoints of a job that lie in the slots of a supervisor, best first."""
    return complete(seals_of(folder, job))
