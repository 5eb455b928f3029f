"""Which iterations lie on the way from a job's start to a lineage."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.protocol import parse_checkpoint_id

END = sys.maxsize


@dataclass(frozen=True, slots=True)
class Branch:
    """Where a lineage begins, and on which other one."""

    lineage: int
    iteration: int
    parent: str | None


class Ancestry:
    """The way to one lineage: each lineage on it, with its last iteration that belongs to the way."""

    def __init__(self, branches: Iterable[Branch], lineage: int) -> None:
        known = {branch.lineage: branch for branch in branches}
        self.upto: dict[int, int] = {}
        end = END
        while lineage not in self.upto:
            self.upto[lineage] = end
            branch = known.get(lineage)
            if branch is None or branch.parent is None:
                break
            lineage = parse_checkpoint_id(branch.parent)[1]
            end = min(end, branch.iteration)

    def __contains__(self, place: tuple[int, int]) -> bool:
        iteration, lineage = place
        return iteration <= self.upto.get(lineage, -1)

    def fork(self, other: Ancestry, limit: int) -> int:
        """The last iteration, up to `limit`, that both ways share; 0 when they share none."""
        shared = (min(end, other.upto.get(lineage, 0)) for lineage, end in self.upto.items())
        return min(limit, max(shared, default=0))
