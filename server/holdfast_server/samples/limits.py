"""What samples may be, and what a job's summary remembers of the newest. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec

MAX_METRICS = 100
MAX_NAME = 200
TIMES_END = 253_402_300_800.0
"""The year 10000: from here on no calendar has a name for a time."""
MAX_SECONDS = 1e10
MAX_AHEAD_SECONDS = 300.0
"""How far a reported time may lie beyond the server's clock; clocks of machines differ."""
RECENT_ITERATIONS = 200
LOSS = "loss"
NAN = math.nan


class Recent(msgspec.Struct, kw_only=True):
    """What a job's summary shows of its newest samples."""

    seconds: list[float] = []
    loss: list[float] = []
    metrics: dict[str, float] = {}
    """The last of each; of the loss, the last that was measured."""


def is_time(at: float) -> bool:
    """Whether these seconds since the epoch are a time that a page can show."""
    return 0 <= at < TIMES_END


def is_span(seconds: float) -> bool:
    return 0 <= seconds <= MAX_SECONDS


def latest(recent: Recent, seconds: Sequence[float], loss: Sequence[float], last: Mapping[str, float]) -> Recent:
    """`recent`, moved on by a batch: by its newest seconds and losses, if it has any, and its last metrics."""
    losses = recent.loss
    if losses or loss:
        losses = [*losses, *(loss or [NAN] * len(seconds))][-RECENT_ITERATIONS:]
    metrics = dict(recent.metrics)
    for name, value in last.items():
        if name in metrics or len(metrics) < MAX_METRICS:
            metrics[name] = value
    if losses:
        metrics[LOSS] = _newest(losses)
    return Recent(seconds=[*recent.seconds, *seconds][-RECENT_ITERATIONS:], loss=losses, metrics=metrics)


def _newest(values: Sequence[float]) -> float:
    """What a column stands at: its last value where nearly all are measured, else the last that was.

    After twice the time from one measured value to the next without another, it is nan all the same.
    """
    places = [place for place, value in enumerate(values) if not math.isnan(value)]
    if not places or _mostly_finite(values):
        return values[-1]
    usual = max((after - before for before, after in pairwise(places)), default=RECENT_ITERATIONS)
    return values[places[-1]] if len(values) - 1 - places[-1] <= 2 * usual else NAN


def total(values: Iterable[float]) -> float:
    """Sum of what was measured."""
    return sum(filter(math.isfinite, values))


def _mostly_finite(column: Sequence[float]) -> bool:
    return 2 * sum(map(math.isfinite, column)) > len(column)
