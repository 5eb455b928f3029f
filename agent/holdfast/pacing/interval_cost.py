"""What an interval between checkpoints costs, what it leaves exposed, and what it makes of the job's time.

Two bounds hold for every policy: checkpoints become durable as fast as they start, and the budget is a ceiling.
Both come from Algorithm 1 of CheckFreq (Mohan, Phanishayee, Chidambaram, FAST'21, section 4.2), whose symbols are
given with the fields of `Profile`; the measured cost of a checkpoint, once known, replaces the predicted stall To.
With N in flight the next one may start after an Nth of the time that one takes.

The share of time that moves training forward, the effective training time ratio, follows from a renewal process.
Failures are a Poisson process. Work goes in cycles of W useful seconds and one checkpoint's cost δ; a failure
takes back what the cycle had reached, what was not durable yet (lag L), and costs a restart R:

    ETTR(W) = W / ((1/λ + R + L) (exp(λ (W + δ)) - 1))

exact for that model where a checkpoint is durable at once, and to first order in λL where it is not. J. W. Young,
"A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974, and J. T. Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006, approximate its optimum.
"""

from __future__ import annotations

import math

from holdfast.pacing.failures import History
from holdfast.pacing.policy import ceil, duration, failures_of, known, percent, plural, usable_iteration
from holdfast.pacing.profile import Plan, Profile, SnapshotMode
from holdfast.pacing.settings import MAX_INTERVAL, Settings

TINY = 1e-6
"""λδ below which the first two terms of the optimum's expansion are exact to 1e-6."""


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


def lag_seconds(profile: Profile) -> float:
    """From the start of a checkpoint until it is durable; parts not known count nothing."""
    return known(profile.snapshot_seconds) + known(profile.persist_seconds)


def pipeline_interval(profile: Profile) -> int:
    """k = ((Tc + Ts) / N - To) / Ti, rounded up: never more than N are in flight, 1 in Algorithm 1."""
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


def kept_interval(profile: Profile, interval: int) -> int:
    """What becomes of an interval that writing cannot keep up with: every next checkpoint waits."""
    return interval * max(1, ceil(pipeline_interval(profile) / interval))


def exposure_iterations(profile: Profile, interval: int) -> int:
    """The most iterations a failure can lose: those since the last checkpoint but one, while the last is written.

    A checkpoint is durable `lag` iterations after it was due. While that is no more than the interval, k + lag
    (at most 2k) are exposed. A shorter interval than the lag cannot be kept: with one checkpoint in flight the
    next starts at the first multiple of k after it, with N of them at the first after an Nth of it.
    """
    if not usable_iteration(profile):
        return interval
    lag = ceil(lag_seconds(profile) / profile.iteration_seconds)
    spacing = interval * max(1, ceil(lag / (interval * max(1, profile.in_flight))))
    return spacing + lag


def expect(
    profile: Profile, settings: Settings, history: History, interval: int, *, policy: str, reason: str
) -> Plan:
    """The plan of a checkpoint every `interval` iterations, whatever it costs."""
    usable = usable_iteration(profile)
    mode, _ = predicted_stall(profile)
    cost = checkpoint_cost(profile)
    kept = kept_interval(profile, interval) if usable else interval
    overhead = cost / (kept * profile.iteration_seconds) if usable else None
    exposure = exposure_iterations(profile, interval)
    effective = None
    if usable:
        effective = effective_ratio(
            kept * profile.iteration_seconds,
            rate=failures_of(settings, history).rate,
            cost_seconds=cost,
            lag_seconds=lag_seconds(profile),
            restart_seconds=known(history.restart_seconds),
        )
    return Plan(
        interval=interval,
        mode=mode,
        policy=policy,
        cost_seconds=cost,
        overhead=overhead,
        exposure_iterations=exposure,
        exposure_seconds=exposure * profile.iteration_seconds * (1 + overhead) if overhead is not None else None,
        effective=effective,
        in_flight=max(1, profile.in_flight),
        reason=reason,
    )


def expect_within(
    profile: Profile, settings: Settings, history: History, wanted: float, *, policy: str, reason: str
) -> Plan:
    """The plan of a checkpoint every `wanted` iterations, or as near above as the budget and the pipeline allow.

    `reason` says why so many are wanted; where another bound decides, that is added to it. There is no interval
    where no iteration was timed, or where none is within the budget.
    """
    mode, _ = predicted_stall(profile)
    cost = checkpoint_cost(profile)
    if not usable_iteration(profile):
        return Plan(
            interval=None, policy=policy, reason="no checkpoints are planned: no iteration has been timed yet"
        )
    affordable = budget_interval(profile, settings.budget)
    if affordable is None:
        reason = (
            f"no checkpoints are planned: one costs {duration(cost)} and the budget is {percent(settings.budget)}"
        )
        return Plan(interval=None, mode=mode, policy=policy, cost_seconds=cost, reason=reason)
    pipeline = pipeline_interval(profile)
    # the bound comes first: of two numbers, max keeps it where the other is not a number
    interval = int(min(max(1, pipeline, affordable, wanted), MAX_INTERVAL))
    if interval > wanted and interval > 1:
        if affordable >= pipeline:
            bound = f"the budget of {percent(settings.budget)} allows one every {plural(affordable)} at most"
        else:
            busy = duration(lag_seconds(profile))
            bound = f"one takes {busy} to become durable and the next waits for it: every {plural(pipeline)}"
        reason += f"; {bound}"
    return expect(profile, settings, history, interval, policy=policy, reason=reason)


def effective_ratio(
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


def best_interval_seconds(rate: float, cost_seconds: float) -> float:
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


def best_interval(profile: Profile, rate: float, *, shortest: int = 1) -> int:
    """The number of iterations of the highest ETTR, `shortest` or more."""
    cost = checkpoint_cost(profile)
    ideal = best_interval_seconds(rate, cost) / profile.iteration_seconds
    below = int(min(max(shortest, math.floor(min(ideal, MAX_INTERVAL))), MAX_INTERVAL))

    def worth(interval: int) -> float:
        return effective_ratio(interval * profile.iteration_seconds, rate=rate, cost_seconds=cost)

    return max(below, min(below + 1, MAX_INTERVAL), key=worth)


def daly_interval_seconds(rate: float, cost_seconds: float) -> float:
    """√(2δM) - δ for δ < M/2, else M, with M = 1/λ: Daly 2006, to first order. Infinite without failures."""
    if rate <= 0:
        return math.inf
    mean = 1 / rate
    return math.sqrt(2 * cost_seconds * mean) - cost_seconds if cost_seconds < mean / 2 else mean
