"""Estimates of what checkpoints cost: stalls as timed, and interference by comparing iterations.

A span begins with a checkpoint and ends with a later one. Within a span, iterations that a snapshot or persist
overlapped (busy) are compared with the others (idle), without data waits and stalls. Both kinds lie side by side
in time, so another process that slows both does not count as a cost; the median over the spans removes a span in
which something changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul
from statistics import median, median_low

CLIP = 5.0
"""Values are limited to so many medians: an evaluation inside an iteration is no interference."""
PAIRED_IDLE = 2
"""Idle iterations that a span needs for a comparison of its own."""
TYPICAL_SPANS = 3
"""Newest spans that give the current cost of a checkpoint."""


@dataclass(slots=True, kw_only=True)  # not frozen: creating a frozen one in each iteration takes 3 times as long
class Observation:
    """The measurements of one finished iteration."""

    iteration: int
    seconds: float
    """Wall time of the iteration, without restores."""
    checkpoint_stall_seconds: float = 0.0
    data_seconds: float = 0.0
    in_flight: bool = False
    """Whether a snapshot or persist overlapped the iteration."""
    update_seconds: float | None = None


class ThinnedSamples:
    """A bounded sample of a sequence: when full, it drops every other value and doubles its stride."""

    __slots__ = ("_limit", "_skip", "_stride", "values")

    def __init__(self, limit: int = 64) -> None:
        self.values: list[float] = []
        self._limit, self._stride, self._skip = limit, 1, 0

    def add(self, value: float) -> None:
        if self._skip:
            self._skip -= 1
            return
        self.values.append(value)
        self._skip = self._stride - 1
        if len(self.values) >= self._limit:
            del self.values[1::2]
            self._stride *= 2
            self._skip = self._stride - 1


SpanIteration = tuple[float, float, float, bool]
"""Of one iteration: seconds, those of a stall for a checkpoint, those without waits, and whether it was busy."""


@dataclass(slots=True)
class CheckpointSpan:
    """Sums over the iterations from the start of one checkpoint to the start of a later one."""

    checkpoints: int = 0
    iterations: int = 0
    seconds: float = 0.0
    stall_seconds: float = 0.0
    busy_seconds: float = 0.0
    """Time of busy iterations, without data waits and stalls."""
    busy: ThinnedSamples = field(default_factory=ThinnedSamples)
    idle: ThinnedSamples = field(default_factory=ThinnedSamples)

    @property
    def comparison(self) -> SpanComparison | None:
        """`None` without enough iterations of both kinds."""
        return compare(self.busy.values, self.idle.values) if len(self.idle.values) >= PAIRED_IDLE else None

    def cost_seconds(self, excess: float) -> float:
        """Return the cost of its checkpoints together, if `excess` is their share of the busy time."""
        return self.stall_seconds + self.busy_seconds * excess

    def add(self, iterations: Sequence[SpanIteration]) -> None:
        for seconds, stall_seconds, compute_seconds, in_flight in iterations:
            self.iterations += 1
            self.seconds += seconds
            self.stall_seconds += stall_seconds
            if in_flight:
                self.busy_seconds += compute_seconds
                self.busy.add(compute_seconds)
            else:
                self.idle.add(compute_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowdownEstimate:
    """The share by which a busy iteration is longer than an idle one.

    A share, since seconds would change with the speed of the whole machine.
    """

    share: float = 0.0
    error: float = 0.0
    """Standard error of `share`."""


@dataclass(frozen=True, slots=True)
class SpanComparison:
    """The busy iterations of one span compared with its idle ones."""

    share: float
    variance: float
    """Variance of `share`, in units of the variance of one iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadEstimate:
    """The overhead and the cost of a checkpoint, from some spans."""

    iterations: int
    checkpoints: int
    overhead: float
    error: float
    """Standard error of `overhead`, from the scatter of the iterations."""
    stall_overhead: float
    """The part of `overhead` that was timed as stalls."""
    cost_seconds: float
    """Cost of one checkpoint in the typical span, stalls and interference together."""
    cautious_cost_seconds: float
    """`cost_seconds` with the interference lowered by its standard error."""
    upper_cost_seconds: float
    """`cost_seconds` with the interference raised by its standard error."""
    mean_cost_seconds: float
    """The mean over all spans but the most expensive one, as cautious; it includes rare expensive checkpoints."""


