"""How often a job fails: a Gamma posterior over its rate, from its own history and from what clusters report.

Failures come as a Poisson process of unknown rate λ; with a Gamma(a, b) prior, k failures in T seconds make it
Gamma(a + k, b + T). The prior is worth one failure and has the mean that clusters report: one per 50,000 GPU-hours
of hardware, and one per 200 hours of the job's own software, whatever its size (small jobs fail more often than
their share of the hardware would).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any, TypeGuard

GPU_HOURS_BETWEEN_FAILURES = 50_000.0
JOB_HOURS_BETWEEN_FAILURES = 200.0
PRIOR_FAILURES = 1.0
"""a: as if so many had been seen before the job began."""
HALF_LIFE_SECONDS = 14 * 86400.0
"""What was seen so long ago counts half: hardware is mended, code changes."""
ASSUMED_RESTART_SECONDS = 60.0
NEARLY_NORMAL = 100.0
"""Shape from which Wilson and Hilferty's approximation of a Gamma quantile is good to 1e-4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """What was seen of a job's failures. Planned stops, restores by operators and preemptions are none."""

    count: float = 0.0
    """Failures seen, older ones by less than 1 each."""
    exposure_seconds: float = 0.0
    """For how long the job was running meanwhile, aged in the same way."""
    world_size: int = 1
    mean_seconds: float | None = None
    """A mean time between failures that was stated: it takes the place of the prior's mean."""

    @property
    def stated(self) -> bool:
        """Whether a mean time that can be used was stated."""
        return self.mean_seconds is not None and 0 < self.mean_seconds < math.inf

    @property
    def prior_seconds(self) -> float:
        """The mean time between failures to be expected of a job that has not run yet."""
        if self.stated:
            assert self.mean_seconds is not None
            return self.mean_seconds
        an_hour = max(1, self.world_size) / GPU_HOURS_BETWEEN_FAILURES + 1 / JOB_HOURS_BETWEEN_FAILURES
        return 3600.0 / an_hour

    @property
    def rate(self) -> float:
        """Failures a second: the posterior's mean, (a + k) / (b + T)."""
        return self._shape / self._seconds

    def after(self, seconds: float, *, failures: int = 0) -> Failures:
        """The same, `seconds` of running later, at the end of which so many failures came.

        Ageing is continuous: the number of calls that the time is split into does not matter.
        """
        kept = 0.5 ** (seconds / HALF_LIFE_SECONDS)
        gained = (1 - kept) * HALF_LIFE_SECONDS / math.log(2)
        return replace(
            self,
            count=self.count * kept + failures,
            exposure_seconds=self.exposure_seconds * kept + gained,
        )

    def interval(self, share: float = 0.9) -> tuple[float, float]:
        """Where the rate lies with the probability `share`, as much of the rest below it as above."""
        tail = (1 - share) / 2
        low, high = (gamma_quantile(self._shape, each) for each in (tail, 1 - tail))
        return low / self._seconds, high / self._seconds

    def none_within(self, seconds: float) -> float:
        """The probability that the next `seconds` bring no failure: ((b + T) / (b + T + h))^(a + k)."""
        return math.pow(self._seconds / (self._seconds + seconds), self._shape)

    @property
    def _shape(self) -> float:
        return PRIOR_FAILURES + self.count

    @property
    def _seconds(self) -> float:
        """b + T. With the prior worth a failures, b is a times its mean time between them."""
        return PRIOR_FAILURES * self.prior_seconds + self.exposure_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What a policy may know of the job's life so far, in addition to its profile."""

    failures: Failures = field(default_factory=Failures)
    restart_seconds: float = ASSUMED_RESTART_SECONDS
    """From a failure until training goes on: noticing it, starting again, loading. Assumed where not measured."""


class JobHistory:
    """The job's failures and running time, which grow with every iteration and go on from attempt to attempt."""

    def __init__(self, world_size: int = 1) -> None:
        self._failures = Failures(world_size=world_size)
        """As of the last start."""
        self._failed = 0
        self._ran_seconds = 0.0
        """Since then."""

    def trained(self, seconds: float) -> None:
        if math.isfinite(seconds) and seconds > 0:
            self._ran_seconds += seconds

    def failed(self, times: int) -> None:
        """Add attempts that failed since the checkpoint that this one resumed from, which knows those before."""
        self._failed += times

    @property
    def history(self) -> History:
        return History(failures=self._failures.after(self._ran_seconds, failures=self._failed))

    def state_dict(self) -> dict[str, Any]:
        """Fit for JSON."""
        failures = self.history.failures
        return {"failures": failures.count, "exposure_seconds": failures.exposure_seconds}

    def load_state_dict(self, state: object) -> None:
        """Take up the history of earlier attempts; a state that makes no sense is ignored."""
        if not isinstance(state, dict):
            return
        count, seconds = state.get("failures"), state.get("exposure_seconds")
        if _is_amount(count) and _is_amount(seconds):
            self._failures = replace(self._failures, count=count, exposure_seconds=seconds)
            self._ran_seconds = 0.0


def gamma_quantile(shape: float, probability: float) -> float:
    """The x at which a Gamma variable of this shape and rate 1 is at most x with this probability."""
    if shape > NEARLY_NORMAL:
        deviations = NormalDist().inv_cdf(probability)
        return shape * (1 - 1 / (9 * shape) + deviations / (3 * math.sqrt(shape))) ** 3
    low, high = 0.0, 2 * shape + 20
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _cumulative(shape, middle) < probability else (low, middle)
    return high


def _cumulative(shape: float, x: float) -> float:
    """The regularized incomplete gamma function P(shape, x) for x > 0, by its series."""
    term = total = 1 / shape
    n = 0
    while term > total * 1e-14:
        n += 1
        term *= x / (shape + n)
        total += term
    return total * math.exp(shape * math.log(x) - x - math.lgamma(shape))


def _is_amount(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0
