"""What-if comparison of checkpoint intervals, for a running or a planned job.

An interval is judged by the effective training time ratio (ETTR, see `interval_cost`). Its price is the GPU-hours
per day by which it falls behind the best interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast.pacing.failures import FailureEstimate, FailureHistory
from holdfast.pacing.interval_cost import (
    achieved_interval,
    ceil,
    checkpoint_cost,
    effective_training_ratio,
    known,
    lag_seconds,
    mean_seconds,
    optimal_interval,
    pipeline_interval,
    unsaved_iterations,
    write_budget,
    write_interval,
    written_bytes,
)
from holdfast.pacing.planner import comparable_policies, plan
from holdfast.pacing.policy import Profile, estimate_failures, has_iteration_time
from holdfast.pacing.settings import MAX_BUDGET, MAX_INTERVAL, PacingSettings

POINTS = 60
"""Points of the curve, evenly spaced on a logarithmic scale."""
HOURS_A_DAY = 24
REACH = 16.0
"""Factor by which the curve extends at least to both sides of the optimum."""
FARTHEST = 2000.0
"""Factor by which it extends at most: the optimum must stay visible."""
LEAST_GAIN = 0.005
"""Smallest gain of ETTR for which a change of settings is advised."""
LEAST_SPAN = 0.01
"""Minimum range of the ETTR axis, so that a flat curve looks flat."""
_TIMES = [
    base * unit
    for unit, bases in (
        (1e-3, (1, 2, 5, 10, 20, 50, 100, 200, 500)),
        (1.0, (1, 2, 5, 10, 20, 30)),
        (60.0, (1, 2, 5, 10, 20, 30)),
        (3600.0, (1, 2, 5, 12)),
        (86400.0, (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)),
    )
    for base in bases
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    interval_seconds: float
    ettr: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalForecast:
    """The expected consequences of one interval; all `None` if no checkpoints are taken."""

    name: str
    """`optimum`, `in force`, or the name of a policy."""
    interval: int | None
    """Iterations between checkpoints; `None`: no checkpoints."""
    interval_seconds: float | None = None
    """Duration of `interval` iterations without checkpoints and rare long waits."""
    achieved_seconds: float | None = None
    """Time from one checkpoint to the next; longer than the interval if writing takes longer."""
    overhead: float | None = None
    ettr: float | None = None
    """Effective training time ratio."""
    unsaved_iterations: int | None = None
    unsaved_seconds: float | None = None
    """Maximum loss of one failure."""
    mean_lost_seconds: float | None = None
    """Mean loss of one failure."""
    mean_lost_gpu_hours: float | None = None
    """Mean loss of one failure on all GPUs."""
    survival_probability: float | None = None
    """Probability of no failure between two durable checkpoints."""
    wasted_gpus: float | None = None
    """Loss against the optimum, as a number of idle GPUs."""
    wasted_gpu_hours_per_day: float | None = None
    """Loss against the optimum: the price of this interval."""
    within_budget: bool | None = None
    decided_by: str = ""
    """The policy that decided, if `name` could not."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalComparison:
    """The curve of ETTR over the interval, the best interval, and others for comparison."""

    curve: tuple[CurvePoint, ...]
    best: IntervalForecast
    current: IntervalForecast | None
    """The interval in force; `None` without checkpoints."""
    neighbors: tuple[IntervalForecast, ...]
    """Half and twice the best interval, if these exist."""
    requested: tuple[IntervalForecast, ...]
    policies: tuple[IntervalForecast, ...]
    budget: float
    write_bytes_per_second: float
    """The write budget."""
    written_bytes: float
    """What one checkpoint sends to the store."""
    max_unsaved_seconds: float
    """Work that a failure may lose, as far as both budgets allow."""
    budget_seconds: float
    """Shortest interval within the budget."""
    shortest_seconds: float
    """Shortest interval at which a checkpoint is durable before the next one starts, within the write budget."""
    world_size: int
    iteration_seconds: float
    """Without checkpoints and rare long waits; what a failure loses counts both."""
    cost_seconds: float
    lag_seconds: float
    """Time from the snapshot until it is durable."""
    restart_seconds: float
    mtbf_seconds: float
    """Estimated mean time between failures of the whole job."""
    mtbf_low_seconds: float
    mtbf_high_seconds: float
    """Bounds of `mtbf_seconds` with a probability of 90 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A change of settings that gains training time."""

    policy: str
    budget: float | None
    """The budget that it needs, if that is more than the one in force."""
    interval: int
    """Iterations between checkpoints that would follow."""
    ettr: float
    gain: float
    """By how much the effective training time ratio exceeds that of the interval in force."""


