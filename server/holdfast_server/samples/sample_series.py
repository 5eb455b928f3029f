"""Storage of samples: a chunk and the roll-ups of each batch, in the transaction of the batch.

Roll-ups are updated in the same transaction, so they are never behind; they cost a batch one read and one write of
a few rows. Compiled statements without the ORM, because nearly everything that a server stores comes through here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from sqlalchemy import ClauseElement, Connection, Select, bindparam, select, union_all, update
from sqlalchemy import insert as plain_insert

from holdfast_server import models
from holdfast_server.db import Statement, insert
from holdfast_server.samples import rollups, sample_codec
from holdfast_server.samples.limits import MAX_METRICS
from holdfast_server.samples.rollups import LEVELS, Rollup


@dataclass(frozen=True, slots=True)
class AddedSamples:
    new: bool
    """Whether the samples begin a new series."""
    left_out: bool
    """Whether metrics were left out, because the series has as many as it may have."""


_KEY = ("job", "rank", "lineage", "uid")
_GROWING: dict[str, Callable[[Any, Any], Any]] = {
    "metrics": lambda before, now: now,
    "first_iteration": min,
    "last_iteration": max,
    "last_at": max,
    "rows": operator.add,
    "chunks": operator.add,
    "chunk_bytes": operator.add,
    "widest_chunk": max,
}
"""Columns of a series that more samples change, and how to combine the old with the new value."""
_ROLLED = ("first_iteration", "last_iteration", "rows", "columns")
_names = msgspec.msgpack.Decoder(list[str])


_series, _chunks, _rollups = (
    models.table(models.SampleSeriesRecord),
    models.table(models.ChunkRecord),
    models.table(models.RollupRecord),
)
_NEW = {"chunks_from": 0, "finest_from": 0}
_FIND = Statement(
    select(_series.c.id, *(_series.c[name] for name in _GROWING)).where(
        *(_series.c[name] == bindparam(name) for name in _KEY)
    )
)
_BEGIN = Statement(
    plain_insert(_series)
    .values({name: bindparam(name) for name in (*_KEY, "attempt", *_GROWING, *_NEW)})
    .returning(_series.c.id)
)
_GROW = Statement(
    update(_series)
    .where(_series.c.id == bindparam("series"))
    .values({name: bindparam(f"new_{name}") for name in _GROWING})
)
_CHUNK = Statement(
    plain_insert(_chunks).values(
        {column.name: bindparam(column.name) for column in _chunks.c if column.name != "id"}
    )
)


def _before(level: int) -> Select[Any]:
    return select(_rollups.c.level, *(_rollups.c[name] for name in _ROLLED)).where(
        _rollups.c.series == bindparam("series"),
        _rollups.c.level == level,
        _rollups.c.bucket.between(bindparam(f"low_{level}"), bindparam(f"high_{level}")),
    )


_FINEST_BEFORE = Statement(_before(LEVELS[0]))
# One index lookup for each level: with OR, SQLite scans all buckets of the series.
_ROLLED_BEFORE = Statement(union_all(*map(_before, LEVELS)))


def _upsert(connection: Connection) -> ClauseElement:
    made = insert(connection, models.RollupRecord)
    changed = {name: made.excluded[name] for name in _ROLLED}
    return made.on_conflict_do_update(index_elements=("series", "level", "bucket"), set_=changed)


_ROLLUP = Statement(_upsert)


def add(connection: Connection, place: Mapping[str, Any], table: sample_codec.Table) -> AddedSamples:
    """Store new samples of one rank on one lineage.

    `place`: job, uid, attempt, rank, sequence and lineage of the samples.
    """
    key = {name: place[name] for name in _KEY}
    row = _FIND.first(connection, key)
    before = None if row is None else dict(zip(("id", *_GROWING), row, strict=True))
    known = _names.decode(before["metrics"]) if before is not None else []
    more = [name for name in table.metrics if name not in known]
    names = [*known, *more[: max(0, MAX_METRICS - len(known))]]
    kept = sample_codec.with_metrics(table, names)
    chunk = sample_codec.pack(kept)
    first, last = int(kept.iteration[0]), int(kept.iteration[-1])
    now: dict[str, Any] = {
        "metrics": msgspec.msgpack.encode(names),
        "first_iteration": first,
        "last_iteration": last,
        "last_at": float(kept.at.max()),
        "rows": len(kept),
        "chunks": 1,
        "chunk_bytes": len(chunk),
        "widest_chunk": last - first,
    }
    if before is None:
        (series,) = _BEGIN.first(connection, {**key, "attempt": place["attempt"], **now, **_NEW})
    else:
        series = before["id"]
        grown = {name: grow(before[name], now[name]) for name, grow in _GROWING.items()}
        _GROW.run(connection, {"series": series, **{f"new_{name}": value for name, value in grown.items()}})
    _CHUNK.run(connection, chunk_row(place, kept, chunk))
    values_of = sample_codec.aligned(kept.values, kept.metrics, names)
    reached = first if before is None else before["last_iteration"] + 1
    roll_up(connection, series, replace(kept, metrics=tuple(names), values=values_of), reached)
    return AddedSamples(new=before is None, left_out=len(kept.metrics) < len(table.metrics))


def chunk_row(place: Mapping[str, Any], table: sample_codec.Table, chunk: bytes) -> dict[str, Any]:
    return {
        **place,
        "first_iteration": int(table.iteration[0]),
        "last_iteration": int(table.iteration[-1]),
        "first_at": float(table.at.min()),
        "last_at": float(table.at.max()),
        "rows": len(table),
        "seconds": float(table.seconds[np.isfinite(table.seconds)].sum()),
        "columns": chunk,
    }


def roll_up(connection: Connection, series: int, table: sample_codec.Table, reached: int) -> None:
    """Add a table with all columns of the series to its roll-ups, which hold the iterations before `reached`."""
    behind = int(np.searchsorted(table.iteration, reached))
    if behind:
        late = table.rows(slice(0, behind))
        first, last = int(late.iteration[0]), int(late.iteration[-1])
        asked = {level: (first >> level, min(last >> level, (reached >> level) - 1)) for level in LEVELS[1:]}
        asked[LEVELS[0]] = first >> LEVELS[0], last >> LEVELS[0]
        _add_to(connection, series, late, reached, asked, rollups.late)
        table = table.rows(slice(behind, None))
    if len(table):
        first, end = int(table.iteration[0]), int(table.iteration[-1]) + 1
        asked = rollups.open_buckets(first, reached, end)
        _add_to(connection, series, table, reached, asked, rollups.grown)


def _add_to(
    connection: Connection,
    series: int,
    table: sample_codec.Table,
    reached: int,
    asked: Mapping[int, tuple[int, int]],
    add_up: Callable[[Rollup, int, Rollup | None, Sequence[int]], tuple[list[int], Rollup]],
) -> None:
    """Add a table to new buckets and to those in `asked`, the first and last bucket by level."""
    levels, stored = _stored(connection, series, asked)
    before = rollups.decoded(stored, len(table.values)) if stored else None
    found, buckets = add_up(rollups.of_table(table, 1 << LEVELS[0]), reached, before, levels)
    _ROLLUP.run(connection, *_rollup_rows(series, found, buckets))


def _stored(
    connection: Connection, series: int, asked: Mapping[int, tuple[int, int]]
) -> tuple[list[int], list[tuple[int, int, int, bytes]]]:
    """Return the level of each bucket in `asked`, and the buckets, in the order of iterations."""
    asked = {level: ends for level, ends in asked.items() if ends[0] <= ends[1]}
    if not asked:
        return [], []
    terms = {"series": series}
    for level in LEVELS[: 1 if asked.keys() == {LEVELS[0]} else None]:
        terms[f"low_{level}"], terms[f"high_{level}"] = asked.get(level, (0, -1))
    rows = (_FINEST_BEFORE if len(terms) == 3 else _ROLLED_BEFORE).all(connection, terms)
    rows.sort(key=operator.itemgetter(2))
    return [row[0] for row in rows], [row[1:] for row in rows]


def _rollup_rows(series: int, levels: Sequence[int], rollup: Rollup) -> Iterator[dict[str, Any]]:
    """Yield the rows of buckets; `levels` are their levels."""
    numbers = zip(levels, rollup.first.tolist(), rollup.last.tolist(), rollup.rows.tolist(), strict=True)
    for (level, first, last, rows), encoded in zip(numbers, rollups.encoded(rollup), strict=True):
        yield {
            "series": series,
            "level": level,
            "bucket": last >> level,
            "first_iteration": first,
            "last_iteration": last,
            "rows": rows,
            "columns": encoded,
        }


def names_of(metrics: bytes) -> Sequence[str]:
    """Decode the names of a series' metrics."""
    return _names.decode(metrics)
