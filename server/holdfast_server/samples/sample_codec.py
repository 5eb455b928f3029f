"""Samples as arrays: decoding from the wire, and packing into chunks. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast.protocol.field_types import MAX_ITERATION, MAX_LINEAGE, MAX_NAME, MAX_SECONDS
from holdfast.protocol.wire import IntegerColumn, Numbers, Samples
from holdfast_server.core.compression import compress, decompress
from holdfast_server.samples.limits import MAX_METRICS

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

BUILT_IN = ("at", "seconds", "stall_seconds", "data_seconds")
"""First rows of every table's values; the metrics follow."""
MAX_ROWS = 200_000
MAX_LINEAGES = 100
"""Most stretches of one batch: a restore begins one, and takes longer than a batch."""
MAX_CHUNK_BYTES = 256 * 2**20
LEVEL = 3


@dataclass(frozen=True, slots=True)
class Table:
    """Samples of one rank on one lineage, in the order of iterations."""

    iteration: Ints
    metrics: tuple[str, ...]
    values: Floats
    """Values with a row for each of BUILT_IN and of `metrics`, and a column for each iteration; nan: not
    measured."""

    def __len__(self) -> int:
        return len(self.iteration)

    @property
    def at(self) -> Floats:
        return cast("Floats", self.values[0])

    @property
    def seconds(self) -> Floats:
        return cast("Floats", self.values[1])

    @property
    def stall_seconds(self) -> Floats:
        return cast("Floats", self.values[2])

    @property
    def data_seconds(self) -> Floats:
        return cast("Floats", self.values[3])

    def metric(self, name: str) -> Floats | None:
        return self.values[len(BUILT_IN) + self.metrics.index(name)] if name in self.metrics else None

    def rows(self, chosen: Any) -> Table:
        return Table(self.iteration[chosen], self.metrics, self.values[:, chosen])

    def between(self, first: int, last: int) -> Table:
        """Return the iterations from `first` to `last`, both included."""
        low, high = np.searchsorted(self.iteration, (first, last + 1))
        return self if low == 0 and high == len(self) else self.rows(slice(low, high))


@dataclass(frozen=True, slots=True)
class BatchSamples:
    """Samples of a batch: a table for each lineage, oldest first."""

    tables: tuple[tuple[int, Table], ...]
    left_out: bool
    """Whether there were too many metrics, or too long names."""

    def __len__(self) -> int:
        return sum(len(table) for _, table in self.tables)

    @property
    def values(self) -> int:
        """Return the number of measured values."""
        return sum(int(np.count_nonzero(~np.isnan(table.values[1:]))) for _, table in self.tables)


def decode(samples: Samples, *, lineage: int, at: float, ahead: float, latest: float) -> BatchSamples:
    """Decode the samples of a batch, whose sending time and lineage stand for missing ones.

    Args:
        at: sending time of the batch, on the server's clock.
        ahead: seconds by which the agent's clock is ahead, subtracted from each time.
        latest: upper bound for times. A later one, or one that no page can show, becomes `at`. Durations out of
            range become nan: not measured.

    Raises:
        ValueError: the columns are invalid.
    """
    iteration = _counts("iteration", samples.iteration)
    count = len(iteration)
    if count > MAX_ROWS:
        raise ValueError(f"samples: at most {MAX_ROWS} rows in a batch")
    lineages = _counts("lineage", samples.lineage) if samples.lineage else np.full(count, lineage, np.int64)
    metrics = dict[str, Numbers]()
    for name, column in samples.metrics.items():
        if len(metrics) < MAX_METRICS:
            metrics.setdefault(name[:MAX_NAME], column)
    columns = [getattr(samples, name) for name in BUILT_IN] + list(metrics.values())
    values = _values((*BUILT_IN, *metrics), columns, count)
    if len(lineages) != count:
        raise _uneven(count, {"lineage": len(lineages)})
    for name, whole, most in (("iteration", iteration, MAX_ITERATION), ("lineage", lineages, MAX_LINEAGE)):
        if count and not (whole.min() >= 0 and whole.max() <= most):
            raise ValueError(f"samples: {name} is outside 0 to {most}")
    values[0] -= ahead
    table = _with_valid_times(Table(iteration, tuple(metrics), values), at=at, latest=latest)
    return BatchSamples(tuple(_by_lineage(table, lineages)), left_out=metrics.keys() != samples.metrics.keys())


def _counts(name: str, column: IntegerColumn) -> Ints:
    if isinstance(column, bytes):
        return cast("Ints", _from_bytes(name, column, "<i8"))
    try:
        return np.array(column, dtype=np.int64)
    except OverflowError:
        raise ValueError(f"samples: {name} has a number of more than 64 bits") from None


def _values(names: Sequence[str], columns: Sequence[Numbers], count: int) -> Floats:
    size = 8 * count
    if all(isinstance(column, bytes) and len(column) == size for column in columns):
        return np.frombuffer(bytearray().join(columns), "<f8").reshape(len(columns), count)  # type: ignore[arg-type]
    made = np.full((len(columns), count), np.nan)
    for row, (name, column) in enumerate(zip(names, columns, strict=True)):
        numbers = _from_bytes(name, column, "<f8") if isinstance(column, bytes) else column
        if len(numbers) not in (0, count):
            raise _uneven(count, {name: len(numbers)})
        if len(numbers):
            made[row] = numbers
    return made


def _uneven(count: int, others: dict[str, int]) -> ValueError:
    return ValueError(f"samples: columns differ in length: iteration has {count}, {others}")