def measure(spans: Sequence[CheckpointSpan], slowdown: SlowdownEstimate) -> OverheadEstimate:
    """Estimate the overhead of `spans`; the newest ones give the current cost of a checkpoint."""
    excess, proven = _excess(slowdown.share), _excess(slowdown.share - slowdown.error)
    busy = math.fsum(span.busy_seconds for span in spans)
    stalls = math.fsum(span.stall_seconds for span in spans)
    base = max(math.fsum(span.seconds for span in spans) - stalls - excess * busy, 1e-12)
    return OverheadEstimate(
        iterations=sum(span.iterations for span in spans),
        checkpoints=sum(span.checkpoints for span in spans),
        overhead=(stalls + excess * busy) / base,
        error=slowdown.error * busy / base,
        stall_overhead=stalls / base,
        cost_seconds=_typical_cost(spans[-TYPICAL_SPANS:], excess),
        cautious_cost_seconds=_typical_cost(spans[-TYPICAL_SPANS:], proven),
        upper_cost_seconds=_typical_cost(
            spans[-TYPICAL_SPANS:], _excess(max(0.0, slowdown.share) + slowdown.error)
        ),
        mean_cost_seconds=_mean_cost(spans, proven),
    )


def compare(busy: Sequence[float], idle: Sequence[float]) -> SpanComparison | None:
    """Compare busy with idle iterations; `None` if either is missing."""
    baseline = clipped_mean(idle)
    if not busy or baseline <= 0:
        return None
    return SpanComparison(clipped_mean(busy) / baseline - 1, 1 / len(busy) + 1 / len(idle))


def conclude(comparisons: Sequence[SpanComparison], scatter: float) -> SlowdownEstimate:
    """Combine comparisons by their median, since something may have changed during one of them.

    `scatter`: standard deviation of an iteration as a share of its mean.
    """
    if not comparisons:
        return SlowdownEstimate()
    # The standard error of a median is about 1.25 times that of a mean.
    widen = 1.25 if len(comparisons) > 2 else 1.0
    deviation = scatter * math.sqrt(math.fsum(each.variance for each in comparisons))
    return SlowdownEstimate(
        share=median(each.share for each in comparisons), error=widen * deviation / len(comparisons)
    )


def clipped_mean(values: Sequence[float]) -> float:
    """Return the mean of values limited to CLIP medians; 0 for none."""
    return math.fsum(_clipped(values)) / len(values) if values else 0.0


def deviation(values: Sequence[float]) -> float:
    """Return the median absolute deviation."""
    middle = median(values)
    return median(abs(value - middle) for value in values)


def scatter(values: Sequence[float]) -> float:
    """Return the standard deviation as a share of the mean, with outliers clipped; 0 if undefined."""
    clipped = _clipped(values) if len(values) > 1 else ()
    mean = math.fsum(clipped) / len(clipped) if clipped else 0.0
    if mean <= 0:
        return 0.0
    deviations = [value - mean for value in clipped]
    return math.sqrt(math.fsum(map(mul, deviations, deviations)) / (len(clipped) - 1)) / mean


def _clipped(values: Sequence[float]) -> Sequence[float]:
    ceiling = CLIP * median(values)
    return values if max(values) <= ceiling else [min(value, ceiling) for value in values]


def _excess(slowdown_share: float) -> float:
    """Return the share of a busy iteration that is interference."""
    return slowdown_share / (1 + slowdown_share) if slowdown_share > 0 else 0.0


def _typical_cost(spans: Sequence[CheckpointSpan], excess: float) -> float:
    costs = [span.cost_seconds(excess) / span.checkpoints for span in spans if span.checkpoints]
    return median_low(costs) if costs else 0.0


def _mean_cost(spans: Sequence[CheckpointSpan], excess: float) -> float:
    costs = sorted((span.cost_seconds(excess), span.checkpoints) for span in spans if span.checkpoints)
    counted = costs[:-1] or costs
    return math.fsum(cost for cost, _ in counted) / max(sum(checkpoints for _, checkpoints in counted), 1)
