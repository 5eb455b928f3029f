"""Roll-ups: statistics of many iterations by bucket, so that long series are read as few rows.

A bucket of 2^level iterations begins at a multiple of its width. It holds minimum, maximum and sum of the finite
values, the last value, and the counts of nan, +inf and -inf, so that buckets of a fine level, or parts of a
bucket, add up to a coarser one. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from holdfast_server.samples.sample_codec import BUILT_IN, Floats, Ints, Table

LEVELS = (6, 8, 10, 12, 14)
"""Powers of two. Each level takes a quarter of the space of the one below, and no window needs much more than four
times the buckets that it shows.

Every bucket of the finest level is stored. A bucket of another level is stored once the series has passed its end:
until then the finer buckets represent it, so that a batch does not rewrite a bucket of every level."""
MINIMUM, MAXIMUM, SUM, LAST = range(4)
NAN, UP, DOWN = range(3)
_NOTHING = (np.inf, -np.inf, 0.0, np.nan)
_STATS_BYTES, _ODD_BYTES = 4 * 8, 3 * 4


@dataclass(frozen=True, slots=True)
class Rollup:
    """Buckets in the order of their iterations."""

    first: Ints
    last: Ints
    """First and last iteration in each bucket."""
    rows: Ints
    stats: Floats
    """MINIMUM, MAXIMUM, SUM and LAST by bucket and column."""
    odd: Ints
    """Counts of NAN, UP (+inf) and DOWN (-inf) by bucket and column."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def finite(self) -> Ints:
        """Return the number of finite values by bucket and column."""
        made: Ints = self.rows[:, None] - self.odd.sum(axis=2)
        return made

    def where(self, chosen: Any) -> Rollup:
        return Rollup(
            self.first[chosen], self.last[chosen], self.rows[chosen], self.stats[chosen], self.odd[chosen]
        )


