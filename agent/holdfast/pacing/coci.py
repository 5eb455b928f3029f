"""Convergence-aware placement: checkpoints dense where training learns fast, within the same write budget.

The question is that of H. Li, Z. Wang, H. Zhao et al., "Convergence-aware optimal checkpointing for exploratory
deep learning training jobs" (COCI), FGCS 164, 2025, 107597: a failure takes back progress, and early iterations
make more of it. With the hazard λ(t), the progress rate r(t) = -L'(t) and n(t) checkpoints per iteration, a
failure loses ∫ λ r / (2 n) on average.

Where a checkpoint costs training time, both terms scale with the value of that time, so that even spacing (Young,
`goodput`) is optimal for every loss. Where the price is a budget of its own, ∫ n = N checkpoints that the write
budget allows, the optimum is (Cauchy and Schwarz)

    n(t) = N √(λ r) / ∫ √(λ r).

COCI's own rule, equal steps of the loss (n ∝ r), loses as much as even spacing, to first order. Its λ grows with
the number of workers. Here the hazard ahead is that of the ranks that the job usually has: while it has more,
checkpoints are denser by the square root of the ratio of their hazards.

The price: a job that finishes repeats more iterations late, where checkpoints are far apart.
"""

from __future__ import annotations

import math
from dataclasses import replace

from holdfast.pacing.failures import FailureHistory, TrainingProgress
from holdfast.pacing.interval_cost import (
    Ceilings,
    forecast_within_ceilings,
    unsaved_interval,
    write_budget,
    write_interval,
    written_bytes,
)
from holdfast.pacing.planner import goodput
from holdfast.pacing.policy import IntervalPlan, Profile, has_iteration_time
from holdfast.pacing.settings import PacingSettings
from holdfast.units import MAX_SECONDS, duration, format_iterations, format_rate

DENSEST, SPARSEST = 4.0, 16.0
"""Limits of the density, as factors of even spacing: a curve fitted too early must not use up the budget, and the
end of a job must not go without checkpoints."""


def coci(profile: Profile, settings: PacingSettings, history: FailureHistory) -> IntervalPlan:
    """Choose the distance to the next checkpoint; `goodput` decides where the write budget does not bind.

    Without the number of iterations of the job, or without a falling loss, checkpoints are spaced evenly, which is
    what `goodput` does under a write budget that binds.
    """
    even = goodput(profile, settings, history)
    if even.interval is None or not has_iteration_time(profile):
        return even
    ceilings, progress, rate = Ceilings.of(profile, settings), history.progress, write_budget(profile, settings)
    if even.interval > ceilings.written or ceilings.written <= max(ceilings.overhead or 1, ceilings.pipeline):
        return _evenly(even, f"the write budget of {format_rate(rate)} does not bind")
    if progress is None or progress.total_iterations is None:
        return _evenly(even, "the number of iterations of the job is unknown: set total= or HOLDFAST_TOTAL")
    ahead = progress.total_iterations - progress.iteration
    if ahead <= 0:
        return _evenly(even, f"the job is past its total of {format_iterations(progress.total_iterations)}")
    if progress.curve is None or not progress.curve.is_falling:
        return _evenly(even, progress.why_no_curve or "the loss is not known")
    left = checkpoints_left(profile, settings, progress)
    spaced, accepted = write_interval(profile, settings), unsaved_interval(profile, settings)
    # the write budget comes before the wish for little unsaved work
    most = min(spaced * SPARSEST, accepted) if accepted >= spaced else spaced * SPARSEST
    density = math.sqrt(history.failures.relative_rate)
    wanted = next_interval(progress, left, most) / density
    between = spaced / DENSEST, max(most, ahead / left)
    ahead_in_words = _ahead(profile, progress, wanted, between)
    wanted = min(max(wanted, between[0]), between[1])
    reason = (
        f"for the least progress lost with a write budget of {format_rate(rate)}: {round(left):,} checkpoints for "
        f"the {format_iterations(ahead)} left, dense where the loss falls fast ({ahead_in_words})"
    )
    if round(density, 1) > 1:
        reason += f", {density:.1f} times as dense with {history.failures.world_size:,} ranks"
    # both limits are in the plan already, over the whole job
    limits = replace(settings, write_bytes_per_second=DENSEST * rate, max_unsaved_seconds=MAX_SECONDS)
    return forecast_within_ceilings(profile, limits, history, max(1, round(wanted)), policy="coci", reason=reason)


def checkpoints_left(profile: Profile, settings: PacingSettings, progress: TrainingProgress) -> float:
    """Return how many checkpoints the write budget of the whole job still allows, at least 1.

    A job that took more than planned, by request or because it was restored, keeps a share for the rest.
    """
    assert progress.total_iterations is not None
    total = progress.total_iterations
    allowed = write_budget(profile, settings) * total * profile.iteration_seconds / written_bytes(profile)
    return max(allowed - progress.checkpoints, allowed * (1 - progress.iteration / total) / SPARSEST, 1.0)


def next_interval(progress: TrainingProgress, left: float, longest: float) -> float:
    """Return the iterations until the next of `left` checkpoints, none further apart than `longest`.

    That is n(t) = max(c √r, 1/`longest`): from some iteration on the intervals are that long. Where `left` do not
    suffice for it, what is left is spaced evenly.
    """
    curve, here, end = progress.curve, progress.iteration, progress.total_iterations
    assert curve is not None
    assert end is not None

    def excess(until: float) -> float:
        """Checkpoints beyond `left` if intervals have grown to `longest` at `until`."""
        dense = curve.weight(here, until) / math.sqrt(max(curve.rate(until), 1e-300))
        return (dense + end - until) / longest - left

    if excess(here) >= 0:
        return (end - here) / left
    low, high = float(here), float(end)
    while high - low > 0.5 and excess(high) > 0:
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return curve.iterations_for(min(1.0, 1 / max(left - (end - high) / longest, 1.0)), here, high)


def _evenly(even: IntervalPlan, because: str) -> IntervalPlan:
    return replace(even, reason=f"goodput decides, as {because}: {even.reason}")


def _ahead(profile: Profile, progress: TrainingProgress, wanted: float, between: tuple[float, float]) -> str:
    """Describe the intervals that the plan leads to: now, after half of what is left, and at the end."""
    assert progress.curve is not None
    assert progress.total_iterations is not None
    here, end, rate = progress.iteration, progress.total_iterations, progress.curve.rate
    least, most = between
    said = []
    for name, at in ("now", here), ("half-way", (here + end) / 2), ("at the end", end):
        interval = min(max(wanted * math.sqrt(rate(here) / max(rate(at), 1e-300)), least), most)
        said.append(f"{duration(interval * profile.iteration_seconds)} {name}")
    return ", ".join(said)
