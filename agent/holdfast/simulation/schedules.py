"""Checkpoints at places laid down before the run: what is compared where all may take the same number of them."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable

from holdfast.pacing import History, Plan, Policy, Profile, Settings

from .curves import Curve

GRID = 4000


def planned(iterations: Iterable[int]) -> Policy:
    """A policy that takes its checkpoints after just these iterations, again after each restore."""
    places = sorted(set(iterations))

    def policy(profile: Profile, settings: Settings, history: History) -> Plan:
        after = bisect.bisect_right(places, history.iterations)
        interval = places[after] - history.iterations if after < len(places) else None
        return Plan(interval=interval, policy="planned", reason="at places laid down before the run")

    return policy


def uniform(total: int, segments: int) -> list[int]:
    """The ends of so many segments of equal length, the job's own end left out."""
    return _inner((total * place / segments for place in range(1, segments)), total)


def equal_loss(curve: Curve, total: int, segments: int) -> list[int]:
    """The ends of segments in each of which the loss comes down by as much: COCI's shape."""
    first, last = curve.loss_at(0), curve.loss_at(total)
    return _inner(
        (curve.iteration_of(first - (first - last) * place / segments) for place in range(1, segments)), total
    )


def square_root(curve: Curve, total: int, segments: int) -> list[int]:
    """Density in proportion to √(progress rate): the least progress lost for a given number of checkpoints.

    With a constant hazard λ and density n, about ∫ λ r / (2 n) is lost; for a given ∫ n that is least where n is
    in proportion to √(λ r).
    """

    def weight(first: float, last: float) -> float:
        return math.sqrt(max(0.0, curve.loss_at(first) - curve.loss_at(last)))

    return _by_density(weight, total, segments)


def _by_density(weight: Callable[[float, float], float], total: int, segments: int) -> list[int]:
    """`weight` of equal steps of the grid, summed up, cut into parts of equal weight."""
    ends = [total * step / GRID for step in range(GRID + 1)]
    sums = [0.0]
    for first, last in itertools.pairwise(ends):
        sums.append(sums[-1] + weight(first, last))
    places = []
    for place in range(1, segments):
        wanted = sums[-1] * place / segments
        after = bisect.bisect_left(sums, wanted)
        part = (wanted - sums[after - 1]) / (sums[after] - sums[after - 1])
        places.append(ends[after - 1] + part * (ends[after] - ends[after - 1]))
    return _inner(places, total)


def _inner(places: Iterable[float], total: int) -> list[int]:
    return sorted({round(place) for place in places if 0.5 <= place < total - 0.5})
