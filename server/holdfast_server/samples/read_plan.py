"""Read plans of timelines: which iterations of which series to read, and at which level. Pure functions.

Several attempts may report the same iterations of a lineage, because a crash repeats them. Between the first and
the last iteration that an attempt reported of a lineage only its samples count, unless a later attempt reported
them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.protocol.field_types import MAX_ITERATION
from holdfast_server.models import SampleSeriesRecord
from holdfast_server.samples.rollups import LEVELS

MOST_WHOLE_ROWS = 16_384
MOST_BUCKETS = 2048
"""A window with more of either is read from coarser roll-ups, even if it has points for finer ones: it keeps at
least a quarter as many buckets, and reads quickly."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Iterations of one series from `first` to `last`, which count."""

    series: SampleSeriesRecord
    first: int
    last: int
    level: int = 0
    """How to read them: 0 as samples, else from the roll-ups of this level that end among them."""


@dataclass(frozen=True, slots=True)
class IterationWindow:
    start: int
    end: int
    points: int


@dataclass(frozen=True, slots=True)
class PlannedRead:
    """Segments that make up one series of the response."""

    lineage: int
    abandoned: bool
    lost: bool
    segments: Sequence[Segment]
    width: int = 1
    """Iterations in a bucket if there are more iterations than points."""
    each: bool = True
    """Whether the estimated rows fit the points, so that each is shown by itself."""

    @property
    def rows(self) -> float:
        return sum(rows_between(one.series, one.first, one.last) for one in self.segments)


def rows_between(series: SampleSeriesRecord, first: int, last: int) -> float:
    """Estimate the number of rows between two iterations."""
    return series.rows * (last - first + 1) / (series.last_iteration - series.first_iteration + 1)


def lines(
    all_series: Iterable[SampleSeriesRecord], window: IterationWindow, *, uid: str, lineage: int, reached: int
) -> list[PlannedRead]:
    """Plan a window of iterations by lineage; iterations of the current lineage beyond `reached` were lost."""
    found = []
    for number, owned in _counting_by_lineage(all_series, uid):
        if number != lineage or reached >= window.end:
            found.append(PlannedRead(number, number != lineage, False, _within(owned, window.start, window.end)))
            continue
        found.append(PlannedRead(number, False, False, _within(owned, window.start, reached)))
        found.append(PlannedRead(number, True, True, _within(owned, max(window.start, reached + 1), window.end)))
    return [line for line in found if line.segments]


def lines_in_time(
    all_series: Iterable[SampleSeriesRecord],
    cuts: Mapping[int, tuple[int, int]],
    *,
    uid: str,
    lineage: int,
    reached: int,
) -> list[PlannedRead]:
    """Plan a window of time by lineage, with the iterations that were repeated later as lost lines.

    `cuts`: by series, its first and last iteration in the window.
    """
    all_series = [one for one in all_series if one.id in cuts]
    found = []
    for number, owned in _counting_by_lineage(all_series, uid):
        ends = reached if number == lineage else MAX_ITERATION
        found.append(PlannedRead(number, number != lineage, False, _cut(owned, cuts, 0, ends)))
        found.append(PlannedRead(number, True, True, _cut(owned, cuts, ends + 1, MAX_ITERATION)))
        repeated = (
            _cut(_repeated(one, owned), cuts, 0, MAX_ITERATION) for one in all_series if one.lineage == number
        )
        found += [PlannedRead(number, True, True, segments) for segments in repeated]
    return [line for line in found if line.segments]


def _cut(segments: Iterable[Segment], cuts: Mapping[int, tuple[int, int]], start: int, end: int) -> list[Segment]:
    made: list[Segment] = []
    for one in segments:
        first, last = cuts[one.series.id]
        made += _within([one], max(first, start), min(last, end))
    return made


def _repeated(series: SampleSeriesRecord, owned: Iterable[Segment]) -> Iterator[Segment]:
    """Yield the iterations of a series that do not count."""
    begin = series.first_iteration
    for one in owned:
        if one.series is series:
            if begin < one.first:
                yield Segment(series, begin, one.first - 1)
            begin = one.last + 1
    if begin <= series.last_iteration:
        yield Segment(series, begin, series.last_iteration)


