"""Samples: columns in, compressed chunks at rest, buckets of min, mean and max out. Pure functions."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import msgspec

from holdfast.protocol import Samples
from holdfast_server.views import Band, Mean, Series

MAX_ROWS = 200_000
MAX_METRICS = 100
MAX_NAME = 200
MAX_ITERATION = 2**53
TIMES_END = 253_402_300_800.0
"""The year 10000: from here on no calendar has a name for a time."""
MAX_SECONDS = 1e10
RECENT_ITERATIONS = 200
LOSS = "loss"
NAN = math.nan

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Samples)


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


def validate(samples: Samples) -> None:
    """ValueError for columns that cannot be stored."""
    rows = len(samples.iteration)
    columns = {name: len(column) for name, column in _columns(samples)}
    uneven = {name: length for name, length in columns.items() if length != rows}
    if uneven:
        raise ValueError(f"samples: columns differ in length: iteration has {rows}, {uneven}")
    if rows > MAX_ROWS:
        raise ValueError(f"samples: at most {MAX_ROWS} rows in a batch")
    if any(not 0 <= number <= MAX_ITERATION for number in (*samples.iteration, *samples.lineage)):
        raise ValueError(f"samples: iterations and lineages lie between 0 and {MAX_ITERATION}")


def settle(samples: Samples, *, at: float) -> bool:
    """Bring what no page can show within bounds; whether metrics, or parts of their names, were left out.

    A time that is none becomes `at`, and seconds that nothing can take become nan: not measured.
    """
    samples.at = [when if is_time(when) else at for when in samples.at]
    for column in (samples.seconds, samples.stall_seconds, samples.data_seconds):
        column[:] = [seconds if is_span(seconds) else NAN for seconds in column]
    kept: dict[str, list[float]] = {}
    for name, values in samples.metrics.items():
        if len(kept) < MAX_METRICS:
            kept.setdefault(name[:MAX_NAME], values)
    left_out = kept.keys() != samples.metrics.keys()
    samples.metrics = kept
    return left_out


def _columns(samples: Samples) -> Iterator[tuple[str, Sequence[float]]]:
    for name in ("lineage", "at", "seconds", "stall_seconds", "data_seconds"):
        yield name, getattr(samples, name)
    yield from samples.metrics.items()


def by_lineage(samples: Samples) -> Iterator[tuple[int, Samples]]:
    """The stretches of a batch that lie on one lineage each."""
    for lineage, run in groupby(range(len(samples.lineage)), key=samples.lineage.__getitem__):
        rows = list(run)
        yield lineage, _slice(samples, slice(rows[0], rows[-1] + 1))


def _slice(samples: Samples, rows: slice) -> Samples:
    return Samples(
        iteration=samples.iteration[rows],
        at=samples.at[rows],
        seconds=samples.seconds[rows],
        stall_seconds=samples.stall_seconds[rows],
        data_seconds=samples.data_seconds[rows],
        metrics={name: column[rows] for name, column in samples.metrics.items()},
    )


def pack(samples: Samples) -> bytes:
    return zlib.compress(_encoder.encode(samples), level=6)


def unpack(columns: bytes) -> Samples:
    return _decoder.decode(zlib.decompress(columns))


def latest(recent: Recent, samples: Samples) -> Recent:
    """`recent`, moved on by a batch."""
    rows = len(samples.iteration)
    seconds = [*recent.seconds, *samples.seconds][-RECENT_ITERATIONS:]
    loss = recent.loss
    if loss or LOSS in samples.metrics:
        loss = [*loss, *samples.metrics.get(LOSS, [NAN] * rows)][-RECENT_ITERATIONS:]
    metrics = dict(recent.metrics)
    for name, column in samples.metrics.items():
        if column and (name in metrics or len(metrics) < MAX_METRICS):
            metrics[name] = column[-1]
    if loss:
        metrics[LOSS] = _newest(loss)
    return Recent(seconds=seconds, loss=loss, metrics=metrics)


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
    return sum(value for value in values if math.isfinite(value))


@dataclass(frozen=True, slots=True)
class Window:
    start: int
    end: int
    points: int


def series(
    lineage: int, chunks: Sequence[bytes], window: Window, *, abandoned: bool, lost: bool = False
) -> tuple[Series, bool] | None:
    """One lineage in a window, in at most `points` buckets, and whether any holds more than one iteration.

    Chunks come oldest first: where an iteration was repeated after a crash, the newest one counts.
    """
    merged = _merge(chunks, window)
    if not merged.iteration:
        return None
    buckets = _buckets(merged.iteration, window.points)
    answer = Series(
        lineage=lineage,
        abandoned=abandoned,
        lost=lost,
        iteration=[merged.iteration[bucket.stop - 1] for bucket in buckets],
        at=[merged.at[bucket.stop - 1] for bucket in buckets],
        seconds=Mean(
            mean=[_mean(merged.seconds[bucket]) for bucket in buckets],
            max=[_extreme(max, merged.seconds[bucket]) for bucket in buckets],
        ),
        stall_seconds=[total(merged.stall_seconds[bucket]) for bucket in buckets],
        data_seconds=[total(merged.data_seconds[bucket]) for bucket in buckets],
        metrics={name: _band(column, buckets) for name, column in merged.metrics.items()},
    )
    return answer, len(buckets) < len(merged.iteration)


def _merge(chunks: Sequence[bytes], window: Window) -> Samples:
    parts = [unpack(chunk) for chunk in chunks]
    place = {
        iteration: (part, row)
        for part, samples in enumerate(parts)
        for row, iteration in enumerate(samples.iteration)
        if window.start <= iteration <= window.end
    }
    order = [place[iteration] for iteration in sorted(place)]
    names = dict.fromkeys(name for samples in parts for name in samples.metrics)
    metrics = {
        name: [samples.metrics.get(name) or [NAN] * len(samples.iteration) for samples in parts] for name in names
    }
    return Samples(
        iteration=[parts[part].iteration[row] for part, row in order],
        at=[parts[part].at[row] for part, row in order],
        seconds=[parts[part].seconds[row] for part, row in order],
        stall_seconds=[parts[part].stall_seconds[row] for part, row in order],
        data_seconds=[parts[part].data_seconds[row] for part, row in order],
        metrics={name: [columns[part][row] for part, row in order] for name, columns in metrics.items()},
    )


def _buckets(iterations: Sequence[int], points: int) -> list[slice]:
    """Runs of rows. Their edges are multiples of a power of two, so that a live timeline grows at its end
    and does not shimmer."""
    if len(iterations) <= points:
        return [slice(row, row + 1) for row in range(len(iterations))]
    span = iterations[-1] - iterations[0] + 1
    # One bucket more than span / width can be touched: the edges need not meet the first iteration.
    width = 1 << max(0, math.ceil(span / max(1, points - 1)) - 1).bit_length()
    buckets, start = [], 0
    for row in range(1, len(iterations) + 1):
        if row == len(iterations) or iterations[row] // width != iterations[start] // width:
            buckets.append(slice(start, row))
            start = row
    return buckets


def _band(column: Sequence[float], buckets: Sequence[slice]) -> Band:
    # Where nearly every iteration is measured, one that is no number is news, and a mean would hide it.
    mean = _mean_of_all if _mostly_finite(column) else _mean
    return Band(
        mean=[mean(column[bucket]) for bucket in buckets],
        min=[_extreme(min, column[bucket]) for bucket in buckets],
        max=[_extreme(max, column[bucket]) for bucket in buckets],
    )


def _mostly_finite(column: Sequence[float]) -> bool:
    return 2 * sum(map(math.isfinite, column)) > len(column)


def _mean_of_all(values: Sequence[float]) -> float:
    """nan or inf as soon as one of them is."""
    return sum(values) / len(values)


def _mean(values: Sequence[float]) -> float:
    """Of what was measured: a metric that is taken now and then is nan in between."""
    measured = [value for value in values if not math.isnan(value)]
    finite = [value for value in measured if math.isfinite(value)]
    if finite:
        return sum(finite) / len(finite)
    return measured[0] if measured else NAN


def _extreme(choose: Callable[[list[float]], float], values: Sequence[float]) -> float:
    measured = [value for value in values if not math.isnan(value)]
    return choose(measured) if measured else NAN
