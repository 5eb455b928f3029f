"""Limits on samples, and a job's summary of its newest samples. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median

import msgspec

MACHINE_RANK = 1 << 21
"""Added to a rank for the series of its machine, which has the fields of `MachineSample` as metrics."""
MAX_METRICS = 100
MAX_AHEAD_SECONDS = 300.0
"""Tolerance for reported times later than the server's clock; clocks of machines differ."""
RECENT_ITERATIONS = 200
START_LOSSES = 20
"""Finite losses at the start of a job whose median is the scale of its loss."""
LOSS, TOKENS = "loss", "tokens"
USUAL_SECONDS = 6 * 3600.0
"""Training time over which the weight of earlier throughput falls to 1/e."""
LEAST_USUAL_SECONDS = 1800.0
"""Least training time behind a usual throughput."""
NAN = math.nan


class RecentSamples(msgspec.Struct, kw_only=True):
    """Newest samples of a job, for its summary."""

    seconds: list[float] = []
    loss: list[float] = []
    metrics: dict[str, float] = {}
    """Last value of each metric; of the loss, the last measured value."""
    finite_loss_iteration: int | None = None
    """Last iteration whose loss was finite."""
    start_losses: list[float] = []
    """The first finite losses of the job, at most `START_LOSSES`."""
    tokens: list[float] = []
    """Tokens of the newest iterations on all ranks, where the script reports them; NaN in the others."""
    usual_amount: float = 0.0
    """Tokens, or else iterations, of the last hours of training, the older ones with less weight."""
    usual_seconds: float = 0.0
    """Time of these, with the same weights."""
    usual_iteration: float = 0.0
    """Mean over the last hours of the medians of an iteration's time, the older ones with less weight."""
    usual_iteration_weight: float = 0.0
    """Time of these, with the same weights."""


_stored = msgspec.msgpack.Decoder(RecentSamples)


def recent_samples(stored: bytes | None) -> RecentSamples:
    """Decode the stored samples of a job."""
    return _stored.decode(stored) if stored else RecentSamples()


def latest(
    recent: RecentSamples,
    seconds: Sequence[float],
    loss: Sequence[float],
    last: Mapping[str, float],
    finite_loss_iteration: int | None = None,
    tokens: Sequence[float] = (),
) -> RecentSamples:
    """Return `recent` with the newest seconds, losses, tokens and metrics of a batch added.

    `finite_loss_iteration`: the last of the batch with a finite loss, if there is one.
    """
    counted = list[float]()
    if recent.tokens or tokens:
        counted = [*recent.tokens, *(tokens or [NAN] * len(seconds))][-RECENT_ITERATIONS:]
        if not any(map(math.isfinite, counted)):
            counted = []
    usual_amount, usual_seconds = _usual(recent, seconds, tokens, ends=not counted)
    usual_iteration, weight = _usual_iteration(recent, seconds)
    losses, start = recent.loss, recent.start_losses
    if len(start) < START_LOSSES:
        start = [*start, *filter(math.isfinite, loss)][:START_LOSSES]
    if losses or loss:
        losses = [*losses, *(loss or [NAN] * len(seconds))][-RECENT_ITERATIONS:]
    metrics = dict(recent.metrics)
    for name, value in last.items():
        if name in metrics or len(metrics) < MAX_METRICS:
            metrics[name] = value
    if losses:
        metrics[LOSS] = _newest(losses)
    if finite_loss_iteration is None:
        finite_loss_iteration = recent.finite_loss_iteration
    return RecentSamples(
        seconds=[*recent.seconds, *seconds][-RECENT_ITERATIONS:],
        loss=losses,
        metrics=metrics,
        finite_loss_iteration=finite_loss_iteration,
        start_losses=start,
        tokens=counted,
        usual_amount=usual_amount,
        usual_seconds=usual_seconds,
        usual_iteration=usual_iteration,
        usual_iteration_weight=weight,
    )


def _usual(
    recent: RecentSamples, seconds: Sequence[float], tokens: Sequence[float], *, ends: bool
) -> tuple[float, float]:
    """Return the weighted tokens, or else iterations, and time of the last hours with those of a batch added.

    `ends`: the newest iterations have no tokens, with those of the batch.
    """
    amount, before = recent.usual_amount, recent.usual_seconds
    if recent.tokens and not tokens and not ends:
        return amount, before
    if bool(recent.tokens) == ends:  # the figure is another one from here on
        amount = before = 0.0
    more, added = _amount([] if ends else tokens, seconds)
    weight = math.exp(-added / USUAL_SECONDS)
    return amount * weight + more, before * weight + added


def _amount(tokens: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return the tokens of the iterations that have them, or else the iterations, and their time."""
    if not tokens:
        return len(seconds), total(seconds)
    known = [
        (count, time)
        for count, time in zip(reversed(tokens), reversed(seconds), strict=False)
        if math.isfinite(count) and math.isfinite(time)
    ]
    return sum(count for count, _ in known), sum(time for _, time in known)


def _usual_iteration(recent: RecentSamples, seconds: Sequence[float]) -> tuple[float, float]:
    """Return the mean of the medians of an iteration's time with that of a batch added, and its weight."""
    known = list(filter(math.isfinite, seconds))
    added = sum(known)
    if added <= 0:
        return recent.usual_iteration, recent.usual_iteration_weight
    before = recent.usual_iteration_weight * math.exp(-added / USUAL_SECONDS)
    return (recent.usual_iteration * before + median(known) * added) / (before + added), before + added


def median_seconds(seconds: Sequence[float]) -> float | None:
    """Return the median of an iteration's time: a few long ones, as with a checkpoint, do not change it."""
    known = list(filter(math.isfinite, seconds))
    return median(known) if known else None


def usual_iteration_seconds(recent: RecentSamples) -> float | None:
    """Return the usual time of an iteration over the last hours; `None` until half an hour is known."""
    return recent.usual_iteration if recent.usual_iteration_weight >= LEAST_USUAL_SECONDS else None


def throughput(recent: RecentSamples) -> float | None:
    """Return tokens per second over the newest iterations, or else iterations per second."""
    amount, seconds = _amount(recent.tokens, recent.seconds)
    return amount / seconds if seconds > 0 else None


def usual_throughput(recent: RecentSamples) -> float | None:
    """Return the same over the last hours; `None` until half an hour is known."""
    known = recent.usual_seconds >= LEAST_USUAL_SECONDS
    return recent.usual_amount / recent.usual_seconds if known else None


def _newest(values: Sequence[float]) -> float:
    """Return the last value of a column; of a sparse column the last measured value.

    It is nan if the last measured value is older than twice the usual distance between measured values.
    """
    if not math.isnan(values[-1]):  # as usual
        return values[-1]
    places = [place for place, value in enumerate(values) if not math.isnan(value)]
    if not places or 2 * sum(map(math.isfinite, values)) > len(values):  # none measured, or not sparse
        return values[-1]
    usual = max((after - before for before, after in pairwise(places)), default=RECENT_ITERATIONS)
    return values[places[-1]] if len(values) - 1 - places[-1] <= 2 * usual else NAN


def total(values: Iterable[float]) -> float:
    """Return the sum of the finite values."""
    return sum(filter(math.isfinite, values))
