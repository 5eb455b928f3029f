"""Series of a timeline from chunks and roll-ups: a limited number of points with mean, minimum and maximum.

Pure functions over arrays, which run off the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from holdfast.protocol.timeline import MeanAndMax, MinMeanMax, Series
from holdfast_server.samples import rollups, sample_codec
from holdfast_server.samples.read_plan import PlannedRead, Segment
from holdfast_server.samples.rollups import DOWN, LAST, MAXIMUM, MINIMUM, NAN, SUM, UP, Rollup
from holdfast_server.samples.sample_codec import BUILT_IN, Floats, Ints, Table
from holdfast_server.samples.sample_series import names_of

AT, SECONDS, STALL_SECONDS, DATA_SECONDS = range(len(BUILT_IN))

Rolled = tuple[int, int, int, bytes]
"""First and last iteration, rows and encoded columns of a bucket."""


class TimelineData:
    """Chunks, oldest first, and buckets by level, as read of each series."""

    def __init__(self, chunks: Mapping[int, Sequence[bytes]], rolled: Mapping[tuple[int, int], Sequence[Rolled]]):
        self._chunks, self._rolled = chunks, rolled
        self._tables: dict[int, Table] = {}

    def part(self, read: Segment, width: int) -> tuple[Sequence[str], Rollup] | None:
        """Return the metrics of a segment, and its buckets of `width` iterations or more."""
        return self._whole(read, width) if read.level == 0 else self._coarse(read)

    def _whole(self, read: Segment, width: int) -> tuple[Sequence[str], Rollup] | None:
        series = read.series.id
        if series not in self._tables:
            tables = [sample_codec.unpack(chunk) for chunk in self._chunks.get(series, ())]
            if not tables:
                return None
            names = dict.fromkeys(name for table in tables for name in table.metrics)
            self._tables[series] = sample_codec.concatenated(tables, tuple(names))
        table = self._tables[series].between(read.first, read.last)
        return (table.metrics, rollups.of_table(table, width)) if len(table) else None

    def _coarse(self, read: Segment) -> tuple[Sequence[str], Rollup] | None:
        names = names_of(read.series.metrics)
        rows = [
            row for row in self._rolled.get((read.series.id, read.level), ()) if read.first <= row[1] <= read.last
        ]
        return (names, rollups.decoded(rows, len(BUILT_IN) + len(names))) if rows else None


def buckets_of(
    plan: PlannedRead, contents: TimelineData, points: int, metrics: Sequence[str] | None = None
) -> tuple[Sequence[str], Rollup] | None:
    """Return the names of the metrics, or of those that `metrics` selects, and about `points` buckets."""
    width = 1 if plan.each else plan.width
    found = [part for read in plan.segments if (part := contents.part(read, width)) is not None]
    if not found:
        return None
    names = list(dict.fromkeys(name for known, _ in found for name in known if metrics is None or name in metrics))
    parts = [rollups.aligned(rollup, known, names) for known, rollup in found]
    return names, rollups.combined(parts, plan.width if sum(map(len, parts)) > points else width)


def series(
    plan: PlannedRead,
    contents: TimelineData,
    points: int,
    *,
    metrics: Sequence[str] | None = None,
    digits: int | None = None,
    times: tuple[float, float] | None = None,
) -> tuple[Series, bool] | None:
    """Build one series; return it and whether any of its points represents more than one iteration.

    `metrics`: only these. `digits`: significant digits of the values. `times`: only points in between, and one on
    each side.
    """
    if (found := buckets_of(plan, contents, points, metrics)) is None:
        return None
    names, buckets = found
    if times is not None:
        at = buckets.stats[:, AT, LAST]
        begin, end = np.searchsorted(at, times[0]) - 1, np.searchsorted(at, times[1], side="right") + 1
        buckets = buckets.where(slice(max(0, begin), end))
    if len(buckets) == 0:
        return None
    wanted = {name: column for column, name in enumerate(names, len(BUILT_IN))}
    return _as_series(plan, buckets, wanted, digits), int(buckets.rows.max()) > 1


def _as_series(plan: PlannedRead, buckets: Rollup, wanted: Mapping[str, int], digits: int | None) -> Series:
    finite = buckets.finite
    at = buckets.stats[:, AT, LAST]
    return Series(
        lineage=plan.lineage,
        abandoned=plan.abandoned,
        lost=plan.lost,
        iteration=buckets.last.tolist(),
        at=(at if digits is None else np.round(at, 3)).tolist(),
        seconds=MeanAndMax(
            mean=_listed(_mean(buckets, finite, SECONDS), digits),
            max=_listed(_extreme(buckets, finite, SECONDS, MAXIMUM), digits),
        ),
        stall_seconds=_listed(buckets.stats[:, STALL_SECONDS, SUM], digits),
        data_seconds=_listed(buckets.stats[:, DATA_SECONDS, SUM], digits),
        metrics={name: _band(buckets, finite, column, digits) for name, column in wanted.items()},
    )


def _listed(values: Floats, digits: int | None) -> list[float]:
    listed: list[float] = (values if digits is None else _rounded(values, digits)).tolist()
    return listed


def _rounded(values: Floats, digits: int) -> Floats:
    size = np.abs(values)
    rounds = np.isfinite(values) & (size > 1e-290) & (size < 1e290)
    scale = 10.0 ** (digits - 1 - np.floor(np.log10(np.where(rounds, size, 1.0))))
    with np.errstate(invalid="ignore"):
        rounded: Floats = np.where(rounds, np.round(values * scale) / scale, values)
    return rounded


def _band(buckets: Rollup, finite: Ints, column: int, digits: int | None) -> MinMeanMax:
    mean = _mean(buckets, finite, column)
    # If most iterations are measured, a non-finite value matters, and a mean would hide it.
    if 2 * finite[:, column].sum() > buckets.rows.sum():
        odd = finite[:, column] < buckets.rows
        mean[odd] = _odd(buckets, column)[odd]
    return MinMeanMax(
        mean=_listed(mean, digits),
        min=_listed(_extreme(buckets, finite, column, MINIMUM), digits),
        max=_listed(_extreme(buckets, finite, column, MAXIMUM), digits),
    )


def _mean(buckets: Rollup, finite: Ints, column: int) -> Floats:
    """Return the mean of the finite values; infinite or nan if there are none."""
    count = finite[:, column]
    mean: Floats = buckets.stats[:, column, SUM] / np.maximum(count, 1)
    none = count == 0
    if none.any():
        infinite = np.where(buckets.odd[:, column, NAN] < buckets.rows, _sum_of_infinite(buckets, column), np.nan)
        mean[none] = infinite[none]
    return mean


def _odd(buckets: Rollup, column: int) -> Floats:
    """Return nan or infinity where any value is nan or infinite."""
    infinite = _sum_of_infinite(buckets, column)
    made: Floats = np.where(buckets.odd[:, column, NAN] > 0, np.nan, infinite)
    return made


def _sum_of_infinite(buckets: Rollup, column: int) -> Floats:
    up, down = buckets.odd[:, column, UP] > 0, buckets.odd[:, column, DOWN] > 0
    made: Floats = np.where(up & down, np.nan, np.where(up, np.inf, np.where(down, -np.inf, np.nan)))
    return made


def _extreme(buckets: Rollup, finite: Ints, column: int, kind: int) -> Floats:
    """Return the minimum or maximum of the measured values, including infinities."""
    toward, away = (DOWN, UP) if kind == MINIMUM else (UP, DOWN)
    beyond = {UP: np.inf, DOWN: -np.inf}
    value = buckets.stats[:, column, kind].copy()
    none = finite[:, column] == 0
    value[none] = np.nan
    value[none & (buckets.odd[:, column, away] > 0)] = beyond[away]
    value[buckets.odd[:, column, toward] > 0] = beyond[toward]
    return value