def of_table(table: Table, width: int) -> Rollup:
    starts = _starts(table.iteration // width)
    ends = _ends(starts, len(table))
    values = table.values
    finite = np.isfinite(values)
    made = Rollup(
        first=table.iteration[starts],
        last=table.iteration[ends],
        rows=ends - starts + 1,
        stats=np.empty((len(starts), len(values), 4)),
        odd=np.zeros((len(starts), len(values), 3), np.int64),
    )
    low = high = amount = values
    if not finite.all():
        low, high, amount = (np.where(finite, values, nothing) for nothing in _NOTHING[:3])
        for kind, odd in ((NAN, np.isnan(values)), (UP, values == np.inf), (DOWN, values == -np.inf)):
            made.odd[:, :, kind] = np.add.reduceat(odd, starts, axis=1, dtype=np.int64).T
    made.stats[:, :, MINIMUM] = np.minimum.reduceat(low, starts, axis=1).T
    made.stats[:, :, MAXIMUM] = np.maximum.reduceat(high, starts, axis=1).T
    with np.errstate(over="ignore"):
        made.stats[:, :, SUM] = np.add.reduceat(amount, starts, axis=1).T
    made.stats[:, :, LAST] = values[:, ends].T
    return made


def combined(parts: Sequence[Rollup], width: int) -> Rollup:
    """Combine buckets, or parts of buckets, to buckets of `width`; a wider one stays as it is."""
    whole = _joined(parts)
    if len(parts) > 1:
        whole = whole.where(np.argsort(whole.last, kind="stable"))
    starts = _starts(whole.last // width)
    return whole if len(starts) == len(whole) else _added_up(whole, starts)


def closing(reached: int, end: int) -> Iterator[tuple[int, range]]:
    """Yield by level, finest first, the buckets that a series completes by growing from `reached` to `end`.

    Both are the iteration after the last.
    """
    for level in LEVELS[1:]:
        if reached >> level == end >> level:
            return
        yield level, range(reached >> level, end >> level)


def open_buckets(first: int, reached: int, end: int) -> dict[int, tuple[int, int]]:
    """Return by level the first and last stored bucket to which iterations from `first` to before `end` add.

    The series ended before iteration `reached`.
    """
    finest, here = LEVELS[0], (reached - 1) >> LEVELS[0]
    found = {finest: (here, here)} if first >> finest == here else {}
    for level, (closed, _) in zip(LEVELS, closing(reached, end), strict=False):
        # those within the completed bucket of the next level
        begin = reached >> closed << (closed - level)
        found[level] = begin, here if level == finest else (reached >> level) - 1
    return found


def grown(
    fine: Rollup, reached: int, stored: Rollup | None = None, levels: Sequence[int] = ()
) -> tuple[list[int], Rollup]:
    """Add buckets of the finest level to the end of a series that ended before iteration `reached`.

    `stored`: its `open_buckets` in the order of iterations, with their `levels`. Returns the buckets to write, and
    the level of each. Python finds which bucket goes into which, and one call adds them up: a batch has few
    buckets, and each call of numpy has a fixed cost.
    """
    whole = fine if stored is None else _joined([stored, fine])
    last = whole.last.tolist()
    finest, added = LEVELS[0], range(len(levels), len(last))
    here = last[added[0]] >> finest
    shared = [place for place, level in enumerate(levels) if level == finest and last[place] >> finest == here]
    members = [(finest, [*shared, *added])]
    for level, buckets in closing(reached, last[-1] + 1):
        finer = [place for place, one in enumerate(levels) if one < level]
        members.append((level, [place for place in (*finer, *added) if last[place] >> level in buckets]))
    return _in_buckets(whole, last, members)


def late(fine: Rollup, reached: int, stored: Rollup | None, levels: Sequence[int]) -> tuple[list[int], Rollup]:
    """Add late buckets of the finest level to a series that has passed them; otherwise as `grown`.

    `stored`: the buckets of every level that contain their iterations.
    """
    whole = fine if stored is None else _joined([fine, stored])
    last = whole.last.tolist()
    members = []
    for level in LEVELS:
        places = (*range(len(fine)), *(place for place, one in enumerate(levels, len(fine)) if one == level))
        past = (place for place in places if level == LEVELS[0] or last[place] >> level < reached >> level)
        members.append((level, sorted(past, key=last.__getitem__)))
    return _in_buckets(whole, last, members)


def _in_buckets(
    whole: Rollup, last: Sequence[int], members: Iterable[tuple[int, Iterable[int]]]
) -> tuple[list[int], Rollup]:
    """Add up `members`, the rows by level and in order, to buckets; return the levels of these, and them."""
    order, starts, found = list[int](), list[int](), list[int]()
    for level, places in members:
        at = -1
        for place in places:
            if last[place] >> level != at:
                at = last[place] >> level
                starts.append(len(order))
                found.append(level)
            order.append(place)
    return found, _added_up(whole.where(order), np.array(starts))


def _joined(parts: Sequence[Rollup]) -> Rollup:
    if len(parts) == 1:
        return parts[0]
    return Rollup(
        first=np.concatenate([part.first for part in parts]),
        last=np.concatenate([part.last for part in parts]),
        rows=np.concatenate([part.rows for part in parts]),
        stats=np.concatenate([part.stats for part in parts]),
        odd=np.concatenate([part.odd for part in parts]),
    )


def _added_up(whole: Rollup, starts: Ints) -> Rollup:
    """Add up one bucket for each run, which begin at `starts`."""
    ends = _ends(starts, len(whole))
    count, odd = len(starts), whole.odd
    stats = np.empty((count, *whole.stats.shape[1:]))
    stats[:, :, MINIMUM] = np.minimum.reduceat(whole.stats[:, :, MINIMUM], starts)
    stats[:, :, MAXIMUM] = np.maximum.reduceat(whole.stats[:, :, MAXIMUM], starts)
    with np.errstate(over="ignore", invalid="ignore"):
        stats[:, :, SUM] = np.add.reduceat(whole.stats[:, :, SUM], starts)
    stats[:, :, LAST] = whole.stats[ends, :, LAST]
    return Rollup(
        first=np.minimum.reduceat(whole.first, starts),
        last=whole.last[ends],
        rows=np.add.reduceat(whole.rows, starts),
        stats=stats,
        odd=np.add.reduceat(odd, starts) if odd.any() else np.zeros((count, *odd.shape[1:]), np.int64),
    )


def aligned(rollup: Rollup, metrics: Sequence[str], wanted: Sequence[str]) -> Rollup:
    """Return a roll-up with the columns of BUILT_IN and of `wanted`; a missing one counts as not measured."""
    places = {name: place for place, name in enumerate(metrics, len(BUILT_IN))}
    chosen = [*range(len(BUILT_IN)), *(places.get(name, -1) for name in wanted)]
    if chosen == list(range(rollup.stats.shape[1])):
        return rollup
    missing = np.array(chosen) < 0
    stats, odd = rollup.stats[:, chosen], rollup.odd[:, chosen]
    stats[:, missing] = _NOTHING
    odd[:, missing] = 0
    odd[:, missing, NAN] = rollup.rows[:, None]
    return replace(rollup, stats=stats, odd=odd)


def encoded(rollup: Rollup) -> Iterator[bytes]:
    """Encode the columns of each bucket. If all values are finite, as usual, the counts of others are omitted."""
    stats = rollup.stats.astype("<f8", copy=False)
    if not rollup.odd.any():
        yield from map(np.ndarray.tobytes, stats)
        return
    odd = rollup.odd.astype("<u4")
    plain = (rollup.odd.sum(axis=(1, 2)) == 0).tolist()
    for bucket, of_it in enumerate(stats):
        yield of_it.tobytes() if plain[bucket] else of_it.tobytes() + odd[bucket].tobytes() + b"\0"


def decoded(rows: Sequence[tuple[int, int, int, bytes]], columns: int) -> Rollup:
    """Decode rows of (first iteration, last iteration, rows, encoded columns), in their order.

    Buckets from before the first report of a metric have fewer columns.
    """
    numbers, sizes = np.array([row[:3] for row in rows], np.int64), [len(row[3]) for row in rows]
    first, last, count = numbers.T
    odd = np.zeros((len(rows), columns, 3), np.int64)
    if set(sizes) == {columns * _STATS_BYTES}:  # as usual: no copy needed
        stats = np.frombuffer(b"".join([row[3] for row in rows]), "<f8").reshape(-1, columns, 4)
        return Rollup(first, last, count, stats, odd)
    made = Rollup(first, last, count, np.empty((len(rows), columns, 4)), odd)
    for size in set(sizes):
        chosen = [place for place, one in enumerate(sizes) if one == size]
        content = np.frombuffer(b"".join([rows[place][3] for place in chosen]), np.uint8).reshape(-1, size)
        known = size // (_STATS_BYTES + (_ODD_BYTES if size % 2 else 0))
        stats = np.ascontiguousarray(content[:, : known * _STATS_BYTES]).view("<f8")
        made.stats[chosen, :known] = stats.reshape(len(chosen), known, 4)
        made.stats[chosen, known:] = _NOTHING
        made.odd[chosen, known:, NAN] = made.rows[chosen, None]
        if size % 2:
            odd = np.ascontiguousarray(content[:, known * _STATS_BYTES : -1]).view("<u4")
            made.odd[chosen, :known] = odd.reshape(len(chosen), known, 3)
    return made


def last_of(encoded: bytes, column: int) -> float:
    """Return the last value of a column in one encoded bucket."""
    return float(np.frombuffer(encoded, "<f8", count=4, offset=column * _STATS_BYTES)[LAST])


def _starts(keys: Ints) -> Ints:
    """Return where runs of equal keys begin."""
    return np.concatenate([[0], np.flatnonzero(keys[1:] != keys[:-1]) + 1])


def _ends(starts: Ints, count: int) -> Ints:
    return np.concatenate([starts[1:], [count]]) - 1
