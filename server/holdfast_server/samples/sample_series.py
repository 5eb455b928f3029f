"""Storing samples: a chunk for each batch, and the roll-ups of what is in it, in the batch's own transaction.

Built as samples arrive, roll-ups are never behind, whatever is killed when; they cost a batch one read and one
write of a few rows. Core and no ORM: nearly all that a server stores comes through here.
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
class Added:
    new: bool
    """The first that this rank of this attempt reports of this lineage."""
    left_out: bool
    """Metrics, for the stretch has as many as it may have."""


_KEY = ("job", "rank", "lineage", "uid")
_GROWING: dict[str, Callable[[Any, Any], Any]] = {
    "metrics": lambda before, now: now,
    "first_iteration": min,
    "last_iteration": max,
    "last_at": max,
    "rows": operator.add,
    "chunks": operator.add,
    "chunk_bytes": operator.add,
    "widest": max,
}
"""What storing moves, and how."""
_ROLLED = ("first_iteration", "last_iteration", "rows", "columns")
_names = msgspec.msgpack.Decoder(list[str])


_stretches, _chunks, _rollups = (
    models.table(models.StretchRecord),
    models.table(models.ChunkRecord),
    models.table(models.RollupRecord),
)
_NEW = {"whole_from": 0, "fine_from": 0}
_FIND = Statement(
    select(_stretches.c.id, *(_stretches.c[name] for name in _GROWING)).where(
        *(_stretches.c[name] == bindparam(name) for name in _KEY)
    )
)
_BEGIN = Statement(
    plain_insert(_stretches)
    .values({name: bindparam(name) for name in (*_KEY, "attempt", *_GROWING, *_NEW)})
    .returning(_stretches.c.id)
)
_GROW = Statement(
    update(_stretches)
    .where(_stretches.c.id == bindparam("stretch"))
    .values({name: bindparam(f"new_{name}") for name in _GROWING})
)
_CHUNK = Statement(
    plain_insert(_chunks).values(
        {column.name: bindparam(column.name) for column in _chunks.c if column.name != "id"}
    )
)


def _before(level: int) -> Select[Any]:
    return select(_rollups.c.level, *(_rollups.c[name] for name in _ROLLED)).where(
        _rollups.c.stretch == bindparam("stretch"),
        _rollups.c.level == level,
        _rollups.c.bucket.between(bindparam(f"low_{level}"), bindparam(f"high_{level}")),
    )


_FINEST_BEFORE = Statement(_before(LEVELS[0]))
# One look into the index for each level: asked for with "or", SQLite goes through all buckets of the stretch.
_ROLLED_BEFORE = Statement(union_all(*map(_before, LEVELS)))


def _upsert(connection: Connection) -> ClauseElement:
    made = insert(connection, models.RollupRecord)
    changed = {name: made.excluded[name] for name in _ROLLED}
    return made.on_conflict_do_update(index_elements=("stretch", "level", "bucket"), set_=changed)


_ROLLUP = Statement(_upsert)


def add(connection: Connection, place: Mapping[str, Any], table: sample_codec.Table) -> Added:
    """Store what one rank measured on one lineage, all of it new.

    `place`: whose samples these are: job, uid, attempt, rank, sequence and lineage.
    """
    key = {name: place[name] for name in _KEY}
    row = _FIND.first(connection, key)
    before = None if row is None else dict(zip(("id", *_GROWING), row, strict=True))
    known = _names.decode(before["metrics"]) if before is not None else []
    more = [name for name in table.metrics if name not in known]
    names = [*known, *more[: max(0, MAX_METRICS - len(known))]]
    kept = sample_codec.renamed(table, names)
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
        "widest": last - first,
    }
    if before is None:
        (stretch,) = _BEGIN.first(connection, {**key, "attempt": place["attempt"], **now, **_NEW})
    else:
        stretch = before["id"]
        grown = {name: grow(before[name], now[name]) for name, grow in _GROWING.items()}
        _GROW.run(connection, {"stretch": stretch, **{f"new_{name}": value for name, value in grown.items()}})
    _CHUNK.run(connection, chunk_row(place, kept, chunk))
    values_of = sample_codec.aligned(kept.values, kept.metrics, names)
    reached = first if before is None else before["last_iteration"] + 1
    roll_up(connection, stretch, replace(kept, metrics=tuple(names), values=values_of), reached)
    return Added(new=before is None, left_out=len(kept.metrics) < len(table.metrics))


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


def roll_up(connection: Connection, stretch: int, table: sample_codec.Table, reached: int) -> None:
    """Add a table, with all columns of the stretch, to its roll-ups, which hold what came before `reached`."""
    behind = int(np.searchsorted(table.iteration, reached))
    if behind:
        late = table.rows(slice(0, behind))
        first, last = int(late.iteration[0]), int(late.iteration[-1])
        asked = {level: (first >> level, min(last >> level, (reached >> level) - 1)) for level in LEVELS[1:]}
        asked[LEVELS[0]] = first >> LEVELS[0], last >> LEVELS[0]
        _add_to(connection, stretch, late, reached, asked, rollups.late)
        table = table.rows(slice(behind, None))
    if len(table):
        first, end = int(table.iteration[0]), int(table.iteration[-1]) + 1
        asked = rollups.open_buckets(first, reached, end)
        _add_to(connection, stretch, table, reached, asked, rollups.grown)


def _add_to(
    connection: Connection,
    stretch: int,
    table: sample_codec.Table,
    reached: int,
    asked: Mapping[int, tuple[int, int]],
    add_up: Callable[[Rollup, int, Rollup | None, Sequence[int]], tuple[list[int], Rollup]],
) -> None:
    """Add a table to the buckets `asked` for, by level the first and the last, and to new ones."""
    levels, stored = _stored(connection, stretch, asked)
    before = rollups.decoded(stored, len(table.values)) if stored else None
    found, buckets = add_up(rollups.of_table(table, 1 << LEVELS[0]), reached, before, levels)
    _ROLLUP.run(connection, *_rollup_rows(stretch, found, buckets))


def _stored(
    connection: Connection, stretch: int, asked: Mapping[int, tuple[int, int]]
) -> tuple[list[int], list[tuple[int, int, int, bytes]]]:
    """The buckets asked for, and the level of each before them."""
    asked = {level: ends for level, ends in asked.items() if ends[0] <= ends[1]}
    if not asked:
        return [], []
    terms = {"stretch": stretch}
    for level in LEVELS[: 1 if asked.keys() == {LEVELS[0]} else None]:
        terms[f"low_{level}"], terms[f"high_{level}"] = asked.get(level, (0, -1))
    rows = (_FINEST_BEFORE if len(terms) == 3 else _ROLLED_BEFORE).all(connection, terms)
    return [row[0] for row in rows], [row[1:] for row in rows]


def _rollup_rows(stretch: int, levels: Sequence[int], rollup: Rollup) -> Iterator[dict[str, Any]]:
    """`levels`: of each bucket."""
    numbers = zip(levels, rollup.first.tolist(), rollup.last.tolist(), rollup.rows.tolist(), strict=True)
    for (level, first, last, rows), encoded in zip(numbers, rollups.encoded(rollup), strict=True):
        yield {
            "stretch": stretch,
            "level": level,
            "bucket": last >> level,
            "first_iteration": first,
            "last_iteration": last,
            "rows": rows,
            "columns": encoded,
        }


def names_of(metrics: bytes) -> Sequence[str]:
    """Of a stretch."""
    return _names.decode(metrics)