def _counting_by_lineage(
    all_series: Iterable[SampleSeriesRecord], uid: str
) -> Iterator[tuple[int, list[Segment]]]:
    by_lineage: dict[int, list[SampleSeriesRecord]] = {}
    for series in all_series:
        by_lineage.setdefault(series.lineage, []).append(series)
    for number, some in sorted(by_lineage.items()):
        newest_first = sorted(some, key=lambda one: (one.uid == uid, one.attempt, one.id), reverse=True)
        yield number, sorted(_counting(newest_first), key=lambda one: one.first)


def _counting(newest_first: Sequence[SampleSeriesRecord]) -> Iterator[Segment]:
    taken: list[tuple[int, int]] = []
    for series in newest_first:
        begin = series.first_iteration
        for first, last in taken:
            if begin < first:
                yield Segment(series, begin, min(first - 1, series.last_iteration))
            begin = max(begin, last + 1)
            if begin > series.last_iteration:
                break
        if begin <= series.last_iteration:
            yield Segment(series, begin, series.last_iteration)
        taken = _merged_spans(sorted([*taken, (series.first_iteration, series.last_iteration)]))


def _merged_spans(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    made: list[tuple[int, int]] = []
    for first, last in spans:
        if made and first <= made[-1][1] + 1:
            made[-1] = (made[-1][0], max(made[-1][1], last))
        else:
            made.append((first, last))
    return made


def _within(segments: Iterable[Segment], start: int, end: int) -> list[Segment]:
    cut = (Segment(one.series, max(one.first, start), min(one.last, end)) for one in segments)
    return [one for one in cut if one.first <= one.last]


def plan(line: PlannedRead, points: int) -> PlannedRead:
    """Split a line's segments into the reads that show it with so many points."""
    span = line.segments[-1].last - line.segments[0].first + 1
    # The span may touch one bucket more than span / width. Edges are multiples of a power of two, so that a live
    # timeline grows at its end without changing its earlier points.
    width = 1 << max(0, -(-span // max(1, points - 1)) - 1).bit_length()
    rows = line.rows
    level = 0 if rows <= points else max((level for level in LEVELS if 1 << level <= width), default=0)
    if level == 0 and rows > max(points, MOST_WHOLE_ROWS):
        level = LEVELS[0]
    if level:
        level = next(
            (coarser for coarser in LEVELS if coarser >= level and span >> coarser <= MOST_BUCKETS), LEVELS[-1]
        )
        width = max(width, 1 << level)
    reads = [part for one in line.segments for part in _cover(one.series, one.first, one.last, level)]
    return replace(line, segments=reads, width=width, each=rows <= points)


def _cover(series: SampleSeriesRecord, first: int, last: int, level: int) -> Iterator[Segment]:
    """Cover iterations with buckets of a level, and the ends, where none fits or is stored, with finer ones."""
    if level == 0:
        if first < series.chunks_from:
            yield from _rolled(series, first, min(last, series.chunks_from - 1), LEVELS[0])
        if last >= series.chunks_from:
            yield Segment(series, max(first, series.chunks_from), last)
        return
    width, finer = 1 << level, max((one for one in LEVELS if one < level), default=0)
    begin = first if first <= series.first_iteration else -(-first // width) * width
    whole = level == LEVELS[0] and last >= series.last_iteration
    end = last if whole else (last + 1) // width * width - 1
    if begin > end:
        yield from _cover(series, first, last, finer)
        return
    if first < begin:
        yield from _cover(series, first, begin - 1, finer)
    yield from _rolled(series, begin, end, level)
    if end < last:
        yield from _cover(series, end + 1, last, finer)


def _rolled(series: SampleSeriesRecord, first: int, last: int, level: int) -> Iterator[Segment]:
    if level == LEVELS[0] and first < series.finest_from:
        yield Segment(series, first, min(last, series.finest_from - 1), LEVELS[1])
        first = series.finest_from
    if first <= last:
        yield Segment(series, first, last, level)
