"""The Gamma distribution, as far as credible intervals need it: its cumulative distribution and its quantiles.

The regularised incomplete gamma function P(a, x), by its series below a + 1 and by its continued fraction above
(Abramowitz and Stegun, "Handbook of Mathematical Functions", 6.5.29 and 6.5.31), which is evaluated as Lentz does.
"""

from __future__ import annotations

import math

_ENOUGH = 1e-14
_TERMS = 10_000


def cumulative(shape: float, x: float) -> float:
    """P(a, x): the probability that a Gamma variable of this shape and rate 1 is at most `x`."""
    if x <= 0:
        return 0.0
    if math.isinf(x):
        return 1.0
    scale = math.exp(shape * math.log(x) - x - math.lgamma(shape))
    return scale * _series(shape, x) if x < shape + 1 else 1 - scale * _fraction(shape, x)


def quantile(shape: float, probability: float) -> float:
    """The `x` at which P(a, x) reaches `probability`, by bisection."""
    low, high = 0.0, shape + 1
    while cumulative(shape, high) < probability:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if cumulative(shape, middle) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _series(shape: float, x: float) -> float:
    term = total = 1 / shape
    for n in range(1, _TERMS):
        term *= x / (shape + n)
        total += term
        if term < total * _ENOUGH:
            break
    return total


def _fraction(shape: float, x: float) -> float:
    b = x + 1 - shape
    c, d = math.inf, 1 / b
    value = d
    for n in range(1, _TERMS):
        a = n * (shape - n)
        b += 2
        d = 1 / _not_zero(b + a * d)
        c = _not_zero(b + a / c)
        value *= c * d
        if abs(c * d - 1) < _ENOUGH:
            break
    return value


def _not_zero(number: float) -> float:
    return number if abs(number) > 1e-300 else 1e-300
