"""CheckFreq's policy: as often as the pipeline allows and the budget permits.

Algorithm 1 of J. Mohan, A. Phanishayee, V. Chidambaram, "CheckFreq: Frequent, Fine-Grained DNN Checkpointing",
FAST'21, section 4.2, as printed there (the authors' released code ignores the budget when it chooses k). The
paper's symbols stand beside the fields of `Profile`. Two things are added: k is rounded up and at least 1, and
the measured cost of a checkpoint, once known, takes the place of the predicted stall To.
"""

from __future__ import annotations

import math

from .policy import History, ceil, duration, expect, percent, plural, usable_iteration
from .profile import Plan, Profile, SnapshotMode
from .settings import MAX_INTERVAL, Settings


def checkfreq(profile: Profile, settings: Settings, history: History) -> Plan:
    """The most frequent checkpoints that keep their cost within the budget."""
    if not usable_iteration(profile):
        return Plan(interval=None, reason="no checkpoints are planned: no iteration has been timed yet")
    mode, _ = predicted_stall(profile)
    cost = checkpoint_cost(profile)
    pipeline = pipeline_interval(profile)
    affordable = budget_interval(profile, settings.budget)
    if affordable is None:
        reason = (
            f"no checkpoints are planned: one costs {duration(cost)} and the budget is {percent(settings.budget)}"
        )
        return Plan(interval=None, mode=mode, cost_seconds=cost, reason=reason)
    interval = min(max(1, pipeline, affordable), MAX_INTERVAL)
    price = f"a checkpoint costs {duration(cost)} ({'predicted' if profile.cost_seconds is None else 'measured'})"
    share = f"{percent(cost / (interval * profile.iteration_seconds))} of {plural(interval)}"
    if affordable >= pipeline and affordable > 1:
        why = f"{price}, {share}: as often as the budget of {percent(settings.budget)} allows"
    elif pipeline > 1:
        busy = duration(profile.snapshot_seconds + profile.persist_seconds)
        why = f"a checkpoint takes {busy} to become durable and the next waits for it; {price}, {share}"
    else:
        why = f"{price}, {share}: every iteration is within the budget of {percent(settings.budget)}"
    return expect(profile, interval, mode=mode, policy="checkfreq", cost_seconds=cost, reason=why)


def predicted_stall(profile: Profile) -> tuple[SnapshotMode, float]:
    """Where to copy to first, and To, the stall that Algorithm 1 predicts for it."""
    over_cpu = max(0.0, profile.snapshot_seconds - (profile.iteration_seconds - profile.update_seconds))  # Toc
    over_gpu = profile.device_copy_seconds  # Tog
    fits = profile.memory_total_bytes - profile.memory_used_bytes > profile.checkpoint_bytes
    if fits and over_gpu <= over_cpu:
        return "gpu", over_gpu
    return "cpu", over_cpu if math.isfinite(over_cpu) else 0.0


def checkpoint_cost(profile: Profile) -> float:
    """What one checkpoint costs training: as measured, or else the predicted stall."""
    measured = profile.cost_seconds
    if measured is not None and math.isfinite(measured) and measured >= 0:
        return measured
    return predicted_stall(profile)[1]


def pipeline_interval(profile: Profile) -> int:
    """k = (Tc + Ts - To) / Ti, rounded up: a checkpoint is durable before the next one starts."""
    busy = profile.snapshot_seconds + profile.persist_seconds - checkpoint_cost(profile)
    return max(1, ceil(busy / profile.iteration_seconds)) if busy > 0 else 1


def budget_interval(profile: Profile, budget: float) -> int | None:
    """kmin = ceil(To / (p * Ti)); None where no interval, however long, is within the budget."""
    cost = checkpoint_cost(profile)
    if cost == 0:
        return 1
    allowed = budget * profile.iteration_seconds
    return max(1, ceil(cost / allowed)) if allowed > 0 else None
