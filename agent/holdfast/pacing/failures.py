"""The failure rate of a job: a Gamma posterior from its own failures and from published rates.

Failures are a Poisson process of unknown rate λ. With a Gamma(a, b) prior, k failures in T seconds give Gamma(a +
k, b + T). The prior counts as one failure. Its mean is the published rate: one failure per 50,000 GPU-hours for
hardware, and one per 200 hours for the job's own software, at any size (small jobs fail more often than their
hardware).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from holdfast.pacing.loss_curve import LossCurve, LossRecord

GPU_HOURS_BETWEEN_FAILURES = 50_000.0
JOB_HOURS_BETWEEN_FAILURES = 200.0
PRIOR_FAILURES = 1.0
"""a: the number of failures that the prior counts as."""
HALF_LIFE_SECONDS = 14 * 86400.0
"""Age at which observations count half: hardware is repaired, code changes."""
ASSUMED_RESTART_SECONDS = 60.0
NEARLY_NORMAL = 100.0
"""Shape from which the Wilson-Hilferty approximation of a Gamma quantile is exact to 1e-4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureEstimate:
    """A posterior of the failure rate. Planned ends, restores and preemptions do not count as failures."""

    count: float = 0.0
    """Observed failures; older ones count less than 1 each."""
    exposure_seconds: float = 0.0
    """Running time in which they were observed, aged in the same way."""
    world_size: int = 1
    mean_seconds: float | None = None
    """MTBF from the settings; it replaces the mean of the prior."""
    rank_seconds: float = 0.0
    """Running time of all ranks in `exposure_seconds`; a job may have had other numbers of ranks."""

    @property
    def stated(self) -> bool:
        """Whether the settings give a usable MTBF."""
        return self.mean_seconds is not None and 0 < self.mean_seconds < math.inf

    @property
    def prior_seconds(self) -> float:
        """The MTBF expected of a job that has not run yet."""
        if self.stated:
            assert self.mean_seconds is not None
            return self.mean_seconds
        return 1 / _published_rate(self.world_size)

    @property
    def relative_rate(self) -> float:
        """The published rate for the ranks of now, relative to that for the ranks that the job usually has."""
        if not 0 < self.exposure_seconds <= self.rank_seconds < math.inf:
            return 1.0
        return _published_rate(self.world_size) / _published_rate(self.rank_seconds / self.exposure_seconds)

    @property
    def rate(self) -> float:
        """Failures per second: the mean of the posterior, (a + k) / (b + T)."""
        return self._shape / self._seconds

    def after(self, seconds: float, *, failures: int = 0) -> FailureEstimate:
        """Return the posterior after `seconds` more of running that ended with `failures` failures.

        Aging is continuous: splitting the time into several calls gives the same result.
        """
        kept = 0.5 ** (seconds / HALF_LIFE_SECONDS)
        gained = (1 - kept) * HALF_LIFE_SECONDS / math.log(2)
        return replace(
            self,
            count=self.count * kept + failures,
            exposure_seconds=self.exposure_seconds * kept + gained,
            rank_seconds=self.rank_seconds * kept + gained * max(1, self.world_size),
        )

    def credible_interval(self, share: float = 0.9) -> tuple[float, float]:
        """Return the central credible interval of the rate with probability `share`."""
        tail = (1 - share) / 2
        low, high = (gamma_quantile(self._shape, each) for each in (tail, 1 - tail))
        return low / self._seconds, high / self._seconds

    def survival_probability(self, seconds: float) -> float:
        """Return the probability of no failure within `seconds`: ((b + T) / (b + T + h))^(a + k)."""
        return math.pow(self._seconds / (self._seconds + seconds), self._shape)

    @property
    def _shape(self) -> float:
        return PRIOR_FAILURES + self.count

    @property
    def _seconds(self) -> float:
        """b + T, where b is a times the MTBF of the prior."""
        return PRIOR_FAILURES * self.prior_seconds + self.exposure_seconds


