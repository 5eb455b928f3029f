"""What no policy may overstep: checkpoints become durable as fast as they start, and the budget is a ceiling.

Both come from Algorithm 1 of CheckFreq (Mohan, Phanishayee, Chidambaram, FAST'21, section 4.2), whose symbols
stand beside the fields of `Profile`; the measured cost of a checkpoint, once known, takes the place of the
predicted stall To. With N under way at the same time the next may start after an Nth of the time that one takes.
"""

from __future__ import annotations

import math

from .policy import ceil, known
from .profile import Profile, SnapshotMode


def predicted_stall(profile: Profile) -> tuple[SnapshotMode, float]:
    """Where to copy to first, and To, the stall that Algorithm 1 predicts for it."""
    over_cpu = max(0.0, profile.snapshot_seconds - (profile.iteration_seconds - profile.update_seconds))  # Toc
    over_gpu = profile.device_copy_seconds  # Tog
    fits = profile.memory_total_bytes - profile.memory_used_bytes > profile.checkpoint_bytes
    if fits and 0 <= over_gpu <= over_cpu:
        return "gpu", known(over_gpu)
    return "cpu", known(over_cpu)


def checkpoint_cost(profile: Profile) -> float:
    """What one checkpoint costs training: as measured, or else the predicted stall."""
    measured = profile.cost_seconds
    if measured is not None and math.isfinite(measured) and measured >= 0:
        return measured
    return predicted_stall(profile)[1]


def pipeline_interval(profile: Profile) -> int:
    """k = ((Tc + Ts) / N - To) / Ti, rounded up: never more than N are under way, 1 in Algorithm 1."""
    busy = (profile.snapshot_seconds + profile.persist_seconds) / max(1, profile.in_flight)
    busy -= checkpoint_cost(profile)
    return max(1, ceil(busy / profile.iteration_seconds)) if busy > 0 else 1


def budget_interval(profile: Profile, budget: float) -> int | None:
    """kmin = ceil(To / (p * Ti)); None where no interval, however long, is within the budget."""
    cost = checkpoint_cost(profile)
    if cost == 0:
        return 1
    allowed = budget * profile.iteration_seconds
    return max(1, ceil(cost / allowed)) if allowed > 0 else None


def lag_seconds(profile: Profile) -> float:
    """From the start of a checkpoint until it is durable; parts not known count nothing."""
    return known(profile.snapshot_seconds) + known(profile.persist_seconds)