def advise(comparison: IntervalComparison) -> Advice | None:
    """Return the change of policy or budget that gains most; `None` if none gains `LEAST_GAIN`."""
    current, best = comparison.current, comparison.best
    if current is None or current.ettr is None:
        return None
    choices = [
        Advice(
            policy=each.name, budget=None, interval=each.interval, ettr=each.ettr, gain=each.ettr - current.ettr
        )
        for each in comparison.policies
        if each.interval is not None and each.ettr is not None and not each.decided_by
    ]
    overhead = best.overhead or 0.0
    if best.interval is not None and best.ettr is not None and comparison.budget < overhead <= MAX_BUDGET:
        budget = math.ceil(overhead * 1000) / 1000
        gain = best.ettr - current.ettr
        choices.append(Advice(policy="goodput", budget=budget, interval=best.interval, ettr=best.ettr, gain=gain))
    # the first of equals: a budget is raised only where no policy gains as much within the present one
    worth = max(choices, key=lambda each: round(each.gain, 4), default=None)
    return worth if worth is not None and worth.gain >= LEAST_GAIN else None


def compare_intervals(
    profile: Profile,
    settings: PacingSettings,
    history: FailureHistory = FailureHistory(),  # noqa: B008
    *,
    current: int | None = None,
    requested: Sequence[int] = (),
) -> IntervalComparison:
    """Compare all intervals for a job.

    Args:
        profile: measured, or computed from sizes and bandwidths.
        settings: the budget; every policy is compared, whichever is set.
        history: failure rate and restart time.

    Raises:
        ValueError: the profile has no iteration time.
    """
    if not has_iteration_time(profile):
        raise ValueError("the iteration time is unknown, and a plan needs it")
    forecaster = _Forecaster(profile, settings, history)
    optimum = forecaster.optimum
    low, high = forecaster.failures.credible_interval()
    comparison = IntervalComparison(
        curve=(),
        best=forecaster.forecast("optimum", optimum),
        current=None if current is None else forecaster.forecast("in force", current),
        neighbors=tuple(
            forecaster.forecast(name, interval)
            for name, interval in (
                ("half the optimum", optimum // 2),
                ("twice the optimum", optimum * 2),
            )
            if 1 <= interval <= MAX_INTERVAL
        ),
        requested=tuple(forecaster.forecast(f"every {each:,}", each) for each in requested),
        policies=tuple(forecaster.forecast_policy(name) for name in comparable_policies()),
        budget=settings.budget,
        write_bytes_per_second=write_budget(profile, settings),
        written_bytes=written_bytes(profile),
        max_unsaved_seconds=settings.max_unsaved_seconds,
        budget_seconds=forecaster.cost_seconds / settings.budget,
        shortest_seconds=forecaster.shortest * profile.iteration_seconds,
        world_size=forecaster.failures.world_size,
        iteration_seconds=profile.iteration_seconds,
        cost_seconds=forecaster.cost_seconds,
        lag_seconds=forecaster.lag_seconds,
        restart_seconds=forecaster.restart_seconds,
        mtbf_seconds=1 / forecaster.rate,
        mtbf_low_seconds=1 / high,
        mtbf_high_seconds=1 / low,
    )
    return replace(comparison, curve=_curve(forecaster, comparison))


def at_world_size(failures: FailureEstimate, world_size: int) -> FailureEstimate:
    """Return the estimate for another number of GPUs: observed time is scaled by the prior MTBF."""
    there = replace(failures, world_size=world_size)
    return replace(
        there, exposure_seconds=failures.exposure_seconds * there.prior_seconds / failures.prior_seconds
    )


class _Forecaster:
    """Computes the forecasts of intervals for one job."""

    def __init__(self, profile: Profile, settings: PacingSettings, history: FailureHistory) -> None:
        self.profile, self.settings, self.history = profile, settings, history
        self.failures = estimate_failures(settings, history)
        self.rate = self.failures.rate
        self.restart_seconds = known(history.restart_seconds)
        self.cost_seconds = checkpoint_cost(profile)
        self.lag_seconds = lag_seconds(profile)
        self.shortest = min(max(pipeline_interval(profile), write_interval(profile, settings)), MAX_INTERVAL)
        self.optimum = optimal_interval(profile, self.rate, shortest=self.shortest)

    def ettr(self, interval_seconds: float) -> float:
        return effective_training_ratio(
            interval_seconds,
            rate=self.rate,
            cost_seconds=self.cost_seconds,
            lag_seconds=self.lag_seconds,
            restart_seconds=self.restart_seconds,
        )

    def forecast_policy(self, name: str) -> IntervalForecast:
        """Forecast the interval that a policy chooses."""
        every = self.settings.every if name == "fixed" else None
        chosen = plan(self.profile, replace(self.settings, policy=name, every=every, paused=False), self.history)
        decided_by = "" if chosen.policy == name else chosen.policy
        return self.forecast(name, chosen.interval, decided_by=decided_by, reason=chosen.reason)

    def forecast(
        self, name: str, interval: int | None, *, decided_by: str = "", reason: str = ""
    ) -> IntervalForecast:
        if interval is None:
            return IntervalForecast(name=name, interval=None, decided_by=decided_by, reason=reason)
        seconds, gpus = self.profile.iteration_seconds, self.failures.world_size
        achieved = achieved_interval(self.profile, interval)
        overhead = self.cost_seconds / (achieved * seconds)
        ettr = self.ettr(achieved * seconds)
        lag = ceil(self.lag_seconds / seconds)
        real_seconds = mean_seconds(self.profile, overhead)
        unsaved = unsaved_iterations(self.profile, interval)
        behind = max(0.0, self.ettr(self.optimum * seconds) - ettr)
        return IntervalForecast(
            name=name,
            interval=interval,
            interval_seconds=interval * seconds,
            achieved_seconds=achieved * seconds,
            overhead=overhead,
            ettr=ettr,
            unsaved_iterations=unsaved,
            unsaved_seconds=unsaved * real_seconds,
            mean_lost_seconds=(achieved / 2 + lag) * real_seconds,
            mean_lost_gpu_hours=(achieved / 2 + lag) * real_seconds * gpus / 3600,
            survival_probability=self.failures.survival_probability(achieved * real_seconds),
            wasted_gpus=behind * gpus,
            wasted_gpu_hours_per_day=behind * gpus * HOURS_A_DAY,
            within_budget=overhead <= self.settings.budget * (1 + 1e-9),
            decided_by=decided_by,
            reason=reason,
        )


def _curve(forecaster: _Forecaster, comparison: IntervalComparison) -> tuple[CurvePoint, ...]:
    """Return the curve over all marked intervals, from the shortest possible one."""
    center = comparison.best.achieved_seconds or forecaster.profile.iteration_seconds
    held = (comparison.current, *comparison.requested, *comparison.policies)
    marks = [each.achieved_seconds for each in held if each is not None and each.achieved_seconds is not None]
    marks += [comparison.budget_seconds] if comparison.budget_seconds > 0 else []
    low = max(min(center / REACH, *(mark / 2 for mark in marks)), comparison.shortest_seconds, center / FARTHEST)
    high = min(max(center * REACH, *(mark * 2 for mark in marks)), center * FARTHEST)
    step = (high / low) ** (1 / (POINTS - 1))
    return tuple(
        CurvePoint(interval_seconds=at, ettr=forecaster.ettr(at)) for at in (low * step**n for n in range(POINTS))
    )


class PlotGeometry:
    """Maps the curve to a plot, as fractions from the left and from the bottom, for terminal and page."""

    def __init__(self, comparison: IntervalComparison) -> None:
        self.low, self.high = comparison.curve[0].interval_seconds, comparison.curve[-1].interval_seconds
        best = comparison.best.ettr or 0.0
        held = (comparison.current, *comparison.neighbors, *comparison.requested, *comparison.policies)
        worst = min((each.ettr for each in held if each is not None and each.ettr is not None), default=best)
        span = max((best - worst) * 1.3, LEAST_SPAN)
        self.top = min(1.0, best + span / 12)
        self.bottom = max(0.0, best - span)

    def x(self, seconds: float) -> float:
        """Return the position on the logarithmic axis, limited to the plot."""
        if seconds <= self.low:
            return 0.0
        return min(1.0, math.log(seconds / self.low) / math.log(self.high / self.low))

    def y(self, ettr: float) -> float:
        """Return the position on the ETTR axis; below 0 outside the plot."""
        return (ettr - self.bottom) / (self.top - self.bottom)

    def times(self, most: int) -> list[float]:
        """Return at most `most` round times within the plot, about evenly spaced."""
        inside = [time for time in _TIMES if self.low <= time <= self.high]
        if len(inside) <= most:
            return inside
        places = [self.low * (self.high / self.low) ** ((n + 0.5) / most) for n in range(most)]
        return sorted({min(inside, key=lambda time: abs(math.log(time / place))) for place in places})

    def shares(self, most: int) -> list[float]:
        """Return at most `most` round ETTR values within the plot."""
        span = self.top - self.bottom
        step = next(
            base * 10.0**power
            for power in range(-6, 1)
            for base in (1, 2, 5)
            if span / (base * 10.0**power) <= most
        )
        first = math.ceil(self.bottom / step - 1e-9)
        return [round(n * step, 9) for n in range(first, math.floor(self.top / step + 1e-9) + 1)]
