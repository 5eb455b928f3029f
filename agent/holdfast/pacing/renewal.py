"""How much of a job's time moves it forward, at a given interval and failure rate.

Failures are a Poisson process. Work goes in cycles of `interval_seconds` of useful time and one checkpoint's cost;
a failure takes back what the cycle had reached, and then some: what was not durable yet, and the restart. The
share of useful time, the effective training time ratio, is

    ETTR(W) = W / ((1/λ + R + L) (exp(λ (W + δ)) - 1))

exact for that model where a checkpoint is durable at once, and to first order in λL where it is not.

J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974, and J. T. Daly,
"A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006, give the
classical approximations of its optimum; the optimum itself needs Lambert's W function.

Throughout: W `interval_seconds`, λ `rate` (failures a second), δ `cost_seconds` (what one checkpoint costs
training, interference included), L `lag_seconds` (from the snapshot until it is durable), R `restart_seconds`
(noticing a failure, starting again, loading). Seconds; no torch, no clock.
"""

from __future__ import annotations

import math


def effective_ratio(
    interval_seconds: float,
    *,
    rate: float,
    cost_seconds: float,
    lag_seconds: float = 0.0,
    restart_seconds: float = 0.0,
) -> float:
    """ETTR(W), from 0 to 1: useful time that is not lost again, over all time.

    Without failures it is W / (W + δ). ValueError for an interval of 0 or less, or a negative rate or time.
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
    if rate == 0:
        return math.inf
    x = rate * cost_seconds
    return _above_branch(x) / rate if x > 0 else young_interval_seconds(rate, cost_seconds)


def young_interval_seconds(rate: float, cost_seconds: float) -> float:
    """√(2δ/λ), Young 1974; infinite without failures."""
    return math.sqrt(2 * cost_seconds / rate) if rate > 0 else math.inf


def daly_interval_seconds(rate: float, cost_seconds: float) -> float:
    """√(2δM) - δ for δ < M/2, else M, with M = 1/λ: Daly 2006, to first order. Infinite without failures."""
    if rate <= 0:
        return math.inf
    mean = 1 / rate
    return math.sqrt(2 * cost_seconds * mean) - cost_seconds if cost_seconds < mean / 2 else mean


def _above_branch(x: float) -> float:
    """y = 1 + W₀(-exp(-1 - x)) for x > 0: the root of y + ln(1 - y) + x = 0 within (0, 1).

    Lambert's W near its branch point cancels to nothing in floating point where x is small, which it is for every
    real job; this equation does not.
    """
    ceiling = -math.expm1(-1 - x)
    if x > 30:
        return ceiling
    # Newton from y = √(2x) - 2x/3 + …, or from above
    y = min(math.sqrt(2 * x) - 2 * x / 3, ceiling) if x < 0.5 else ceiling
    for _ in range(60):
        # d/dy (y + ln(1 - y)) = -y / (1 - y)
        step = (_log1m_plus(y) + x) * (1 - y) / y
        if abs(step) <= 1e-15 * y:
            break
        y = min(max(y + step, y / 2), (1 + y) / 2)
    return y


def _log1m_plus(y: float) -> float:
    """ln(1 - y) + y, to full precision near 0."""
    if y > 0.1:
        return math.log1p(-y) + y
    total, power = 0.0, y
    for n in range(2, 24):
        power *= y
        total -= power / n
    return total
