"""The cost of an interval: overhead, unsaved work, and the effective training time ratio (ETTR).

Three bounds hold for every policy but `fixed` (see `Ceilings`): checkpoints start no faster than they become
durable, and the overhead budget and the write budget are ceilings. The first two are from Algorithm 1 of CheckFreq
(Mohan, Phanishayee, Chidambaram, FAST'21, section 4.2), whose symbols are given with the fields of `Profile`. The
measured cost of a checkpoint, once known, replaces the predicted stall To. With N in flight, the next checkpoint
may start after an Nth of the time that one takes.

ETTR, the share of time that is spent on progress which no failure undoes, follows from a renewal process. Failures
are a Poisson process. A cycle is W useful seconds and the cost δ of one checkpoint. A failure loses the progress
of the cycle and what is not durable yet (lag L), and costs a restart R:

    ETTR(W) = W / ((1/λ + R + L) (exp(λ (W + δ)) - 1))

This is exact for L = 0, and to first order in λL otherwise. J. W. Young, "A first order approximation to the
optimum checkpoint interval", CACM 17(9), 1974, and J. T. Daly, "A higher order estimate of the optimum checkpoint
interval for restart dumps", FGCS 22(3), 2006, approximate its optimum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from holdfast.pacing.failures import FailureHistory
from holdfast.pacing.policy import (
    IntervalPlan,
    Profile,
    SnapshotMode,
    estimate_failures,
    has_iteration_time,
)
from holdfast.pacing.settings import DAY, LEAST_WRITE_BUDGET, MAX_INTERVAL, STATES_A_DAY, PacingSettings
from holdfast.units import duration, format_iterations, format_rate, percent

TINY = 1e-6
"""λδ below which two terms of the expansion of the optimum are exact to 1e-6."""


def predicted_stall(profile: Profile) -> tuple[SnapshotMode, float]:
    """Return where to copy to first, and To, the stall that Algorithm 1 of CheckFreq predicts."""
    over_cpu = max(0.0, profile.snapshot_seconds - (profile.iteration_seconds - profile.update_seconds))  # Toc
    over_gpu = profile.device_copy_seconds  # Tog
    fits = profile.memory_total_bytes - profile.memory_used_bytes > profile.checkpoint_bytes
    if fits and 0 <= over_gpu <= over_cpu:
        return "gpu", known(over_gpu)
    return "cpu", known(over_cpu)


def checkpoint_cost(profile: Profile) -> float:
    """Return the training time that one checkpoint costs: measured, or else the predicted stall."""
    measured = profile.cost_seconds
    if measured is not None and math.isfinite(measured) and measured >= 0:
        return measured
    return predicted_stall(profile)[1]


def lag_seconds(profile: Profile) -> float:
    """Return the time from the start of a checkpoint until it is durable; unknown parts count 0."""
    return known(profile.snapshot_seconds) + known(profile.persist_seconds)


def pipeline_interval(profile: Profile) -> int:
    """Return the shortest interval with at most N in flight: ((Tc + Ts) / N - To) / Ti, rounded up.

    CheckFreq, Algorithm 1, with N = 1.
    """
    busy = (profile.snapshot_seconds + profile.persist_seconds) / max(1, profile.in_flight)
    busy -= checkpoint_cost(profile)
    return max(1, ceil(busy / profile.iteration_seconds)) if busy > 0 else 1


def budget_interval(profile: Profile, budget: float) -> int | None:
    """Return the shortest interval within the budget p, ceil(To / (p Ti)) (CheckFreq); `None` if there is none."""
    cost = checkpoint_cost(profile)
    if cost == 0:
        return 1
    allowed = budget * profile.iteration_seconds
    return max(1, ceil(cost / allowed)) if allowed > 0 else None


def state_bytes(profile: Profile) -> float:
    """Return the size of a checkpoint of all ranks."""
    return known(profile.checkpoint_bytes if profile.state_bytes is None else profile.state_bytes)


def written_bytes(profile: Profile) -> float:
    """Return what one checkpoint sends to the store: measured, else its size."""
    return state_bytes(profile) if profile.written_bytes is None else known(profile.written_bytes)


def write_budget(profile: Profile, settings: PacingSettings) -> float:
    """Return the bytes per second that may be sent to the store: the setting, else its default for this state."""
    if settings.write_bytes_per_second is not None and known(settings.write_bytes_per_second) > 0:
        return settings.write_bytes_per_second
    return max(LEAST_WRITE_BUDGET, STATES_A_DAY * state_bytes(profile) / DAY)


def write_interval(profile: Profile, settings: PacingSettings) -> int:
    """Return the shortest interval within the write budget."""
    return max(1, ceil(written_bytes(profile) / write_budget(profile, settings) / profile.iteration_seconds))


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The shortest interval that each bound allows, in iterations."""

    overhead: int | None
    """`None`: no interval is within the overhead budget."""
    written: int
    pipeline: int

    @classmethod
    def of(cls, profile: Profile, settings: PacingSettings) -> Ceilings:
        return cls(
            overhead=budget_interval(profile, settings.budget),
            written=write_interval(profile, settings),
            pipeline=pipeline_interval(profile),
        )

    @property
    def shortest(self) -> int:
        return max(self.overhead or 1, self.written, self.pipeline)

    @property
    def binding(self) -> Literal["overhead", "written", "pipeline"]:
        """The bound that `shortest` is from."""
        if self.shortest == self.overhead:
            return "overhead"
        return "written" if self.shortest == self.written else "pipeline"

    def explain(self, profile: Profile, settings: PacingSettings) -> str:
        """Describe the bound that decides."""
        every = format_iterations(self.shortest)
        match self.binding:
            case "overhead":
                return f"the budget of {percent(settings.budget)} allows one every {every} at most"
            case "written":
                rate = format_rate(write_budget(profile, settings))
                return f"the write budget of {rate} allows one every {every} at most"
            case "pipeline":
                lag = duration(lag_seconds(profile))
                return f"one takes {lag} to become durable and the next waits for it: every {every}"


