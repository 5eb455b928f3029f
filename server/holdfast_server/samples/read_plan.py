"""What a timeline reads: which iterations of which stretch, and as what. Pure functions.

Several attempts may have reported the same iterations of a lineage: after a crash they are repeated. From the
first to the last iteration that an attempt has reported of a lineage it alone counts, and the later the attempt,
the more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.protocol.messages import MAX_ITERATION
from holdfast_server.models import StretchRecord
from holdfast_server.samples.rollups import LEVELS

MOST_WHOLE_ROWS = 16_384
MOST_BUCKETS = 2048
"""A window with more of either is read as coarser roll-ups, even where it has points for finer ones: at least a
quarter as many buckets are left, and it is read in the time of a few frames."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Iterations of one stretch, from `first` to `last`, which count."""

    stretch: StretchRecord
    first: int
    last: int
    level: int = 0
    """How to read them: whole, or as the roll-ups of a level that end among them."""


@dataclass(frozen=True, slots=True)
class Window:
    start: int
    end: int
    points: int


@dataclass(frozen=True, slots=True)
class PlannedRead:
    """What one series of the answer is made of."""

    lineage: int
    abandoned: bool
    lost: bool
    segments: Sequence[Segment]
    width: int = 1
    """Iterations in a bucket where there are more of them than points."""
    each: bool = True
    """By its stretches' looks there are no more, so that each is read by itself."""

    @property
    def rows(self) -> float:
        return sum(rows_between(one.stretch, one.first, one.last) for one in self.segments)


def rows_between(stretch: StretchRecord, first: int, last: int) -> float:
    """About how many rows lie there."""
    return stretch.rows * (last - first + 1) / (stretch.last_iteration - stretch.first_iteration + 1)


def lines(
    stretches: Iterable[StretchRecord], window: Window, *, uid: str, lineage: int, reached: int
) -> list[PlannedRead]:
    """By lineage. What the current one holds beyond where the job has got to, an earlier attempt has lost."""
    found = []
    for number, owned in _owned_by_lineage(stretches, uid):
        if number != lineage or reached >= window.end:
            found.append(PlannedRead(number, number != lineage, False, _within(owned, window.start, window.end)))
            continue
        found.append(PlannedRead(number, False, False, _within(owned, window.start, reached)))
        found.append(PlannedRead(number, True, True, _within(owned, max(window.start, reached + 1), window.end)))
    return [line for line in found if line.segments]


def lines_in_time(
    stretches: Iterable[StretchRecord],
    cuts: Mapping[int, tuple[int, int]],
    *,
    uid: str,
    lineage: int,
    reached: int,
) -> list[PlannedRead]:
    """What counts, by lineage, and beside it what each stretch reported that was repeated later: in time nothing
    lies on anything else. `cuts`: which iterations of which stretch lie in the window."""
    stretches = [one for one in stretches if one.id in cuts]
    found = []
    for number, owned in _owned_by_lineage(stretches, uid):
        ends = reached if number == lineage else MAX_ITERATION
        found.append(PlannedRead(number, number != lineage, False, _cut(owned, cuts, 0, ends)))
        found.append(PlannedRead(number, True, True, _cut(owned, cuts, ends + 1, MAX_ITERATION)))
        beside = (
            _cut(_repeated(one, owned), cuts, 0, MAX_ITERATION) for one in stretches if one.lineage == number
        )
        found += [PlannedRead(number, True, True, segments) for segments in beside]
    return [line for line in found if line.segments]


def _cut(segments: Iterable[Segment], cuts: Mapping[int, tuple[int, int]], start: int, end: int) -> list[Segment]:
    made: list[Segment] = []
    for one in segments:
        first, last = cuts[one.stretch.id]
        made += _within([one], max(first, start), min(last, end))
    return made