def _published_rate(world_size: float) -> float:
    """Return failures per second of a job with so many ranks, as clusters report them."""
    an_hour = max(1.0, world_size) / GPU_HOURS_BETWEEN_FAILURES + 1 / JOB_HOURS_BETWEEN_FAILURES
    return an_hour / 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProgress:
    """How far a job is, and how fast it learns."""

    iteration: int
    total_iterations: int | None = None
    """Iterations that the job is to have; `None`: unknown."""
    checkpoints: int = 0
    """Checkpoints begun so far, by all attempts."""
    curve: LossCurve | None = None
    """The loss that the script logs; `None` where it shows no falling curve."""
    why_no_curve: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureHistory:
    """What a policy knows in addition to the profile: failures, the cost of a restart, progress."""

    failures: FailureEstimate = field(default_factory=FailureEstimate)
    restart_seconds: float = ASSUMED_RESTART_SECONDS
    """Time from a failure until training continues: detection, start, loading."""
    progress: TrainingProgress | None = None
    """`None` where only failures are known, as in a plan before the start."""


class JobHistory:
    """Failures, running time and progress of a job over all of its attempts; kept in its checkpoints."""

    def __init__(self, world_size: int = 1, total_iterations: int | None = None) -> None:
        self._failures = FailureEstimate(world_size=world_size)
        """As of the start of this attempt."""
        self._failed = 0
        self._ran_seconds = 0.0
        self.total_iterations = total_iterations
        self._iteration = self._checkpoints = 0
        self._losses: LossRecord | None = None

    def trained(self, iteration: int, seconds: float) -> None:
        """Add training up to an iteration, which took so long since the last call."""
        self._iteration = iteration
        self._ran_seconds += seconds

    def failed(self, times: int) -> None:
        """Add attempts that failed since the checkpoint from which this one resumed."""
        self._failed += times

    def began_checkpoint(self) -> None:
        self._checkpoints += 1

    def lost(self, iteration: int, loss: float) -> None:
        """Add the loss of an iteration, for a policy that follows it."""
        self._losses = self._losses or _new_losses()
        self._losses.add(iteration, loss)

    @property
    def history(self) -> FailureHistory:
        losses = self._losses
        progress = TrainingProgress(
            iteration=self._iteration,
            total_iterations=self.total_iterations,
            checkpoints=self._checkpoints,
            curve=losses.curve if losses is not None else None,
            why_no_curve=losses.why_none if losses is not None else "no loss is logged",
        )
        return FailureHistory(
            failures=self._failures.after(self._ran_seconds, failures=self._failed), progress=progress
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the history as JSON types."""
        failures = self.history.failures
        saved = {
            "failures": failures.count,
            "exposure_seconds": failures.exposure_seconds,
            "rank_seconds": failures.rank_seconds,
            "checkpoints": self._checkpoints,
        }
        return saved if self._losses is None else saved | {"losses": self._losses.state_dict()}

    def load_state_dict(self, state: object) -> None:
        """Continue the history of earlier attempts; an invalid state is ignored."""
        if not isinstance(state, dict):
            return
        count, seconds, of_ranks = (state.get(name) for name in ("failures", "exposure_seconds", "rank_seconds"))
        if _is_amount(count) and _is_amount(seconds):
            self._failures = replace(
                self._failures,
                count=count,
                exposure_seconds=seconds,
                rank_seconds=of_ranks if _is_amount(of_ranks) else seconds * max(1, self._failures.world_size),
            )
            self._ran_seconds = 0.0
        if _is_amount(taken := state.get("checkpoints")):
            self._checkpoints = int(taken)
        if "losses" in state:
            self._losses = _new_losses()
            self._losses.load_state_dict(state["losses"])


def _new_losses() -> LossRecord:
    from holdfast.pacing.loss_curve import LossRecord  # few policies need it

    return LossRecord()


def gamma_quantile(shape: float, probability: float) -> float:
    """Return the quantile of a Gamma variable of this shape and rate 1."""
    if shape > NEARLY_NORMAL:
        deviations = NormalDist().inv_cdf(probability)
        return shape * (1 - 1 / (9 * shape) + deviations / (3 * math.sqrt(shape))) ** 3
    low, high = 0.0, 2 * shape + 20
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _cumulative(shape, middle) < probability else (low, middle)
    return high


def _cumulative(shape: float, x: float) -> float:
    """Return the regularized incomplete gamma function P(shape, x) for x > 0, by its series."""
    term = total = 1 / shape
    n = 0
    while term > total * 1e-14:
        n += 1
        term *= x / (shape + n)
        total += term
    return total * math.exp(shape * math.log(x) - x - math.lgamma(shape))


def _is_amount(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0