Limit = Literal["overhead", "written", "pipeline", "unsaved"]
"""What decides an interval: the budget, the write budget, the time until durable, the accepted unsaved work."""
SAME_INTERVAL = 0.1
"""Relative difference up to which an interval counts as one that a limit decides."""


def binding_limit(profile: Profile, settings: PacingSettings, interval: int) -> Limit | None:
    """Return the limit that decides an interval of a policy; `None` where the policy is free."""
    if not has_iteration_time(profile):
        return None
    ceilings = Ceilings.of(profile, settings)
    if interval <= ceilings.shortest * (1 + SAME_INTERVAL) and ceilings.shortest > 1:
        return ceilings.binding
    accepted = unsaved_interval(profile, settings)
    return "unsaved" if interval >= accepted * (1 - SAME_INTERVAL) else None


def unsaved_interval(profile: Profile, settings: PacingSettings) -> int:
    """Return the longest interval at which no more work than accepted is unsaved, at least 1."""
    seconds = settings.max_unsaved_seconds - lag_seconds(profile)
    return int(min(max(1, seconds / mean_seconds(profile)), MAX_INTERVAL)) if known(seconds) else 1


def mean_seconds(profile: Profile, overhead: float = 0.0) -> float:
    """Return the mean time of an iteration with `overhead`, and with waits that Ti leaves out as rare."""
    return max(profile.iteration_seconds * (1 + overhead), known(profile.mean_seconds or 0.0))


def known(seconds: float) -> float:
    """Return a measured duration, or 0 if it is not finite and positive."""
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


def achieved_interval(profile: Profile, interval: int) -> int:
    """Return the actual interval, a multiple of `interval` if writing takes longer: the next checkpoint waits."""
    return interval * max(1, ceil(pipeline_interval(profile) / interval))


def unsaved_iterations(profile: Profile, interval: int) -> int:
    """Return the maximum iterations that a failure can lose: all since the last but one checkpoint.

    A checkpoint is durable `lag` iterations after it is due, so k + lag are exposed (at most 2k) unless the lag is
    longer than k. Then the next checkpoint starts at the first multiple of k after the lag, or after an Nth of it
    with N in flight.
    """
    if not has_iteration_time(profile):
        return interval
    lag = ceil(lag_seconds(profile) / profile.iteration_seconds)
    spacing = interval * max(1, ceil(lag / (interval * max(1, profile.in_flight))))
    return spacing + lag


def forecast(
    profile: Profile, settings: PacingSettings, history: FailureHistory, interval: int, *, policy: str, reason: str
) -> IntervalPlan:
    """Return the plan of a checkpoint every `interval` iterations at any cost."""
    usable = has_iteration_time(profile)
    cost = checkpoint_cost(profile)
    kept = achieved_interval(profile, interval) if usable else interval
    overhead = cost / (kept * profile.iteration_seconds) if usable else None
    unsaved = unsaved_iterations(profile, interval)
    ettr = None
    if usable:
        ettr = effective_training_ratio(
            kept * profile.iteration_seconds,
            rate=estimate_failures(settings, history).rate,
            cost_seconds=cost,
            lag_seconds=lag_seconds(profile),
            restart_seconds=known(history.restart_seconds),
        )
    return IntervalPlan(
        interval=interval,
        policy=policy,
        cost_seconds=cost,
        overhead=overhead,
        unsaved_iterations=unsaved,
        unsaved_seconds=unsaved * mean_seconds(profile, overhead) if overhead is not None else None,
        ettr=ettr,
        reason=reason,
    )