def _from_bytes(name: str, column: bytes, kind: str) -> Any:
    if len(column) % 8:
        raise ValueError(f"samples: {name} has {len(column)} bytes, which is not a multiple of 8")
    return np.frombuffer(column, kind)


def _with_valid_times(table: Table, *, at: float, latest: float) -> Table:
    times, spans = table.values[0], table.values[1 : len(BUILT_IN)]
    if not len(table) or (
        times.min() >= 0 and times.max() <= latest and spans.min() >= 0 and spans.max() <= MAX_SECONDS
    ):
        return table
    with np.errstate(invalid="ignore"):
        times[~((times >= 0) & (times <= latest))] = at
        spans[~((spans >= 0) & (spans <= MAX_SECONDS))] = np.nan
    return table


def _by_lineage(table: Table, lineages: Ints) -> Iterator[tuple[int, Table]]:
    found = set(lineages.tolist())
    if len(found) > MAX_LINEAGES:
        raise ValueError(f"samples: {len(found)} lineages in a batch: send at most {MAX_LINEAGES}")
    for lineage in sorted(found):
        yield lineage, _ordered(table if len(found) == 1 else table.rows(lineages == lineage))


def _ordered(table: Table) -> Table:
    """Sort a table by iteration; of a repeated iteration the last row stays."""
    if (table.iteration[1:] > table.iteration[:-1]).all():
        return table
    order = np.argsort(table.iteration, kind="stable")
    last = np.append(np.diff(table.iteration[order]) > 0, [True])
    return table.rows(order[last])


def concatenated(tables: Sequence[Table], metrics: Sequence[str]) -> Table:
    """Concatenate tables, with a row for each of `metrics`; of a repeated iteration the last row stays."""
    values = [aligned(table.values, table.metrics, metrics) for table in tables]
    iteration = np.concatenate([table.iteration for table in tables])
    whole = Table(iteration, tuple(metrics), np.concatenate(values, axis=1))
    return _ordered(whole)


def aligned(values: Floats, metrics: Sequence[str], wanted: Sequence[str]) -> Floats:
    """Return the rows of a table in another order of metrics; nan for metrics that it lacks."""
    if tuple(metrics) == tuple(wanted):
        return values
    made = np.full((len(BUILT_IN) + len(wanted), values.shape[1]), np.nan)
    made[: len(BUILT_IN)] = values[: len(BUILT_IN)]
    place = {name: row for row, name in enumerate(metrics, len(BUILT_IN))}
    for row, name in enumerate(wanted, len(BUILT_IN)):
        if name in place:
            made[row] = values[place[name]]
    return made


class _Packed(msgspec.Struct, array_like=True):
    """A chunk. Numbers are transposed to planes of bytes, which compress better."""

    metrics: list[str]
    rows: int
    first: int
    steps: bytes
    """Differences between successive iterations, int64; empty if all are 1."""
    at: bytes
    """Differences between the bits of successive times, as int64."""
    narrow: bytes
    """One byte for each further row of values: 1 if single precision represents it exactly."""
    singles: bytes
    doubles: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Packed)


def pack(table: Table) -> bytes:
    steps = table.iteration[1:] - table.iteration[:-1]
    times = np.ascontiguousarray(table.at).view(np.int64)
    values = table.values[1:]
    with np.errstate(over="ignore", invalid="ignore"):
        singles = values.astype(np.float32)
        narrow = ((singles == values) | np.isnan(values)).all(axis=1)
    packed = _Packed(
        metrics=list(table.metrics),
        rows=len(table),
        first=int(table.iteration[0]),
        steps=b"" if (steps == 1).all() else _to_byte_planes(steps),
        at=_to_byte_planes(np.concatenate([times[:1], times[1:] - times[:-1]])),
        narrow=narrow.astype(np.uint8).tobytes(),
        singles=_to_byte_planes(singles[narrow]),
        doubles=_to_byte_planes(values[~narrow]),
    )
    return compress(_encoder.encode(packed), LEVEL)


def unpack(chunk: bytes) -> Table:
    packed = _decoder.decode(decompress(chunk, MAX_CHUNK_BYTES))
    steps = _from_byte_planes(packed.steps, np.int64) if packed.steps else np.ones(packed.rows - 1, np.int64)
    narrow = np.frombuffer(packed.narrow, np.uint8).astype(bool)
    values = np.empty((1 + len(narrow), packed.rows))
    values[0] = np.cumsum(_from_byte_planes(packed.at, np.int64)).view(np.float64)
    values[1:][narrow] = _from_byte_planes(packed.singles, np.float32).reshape(-1, packed.rows)
    values[1:][~narrow] = _from_byte_planes(packed.doubles, np.float64).reshape(-1, packed.rows)
    iteration = packed.first + np.concatenate([[0], np.cumsum(steps)])
    return Table(iteration, tuple(packed.metrics), values)


def with_metrics(table: Table, metrics: Sequence[str]) -> Table:
    """Return a table with only those of its metrics that are in `metrics`, in that order."""
    kept = [name for name in metrics if name in table.metrics]
    if tuple(kept) == table.metrics:
        return table
    return replace(table, metrics=tuple(kept), values=aligned(table.values, table.metrics, kept))


def _to_byte_planes(numbers: NDArray[Any]) -> bytes:
    flat = np.ascontiguousarray(numbers).reshape(-1)
    return flat.view(np.uint8).reshape(-1, flat.itemsize).T.tobytes()


def _from_byte_planes(spread: bytes, kind: Any) -> Any:
    size = np.dtype(kind).itemsize
    return np.ascontiguousarray(np.frombuffer(spread, np.uint8).reshape(size, -1).T).view(kind).reshape(-1)
