"""Limits on samples, and a job's summary of its newest samples. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec

MACHINE_RANK = 1 << 21
"""Added to a rank for the series of its machine, which has the fields of `MachineSample` as metrics."""
MAX_METRICS = 100
MAX_AHEAD_SECONDS = 300.0
"""Tolerance for reported times later than the server's clock; clocks of machines differ."""
RECENT_ITERATIONS = 200
START_LOSSES = 20
"""Finite losses at the start of a job whose median is the scale of its loss."""
LOSS = "loss"
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


_stored = msgspec.msgpack.Decoder(RecentSamples)


def recent_samples(stored: bytes | None) -> RecentSamples:
    """Decode what is stored of a job."""
    return _stored.decode(stored) if stored else RecentSamples()


def latest(
    recent: RecentSamples,
    seconds: Sequence[float],
    loss: Sequence[float],
    last: Mapping[str, float],
    finite_loss_iteration: int | None = None,
) -> RecentSamples:
    """Return `recent` with the newest seconds, losses and metrics of a batch added.

    `finite_loss_iteration`: the last of the batch with a finite loss, if there is one.
    """
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
    )


def _newest(values: Sequence[float]) -> float:
    """Return the last value of a column; of a sparse column the last measured value.

    It is nan if the last measured value is older than twice the usual distance between measured values.
    """
    places = [place for place, value in enumerate(values) if not math.isnan(value)]
    if not places or 2 * sum(map(math.isfinite, values)) > len(values):  # none measured, or not sparse
        return values[-1]
    usual = max((after - before for before, after in pairwise(places)), default=RECENT_ITERATIONS)
    return values[places[-1]] if len(values) - 1 - places[-1] <= 2 * usual else NAN


def total(values: Iterable[float]) -> float:
    """Return the sum of the finite values."""
    return sum(filter(math.isfinite, values))