def forecast_within_ceilings(
    profile: Profile, settings: PacingSettings, history: FailureHistory, wanted: float, *, policy: str, reason: str
) -> IntervalPlan:
    """Return the plan of the interval that is nearest to `wanted` iterations.

    It is no longer than the accepted unsaved work allows, and never shorter than the ceilings allow. `reason`
    explains `wanted`; a bound that decides is added to it. The interval is `None` if no iteration was timed or
    none is within the budget.
    """
    cost = checkpoint_cost(profile)
    if not has_iteration_time(profile):
        return IntervalPlan(
            interval=None, policy=policy, reason="no checkpoints are planned: no iteration has been timed yet"
        )
    ceilings = Ceilings.of(profile, settings)
    if ceilings.overhead is None:
        reason = (
            f"no checkpoints are planned: one costs {duration(cost)} and the budget is {percent(settings.budget)}"
        )
        return IntervalPlan(interval=None, policy=policy, cost_seconds=cost, reason=reason)
    accepted = unsaved_interval(profile, settings)
    if accepted < wanted:
        wanted = accepted
        reason += f"; at most {duration(settings.max_unsaved_seconds)} of unsaved work"
    # `wanted` comes last: max() ignores a NaN there
    interval = int(min(max(ceilings.shortest, wanted), MAX_INTERVAL))
    if interval > wanted and interval > 1:
        reason += f"; {ceilings.explain(profile, settings)}"
    return forecast(profile, settings, history, interval, policy=policy, reason=reason)


def effective_training_ratio(
    interval_seconds: float,
    *,
    rate: float,
    cost_seconds: float,
    lag_seconds: float = 0.0,
    restart_seconds: float = 0.0,
) -> float:
    """ETTR(W), from 0 to 1: useful time that is not lost again, over all time.

    Args:
        interval_seconds: W.
        rate: λ, failures a second; without failures the result is W / (W + δ).
        cost_seconds: δ, what one checkpoint costs training, interference included.
        lag_seconds: L, from the snapshot until it is durable.
        restart_seconds: R, from a failure until training goes on.

    Raises:
        ValueError: an interval of 0 or less, or a negative rate or time.
    """
    if not interval_seconds > 0:
        raise ValueError(f"an interval of {interval_seconds} s: give more than 0")
    if min(rate, cost_seconds, lag_seconds, restart_seconds) < 0:
        raise ValueError("rates and times are 0 or more")
    if math.isinf(interval_seconds):
        return 1.0 if rate == 0 and math.isfinite(cost_seconds) else 0.0
    exponent = rate * (interval_seconds + cost_seconds) if rate > 0 else 0.0
    if exponent == 0:
        return interval_seconds / (interval_seconds + cost_seconds)
    if exponent > 700:  # exp overflows, and nothing is ever finished at such an interval
        return 0.0
    return interval_seconds * rate / ((1 + rate * (restart_seconds + lag_seconds)) * math.expm1(exponent))


def optimal_interval_seconds(rate: float, cost_seconds: float) -> float:
    """W* = (1 + W₀(-exp(-1 - λδ))) / λ, at which ETTR is highest; R and L only scale it.

    Infinite without failures, 0 where a checkpoint costs nothing.
    """
    if rate < 0 or cost_seconds < 0:
        raise ValueError("the rate of failures and the cost of a checkpoint are 0 or more")
    if cost_seconds == 0:
        return 0.0
    x = rate * cost_seconds
    if x == 0:
        return math.sqrt(2 * cost_seconds / rate) if rate > 0 else math.inf
    # y = λ W* is the root of y + ln(1 - y) + x = 0 in (0, 1)
    y = math.sqrt(2 * x) - 2 * x / 3
    if x < TINY:
        return y / rate
    ceiling = -math.expm1(-1 - x)
    if x > 30:
        return ceiling / rate
    y = y if x < 0.5 else ceiling
    for _ in range(60):
        step = (math.log1p(-y) + y + x) * (1 - y) / y
        if abs(step) <= 1e-12 * y:
            break
        y = min(max(y + step, y / 2), (1 + y) / 2)
    return y / rate


def optimal_interval(profile: Profile, rate: float, *, shortest: int = 1) -> int:
    """The number of iterations of the highest ETTR, `shortest` or more."""
    cost = checkpoint_cost(profile)
    ideal = optimal_interval_seconds(rate, cost) / profile.iteration_seconds
    below = int(min(max(shortest, math.floor(min(ideal, MAX_INTERVAL))), MAX_INTERVAL))

    def worth(interval: int) -> float:
        return effective_training_ratio(interval * profile.iteration_seconds, rate=rate, cost_seconds=cost)

    return max(below, min(below + 1, MAX_INTERVAL), key=worth)


def daly_interval_seconds(rate: float, cost_seconds: float) -> float:
    """√(2δM) - δ for δ < M/2, else M, with M = 1/λ: Daly 2006, to first order. Infinite without failures."""
    if rate <= 0:
        return math.inf
    mean = 1 / rate
    return math.sqrt(2 * cost_seconds * mean) - cost_seconds if cost_seconds < mean / 2 else mean


def ceil(number: float) -> int:
    """Round up, ignoring the rounding error of a division: 0.3 / 0.1 is 3, not 4."""
    return math.ceil(min(number, MAX_INTERVAL) * (1 - 1e-12))
