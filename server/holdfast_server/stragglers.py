"""Which ranks hold up the others, by their means over a window. Pure functions.

Ranks that train together finish every iteration together: a slow one shows by what it takes itself, before it
meets the others, and by how little it waits for them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

DEVIATIONS = 3.0
LEAST_SHARE = 0.05
"""A rank is slow that takes longer than the median by both: so many median deviations, and this share of it."""
OWN = "its own time: the iteration without the wait for other ranks"
WHOLE = "whole iterations; where ranks wait for each other, these are alike"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeans:
    """Of one rank, seconds an iteration."""

    rank: int
    iterations: int
    iteration_seconds: float
    longest_seconds: float
    stall_seconds: float
    data_seconds: float
    barrier_seconds: float | None

    @property
    def own_seconds(self) -> float:
        return max(0.0, self.iteration_seconds - (self.barrier_seconds or 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    measure: str
    median_seconds: float
    deviation_seconds: float
    slow: dict[int, str]
    """What most of the difference is, by rank."""
    waited_for: int | None
    waits_seconds: dict[int, float]
    """By rank, how much longer it stands at the barrier than the one that is waited for."""


def compare(ranks: Sequence[RankMeans]) -> Comparison:
    """Of at least one rank. The lower of two middles is the median, so that of two ranks the slower one shows."""
    measured = all(rank.barrier_seconds is not None for rank in ranks)
    times = {rank.rank: rank.own_seconds if measured else rank.iteration_seconds for rank in ranks}
    middle = median_low(times.values())
    deviation = median_low(abs(seconds - middle) for seconds in times.values())
    limit = middle + max(DEVIATIONS * deviation, LEAST_SHARE * middle)
    usual_data = median_low(rank.data_seconds for rank in ranks)
    usual_stall = median_low(rank.stall_seconds for rank in ranks)
    slow = {
        rank.rank: _cause(
            times[rank.rank] - middle, rank.data_seconds - usual_data, rank.stall_seconds - usual_stall
        )
        for rank in ranks
        if times[rank.rank] > limit
    }
    waited_for, waits = _waits(ranks) if measured and len(ranks) > 1 else (None, {})
    return Comparison(
        measure=OWN if measured else WHOLE,
        median_seconds=middle,
        deviation_seconds=deviation,
        slow=slow,
        waited_for=waited_for,
        waits_seconds=waits,
    )


def _cause(excess: float, data: float, stall: float) -> str:
    if data >= excess / 2:
        return "waiting for batches"
    return "waiting for its checkpoints" if stall >= excess / 2 else "its own work"


def _waits(ranks: Sequence[RankMeans]) -> tuple[int | None, dict[int, float]]:
    """The last to come waits for nobody: exchanging gradients takes all of them as long as it stands there."""
    barriers = {rank.rank: rank.barrier_seconds or 0.0 for rank in ranks}
    last = min(barriers, key=barriers.__getitem__)
    waits = {rank: seconds - barriers[last] for rank, seconds in barriers.items()}
    usual = median_low(rank.iteration_seconds for rank in ranks)
    noted = median_low(waits[rank] for rank in waits if rank != last) > LEAST_SHARE * usual
    return (last if noted else None), waits
