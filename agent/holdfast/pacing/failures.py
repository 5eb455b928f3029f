"""How often a job fails: a Gamma posterior over its rate, from what was seen of it and what is known of others.

Failures come as a Poisson process of unknown rate λ; with a Gamma(a, b) prior, k failures in T seconds make it
Gamma(a + k, b + T). The prior is worth one failure and has the mean that clusters report: one per 50,000 GPU-hours
of hardware, and one per 200 hours of the job's own software, whatever its size (small jobs fail more often than
their share of the hardware would).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .gamma import quantile

GPU_HOURS_BETWEEN_FAILURES = 50_000.0
JOB_HOURS_BETWEEN_FAILURES = 200.0
PRIOR_FAILURES = 1.0
"""a: as if so many had been seen before the job began."""
HALF_LIFE_SECONDS = 14 * 86400.0
"""What was seen so long ago counts half: hardware is mended, code changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """What was seen of a job's failures. Planned stops, restores by operators and preemptions are none."""

    count: float = 0.0
    """Failures seen, older ones by less than 1 each."""
    exposure_seconds: float = 0.0
    """For how long the job was running meanwhile, aged in the same way."""
    world_size: int = 1
    mean_seconds: float | None = None
    """A mean time between failures that somebody stated: it takes the place of the prior's mean."""

    @property
    def stated(self) -> bool:
        """Whether somebody stated a mean time that can be used."""
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

        Ageing is continuous, so that it does not matter in how many steps the time is told.
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
        return quantile(self._shape, tail) / self._seconds, quantile(self._shape, 1 - tail) / self._seconds

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