def _repeated(stretch: StretchRecord, owned: Iterable[Segment]) -> Iterator[Segment]:
    """What of a stretch does not count."""
    begin = stretch.first_iteration
    for one in owned:
        if one.stretch is stretch:
            if begin < one.first:
                yield Segment(stretch, begin, one.first - 1)
            begin = one.last + 1
    if begin <= stretch.last_iteration:
        yield Segment(stretch, begin, stretch.last_iteration)


def _owned_by_lineage(stretches: Iterable[StretchRecord], uid: str) -> Iterator[tuple[int, list[Segment]]]:
    by_lineage: dict[int, list[StretchRecord]] = {}
    for stretch in stretches:
        by_lineage.setdefault(stretch.lineage, []).append(stretch)
    for number, some in sorted(by_lineage.items()):
        newest_first = sorted(some, key=lambda one: (one.uid == uid, one.attempt, one.id), reverse=True)
        yield number, sorted(_owned(newest_first), key=lambda one: one.first)


def _owned(newest_first: Sequence[StretchRecord]) -> Iterator[Segment]:
    taken: list[tuple[int, int]] = []
    for stretch in newest_first:
        begin = stretch.first_iteration
        for first, last in taken:
            if begin < first:
                yield Segment(stretch, begin, min(first - 1, stretch.last_iteration))
            begin = max(begin, last + 1)
            if begin > stretch.last_iteration:
                break
        if begin <= stretch.last_iteration:
            yield Segment(stretch, begin, stretch.last_iteration)
        taken = _merged(sorted([*taken, (stretch.first_iteration, stretch.last_iteration)]))


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    made: list[tuple[int, int]] = []
    for first, last in spans:
        if made and first <= made[-1][1] + 1:
            made[-1] = (made[-1][0], max(made[-1][1], last))
        else:
            made.append((first, last))
    return made


def _within(segments: Iterable[Segment], start: int, end: int) -> list[Segment]:
    cut = (Segment(one.stretch, max(one.first, start), min(one.last, end)) for one in segments)
    return [one for one in cut if one.first <= one.last]


def plan(line: PlannedRead, points: int) -> PlannedRead:
    """The line with its segments as they are to be read."""
    span = line.segments[-1].last - line.segments[0].first + 1
    # One bucket more than span / width can be touched: edges are multiples of a power of two, so that a live
    # timeline grows at its end and does not shimmer, and need not meet the first iteration.
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
    reads = [part for one in line.segments for part in _cover(one.stretch, one.first, one.last, level)]
    return replace(line, segments=reads, width=width, each=rows <= points)


def _cover(stretch: StretchRecord, first: int, last: int, level: int) -> Iterator[Segment]:
    """Buckets of a level, and at the ends, where a bucket holds more than is asked for or is not stored yet,
    something finer."""
    if level == 0:
        if first < stretch.whole_from:
            yield from _rolled(stretch, first, min(last, stretch.whole_from - 1), LEVELS[0])
        if last >= stretch.whole_from:
            yield Segment(stretch, max(first, stretch.whole_from), last)
        return
    width, finer = 1 << level, max((one for one in LEVELS if one < level), default=0)
    begin = first if first <= stretch.first_iteration else -(-first // width) * width
    whole = level == LEVELS[0] and last >= stretch.last_iteration
    end = last if whole else (last + 1) // width * width - 1
    if begin > end:
        yield from _cover(stretch, first, last, finer)
        return
    if first < begin:
        yield from _cover(stretch, first, begin - 1, finer)
    yield from _rolled(stretch, begin, end, level)
    if end < last:
        yield from _cover(stretch, end + 1, last, finer)


def _rolled(stretch: StretchRecord, first: int, last: int, level: int) -> Iterator[Segment]:
    if level == LEVELS[0] and first < stretch.fine_from:
        yield Segment(stretch, first, min(last, stretch.fine_from - 1), LEVELS[1])
        first = stretch.fine_from
    if first <= last:
        yield Segment(stretch, first, last, level)
