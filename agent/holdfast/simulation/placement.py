"""Where `coci` places the checkpoints of a whole job, and what that gains and costs against even spacing."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from holdfast.pacing import FailureHistory, PacingSettings, Profile, find_policy
from holdfast.pacing.failures import TrainingProgress
from holdfast.pacing.loss_curve import LossCurve

ENDS = 0.25, 0.5, 0.75
WINDOW = 0.05
"""A job that ends at a share of its iterations ends within so much before or after it."""
MOMENTS = 4000
MOST_CHECKPOINTS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementComparison:
    """`coci` against even spacing with the same write budget. Ratios below 1 are in favor of `coci`."""

    reason: str
    """Of the first plan."""
    iterations: list[int]
    """After which iterations `coci` takes its checkpoints."""
    even_checkpoints: int
    lost_progress: float
    """Progress that a failure at any moment takes back."""
    ended_early: dict[float, float]
    """Progress lost where the job ends for good at this share of its iterations."""
    repeated_iterations: float
    """Iterations that a failure repeats, where the job finishes."""


def compare_placement(
    profile: Profile, settings: PacingSettings, history: FailureHistory, total: int, steepness: float
) -> PlacementComparison:
    """Compare for a loss that falls exponentially to exp(-`steepness`) of its start, above its floor.

    Raises:
        ValueError: the job has too many checkpoints to place one by one.
    """
    curve = LossCurve(floor=0.0, scale=1.0, decay=steepness / total)
    even, _ = placed(profile, settings, history, total, None)
    at, reason = placed(profile, settings, history, total, curve)

    def ratio(between: tuple[float, float]) -> float:
        before = lost_progress(even, curve, between)
        return lost_progress(at, curve, between) / before if before > 0 else 1.0

    return PlacementComparison(
        reason=reason,
        iterations=at,
        even_checkpoints=len(even),
        lost_progress=ratio((0, total)),
        ended_early={end: ratio(((end - WINDOW) * total, (end + WINDOW) * total)) for end in ENDS},
        repeated_iterations=repeated_iterations(at, total) / repeated_iterations(even, total),
    )


def placed(
    profile: Profile, settings: PacingSettings, history: FailureHistory, total: int, curve: LossCurve | None
) -> tuple[list[int], str]:
    """Return after which iterations `coci` takes its checkpoints while nothing fails, and its first reason."""
    policy, at, reason = find_policy("coci"), list[int](), ""
    while len(at) <= MOST_CHECKPOINTS:
        here = at[-1] if at else 0
        progress = TrainingProgress(iteration=here, total_iterations=total, checkpoints=len(at), curve=curve)
        made = policy(profile, settings, replace(history, progress=progress))
        reason = reason or made.reason
        if made.interval is None or here + made.interval >= total:
            return at, reason
        at.append(here + made.interval)
    raise ValueError(f"more than {MOST_CHECKPOINTS:,} checkpoints: give fewer iterations, or a lower write budget")


def lost_progress(at: Sequence[int], curve: LossCurve, between: tuple[float, float]) -> float:
    """Return the mean of what the loss has fallen since the newest checkpoint, over the moments in `between`."""
    first, last = between
    known = [0, *at]
    moments = (first + (n + 0.5) * (last - first) / MOMENTS for n in range(MOMENTS))
    return statistics.fmean(curve.left(known[bisect_right(known, t) - 1]) - curve.left(t) for t in moments)


def repeated_iterations(at: Sequence[int], total: int) -> float:
    """Return the mean of the iterations since the newest checkpoint."""
    return math.fsum((b - a) ** 2 / 2 for a, b in pairwise([0, *at, total])) / total
