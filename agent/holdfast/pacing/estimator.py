"""What checkpoints cost, worked out from iterations: direct stalls, and interference by comparison.

Iterations are gathered in spans, each from the start of a checkpoint up to a later start. Within one span the
iterations that a snapshot or persist overlapped (busy) are compared with those that nothing overlapped (idle),
data waits and stalls taken out first. The two kinds lie side by side in time, so a neighbour on the machine who
slows both is not blamed on checkpoints; the median over the spans sorts out one that a change cut in two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul
from statistics import median, median_low

CLIP = 5.0
"""A value beyond this many medians counts as this many: an evaluation inside an iteration is no interference."""
PAIRED_IDLE = 2
"""Idle iterations that a span needs to be judged by itself."""


@dataclass(slots=True, kw_only=True)  # not frozen: one is made in every iteration, which takes a third as long
class Observation:
    """One finished iteration, as the session saw it."""

    iteration: int
    seconds: float
    """Wall time of the whole iteration, restores left out."""
    checkpoint_stall_seconds: float = 0.0
    data_seconds: float = 0.0
    in_flight: bool = False
    """A snapshot or persist overlapped this iteration."""
    update_seconds: float | None = None


class Reservoir:
    """A bounded, evenly thinned record of a sequence: when full, every other value goes and the stride doubles."""

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


@dataclass(slots=True)
class Span:
    """Iterations from the start of a checkpoint on, and the number of checkpoints that started in it."""

    checkpoints: int = 0
    iterations: int = 0
    seconds: float = 0.0
    stall_seconds: float = 0.0
    busy_seconds: float = 0.0
    """Of the iterations that a snapshot or persist overlapped, data waits and stalls taken out."""
    busy: Reservoir = field(default_factory=Reservoir)
    idle: Reservoir = field(default_factory=Reservoir)

    @property
    def comparison(self) -> Comparison | None:
        """None where there is nothing to compare."""
        return compare(self.busy.values, self.idle.values) if len(self.idle.values) >= PAIRED_IDLE else None

    def cost_seconds(self, excess: float) -> float:
        """Of its checkpoints together, where `excess` is the part of busy time that these account for."""
        return self.stall_seconds + self.busy_seconds * excess

    def add(self, seconds: float, stall_seconds: float, compute_seconds: float, *, in_flight: bool) -> None:
        self.iterations += 1
        self.seconds += seconds
        self.stall_seconds += stall_seconds
        if in_flight:
            self.busy_seconds += compute_seconds
            self.busy.add(compute_seconds)
        else:
            self.idle.add(compute_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """By which share a busy iteration is longer than an idle one, and the standard error of that.

    A share and not seconds: it stays what it is when the whole machine grows slower or faster.
    """

    share: float = 0.0
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """One span's busy iterations against its idle ones."""

    share: float
    variance: float
    """Of `share`, where a single iteration has the variance 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What some spans say about the cost of checkpoints."""

    iterations: int
    overhead: float
    error: float
    """Standard error of `overhead`, from the scatter of the iterations."""
    stall_overhead: float
    """The part of it that was timed directly."""
    cost_seconds: float
    """Of one checkpoint in the typical span, stalls and interference together."""
    cautious_cost_seconds: float
    """The same with interference less its standard error: what the figures prove."""
    mean_cost_seconds: float
    """As cautious, over all spans but the most expensive: it counts what is rare but keeps coming."""


def measure(spans: Sequence[Span], slowdown: Slowdown, *, typical: int = 3) -> Measurement:
    """The overhead of `spans` together; the newest `typical` of them say what a checkpoint costs now."""
    excess, proven = _excess(slowdown.share), _excess(slowdown.share - slowdown.error)
    busy = math.fsum(span.busy_seconds for span in spans)
    stalls = math.fsum(span.stall_seconds for span in spans)
    base = max(math.fsum(span.seconds for span in spans) - stalls - excess * busy, 1e-12)
    return Measurement(
        iterations=sum(span.iterations for span in spans),
        overhead=(stalls + excess * busy) / base,
        error=slowdown.error * busy / base,
        stall_overhead=stalls / base,
        cost_seconds=_typical_cost(spans[-typical:], excess),
        cautious_cost_seconds=_typical_cost(spans[-typical:], proven),
        mean_cost_seconds=_mean_cost(spans, proven),
    )


def compare(busy: Sequence[float], idle: Sequence[float]) -> Comparison | None:
    """None where there is nothing to compare."""
    baseline = clipped_mean(idle)
    if not busy or baseline <= 0:
        return None
    return Comparison(clipped_mean(busy) / baseline - 1, 1 / len(busy) + 1 / len(idle))


def conclude(comparisons: Sequence[Comparison], scatter: float) -> Slowdown:
    """What several comparisons say together: their median, for one of them may have been cut in two by a change.

    `scatter` is the standard deviation of an iteration, as a share of its mean.
    """
    if not comparisons:
        return Slowdown()
    # The median of several scatters by a quarter more than their mean would.
    widen = 1.25 if len(comparisons) > 2 else 1.0
    deviation = scatter * math.sqrt(math.fsum(each.variance for each in comparisons))
    return Slowdown(share=median(each.share for each in comparisons), error=widen * deviation / len(comparisons))


def clipped_mean(values: Sequence[float]) -> float:
    """The mean, with values beyond CLIP medians cut down to that; 0 for none."""
    return math.fsum(_clipped(values)) / len(values) if values else 0.0


def deviation(values: Sequence[float]) -> float:
    """The median deviation from the median, which a few odd values do not move."""
    middle = median(values)
    return median(abs(value - middle) for value in values)


def scatter(values: Sequence[float]) -> float:
    """Standard deviation as a share of the mean, outliers clipped; 0 where that cannot be said."""
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
    """The part of a busy iteration's time by which it is longer than it would have been."""
    return slowdown_share / (1 + slowdown_share) if slowdown_share > 0 else 0.0


def _typical_cost(spans: Sequence[Span], excess: float) -> float:
    costs = [span.cost_seconds(excess) / span.checkpoints for span in spans if span.checkpoints]
    return median_low(costs) if costs else 0.0


def _mean_cost(spans: Sequence[Span], excess: float) -> float:
    costs = sorted((span.cost_seconds(excess), span.checkpoints) for span in spans if span.checkpoints)
    counted = costs[:-1] or costs
    return math.fsum(cost for cost, _ in counted) / max(sum(checkpoints for _, checkpoints in counted), 1)
