"""Export of a job's samples and checkpoints as files.

Samples are read and sent in parts, so that a million of them take no more memory than a few thousand.
Downsampled samples are exported as one row for each bucket, with its number of iterations.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeVar

import numpy as np
from sqlalchemy import select

from holdfast.protocol.jobs import CheckpointInfo
from holdfast_server import models
from holdfast_server.core.errors import NotPossible
from holdfast_server.db import Database
from holdfast_server.queries.job_view import find_job
from holdfast_server.queries.timeline import iteration_plans
from holdfast_server.records.ancestry import Ancestry, ancestry_of
from holdfast_server.records.checkpoints import as_row
from holdfast_server.samples import read_plan, reading, rollups
from holdfast_server.samples.rollups import LAST, MAXIMUM, MINIMUM, SUM, Rollup
from holdfast_server.samples.sample_codec import BUILT_IN
from holdfast_server.samples.sample_series import names_of
from holdfast_server.samples.series import AT, DATA_SECONDS, SECONDS, STALL_SECONDS, TimelineData

PART_ITERATIONS = 8192
PART_CHECKPOINTS = 2000
_NOT_EXPORTED = ("ranks", "changed", "metrics", "verified", "verified_at")
"""Fields of a checkpoint that are not one value, or that only some lists fill in."""
NO_PARQUET = (
    "the server cannot write Parquet without pyarrow: install Holdfast with its extra `parquet`, or export CSV"
)
_BUILT_IN = (
    *("lineage", "abandoned", "iteration", "iterations", "at", "seconds", "seconds_max"),
    *("stall_seconds", "data_seconds"),
)
_ENDS = ("", "_min", "_max")

Columns = Mapping[str, Sequence[Any]]
Made = TypeVar("Made")


def writes_parquet() -> bool:
    return importlib.util.find_spec("pyarrow") is not None


@dataclass(frozen=True, slots=True)
class SampleSelection:
    """Samples to export, and the names of their columns."""

    job: models.JobRecord
    all_series: Sequence[models.SampleSeriesRecord]
    columns: Mapping[str, str]
    """Column of the means by metric; minimum and maximum have the suffixes `_min` and `_max`."""
    first: int
    last: int

    @property
    def names(self) -> list[str]:
        return [*_BUILT_IN, *(f"{name}{end}" for name in self.columns.values() for end in _ENDS)]


def samples(db: Database, job: str, first: int | None, last: int | None) -> SampleSelection:
    """Raises UnknownJob."""
    with db.read() as session:
        found = find_job(session, job)
        all_series = reading.series_of(session, job)
    begin = min((one.first_iteration for one in all_series), default=1)
    end = max((one.last_iteration for one in all_series), default=0)
    columns = _columns_of({name for one in all_series for name in names_of(one.metrics)})
    return SampleSelection(
        found, all_series, columns, max(begin, first or begin), min(end, end if last is None else last)
    )


def _columns_of(metrics: Iterable[str]) -> dict[str, str]:
    """Choose the column of each metric; the prefix `metric.` makes a name unique."""
    taken, made = set(_BUILT_IN), dict[str, str]()
    for metric in sorted(metrics):
        name = metric
        while not taken.isdisjoint(f"{name}{end}" for end in _ENDS):
            name = f"metric.{name}"
        taken.update(f"{name}{end}" for end in _ENDS)
        made[metric] = name
    return made


def spans(all_series: Sequence[models.SampleSeriesRecord], first: int, last: int) -> Iterator[tuple[int, int]]:
    """Split a window into parts of so many iterations, or of so many rows where rows are sparse."""
    begin = first
    while begin <= last:
        here = [one for one in all_series if one.first_iteration <= begin <= one.last_iteration]
        later = [one.first_iteration for one in all_series if one.first_iteration > begin]
        if not here:
            begin = min(later, default=last + 1)
            continue
        # The density of rows is constant up to the next start or end of a series.
        edge = min([*later, *(one.last_iteration + 1 for one in here)]) - 1
        density = sum(read_plan.rows_between(one, begin, begin) for one in here)
        thin = begin + int(PART_ITERATIONS / density) - 1 if density else edge
        end = min(max(begin + PART_ITERATIONS - 1, min(thin, edge)), last)
        yield begin, end
        begin = end + 1


def parts(db: Database, wanted: SampleSelection, convert: Callable[[Columns], Made]) -> Iterator[Made]:
    """Yield the converted columns of each part, some thousand iterations at a time."""
    for first, last in spans(wanted.all_series, wanted.first, wanted.last):
        with db.read() as session:
            # For each part again: retention may have removed chunks in the meantime.
            all_series = reading.series_of(session, wanted.job.name)
            # With more points than a part is expected to have rows, so that no rows are combined.
            plans = iteration_plans(wanted.job, all_series, first, last, 2 * PART_ITERATIONS)
            reads = [read for plan in plans for read in plan.segments]
            contents = reading.contents(session, wanted.job.name, reads)
        yield from _made(plans, contents, wanted, convert)


def _made(
    plans: Iterable[read_plan.PlannedRead],
    contents: TimelineData,
    wanted: SampleSelection,
    convert: Callable[[Columns], Made],
) -> list[Made]:
    found = (_columns(plan, contents, wanted) for plan in plans)
    return [convert(columns) for columns in found if columns is not None]


def _columns(plan: read_plan.PlannedRead, contents: TimelineData, wanted: SampleSelection) -> Columns | None:
    found = [part for read in plan.segments if (part := contents.part(read, 1)) is not None]
    if not found:
        return None
    metrics = list(wanted.columns)
    buckets = rollups.combined([rollups.aligned(rollup, names, metrics) for names, rollup in found], 1)
    count = len(buckets)
    stats = buckets.stats
    made: dict[str, Sequence[Any]] = {
        "lineage": [plan.lineage] * count,
        "abandoned": [plan.abandoned] * count,
        "iteration": buckets.last.tolist(),
        "iterations": buckets.rows.tolist(),
        "at": stats[:, AT, LAST].tolist(),
        "seconds": _means(buckets, SECONDS),
        "seconds_max": stats[:, SECONDS, MAXIMUM].tolist(),
        "stall_seconds": stats[:, STALL_SECONDS, SUM].tolist(),
        "data_seconds": stats[:, DATA_SECONDS, SUM].tolist(),
    }
    for column, name in enumerate(wanted.columns.values(), len(BUILT_IN)):
        made[name] = _means(buckets, column)
        for end, kind in (("_min", MINIMUM), ("_max", MAXIMUM)):
            values = stats[:, column, kind]
            made[f"{name}{end}"] = np.where(buckets.finite[:, column] > 0, values, np.nan).tolist()
    return made


def _means(buckets: Rollup, column: int) -> list[Any]:
    """Return the means of finite values; the last value of buckets without any."""
    count = buckets.finite[:, column]
    sums = buckets.stats[:, column, SUM] / np.maximum(count, 1)
    return list(np.where(count > 0, sums, buckets.stats[:, column, LAST]).tolist())


def csv_of(db: Database, wanted: SampleSelection) -> Iterator[bytes]:
    names = wanted.names

    def convert(columns: Columns) -> bytes:
        return csv_bytes(zip(*(map(csv_cell, columns[name]) for name in names), strict=True))

    yield csv_bytes([map(csv_cell, names)])
    yield from parts(db, wanted, convert)


def parquet_of(db: Database, wanted: SampleSelection) -> IO[bytes]:
    """Write a temporary file, which is deleted when closed. Raises NotPossible: pyarrow is not installed."""
    if not writes_parquet():
        raise NotPossible(NO_PARQUET)
    file = tempfile.TemporaryFile()  # noqa: SIM115 - closed once it is sent
    try:
        _write_parquet(file, db, wanted)
    except BaseException:  # also on Ctrl-C
        file.close()
        raise
    return file


def _write_parquet(file: IO[bytes], db: Database, wanted: SampleSelection) -> None:
    arrow, parquet = _arrow()
    kinds = {
        "lineage": arrow.int64(),
        "abandoned": arrow.bool_(),
        "iteration": arrow.int64(),
        "iterations": arrow.int64(),
    }
    schema = arrow.schema([(name, kinds.get(name, arrow.float64())) for name in wanted.names])
    writer = parquet.ParquetWriter(file, schema, compression="zstd")

    def convert(columns: Columns) -> None:
        writer.write_table(arrow.table({name: columns[name] for name in wanted.names}, schema=schema))

    for _ in parts(db, wanted, convert):
        pass
    writer.close()


def _arrow() -> tuple[Any, Any]:
    import pyarrow
    from pyarrow import parquet

    return pyarrow, parquet


@dataclass(frozen=True, slots=True)
class CheckpointSelection:
    """Checkpoints to export."""

    job: str
    ancestry: Ancestry
    first: int | None
    last: int | None


def select_checkpoints(db: Database, job: str, first: int | None, last: int | None) -> CheckpointSelection:
    """Raises UnknownJob."""
    with db.read() as session:
        found = find_job(session, job)
        return CheckpointSelection(job, ancestry_of(session, found), first, last)


def checkpoints_csv(db: Database, wanted: CheckpointSelection) -> Iterator[bytes]:
    """Yield checkpoints as CSV in the order of their ids, which begin with the iteration."""
    rows = models.CheckpointRecord
    query = select(rows).where(rows.job == wanted.job).order_by(rows.id).limit(PART_CHECKPOINTS)
    if wanted.first is not None:
        query = query.where(rows.iteration >= wanted.first)
    if wanted.last is not None:
        query = query.where(rows.iteration <= wanted.last)
    names = tuple(name for name in CheckpointInfo.__struct_fields__ if name not in _NOT_EXPORTED)

    def convert(part: Sequence[models.CheckpointRecord]) -> bytes:
        made = (as_row(row, wanted.ancestry) for row in part)
        return csv_bytes([csv_cell(getattr(row, name)) for name in names] for row in made)

    yield csv_bytes([names])
    after = ""
    while True:
        with db.read() as session:
            part = session.scalars(query.where(rows.id > after)).all()
        if not part:
            return
        yield convert(part)
        after = part[-1].id


def csv_cell(value: Any) -> Any:
    """Format a value for spreadsheets and pandas, with text that looks like a formula quoted."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r", "\n")):
        return f"'{value}"
    return value


def csv_bytes(rows: Iterable[Iterable[Any]], line_end: str = "\n") -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator=line_end).writerows(rows)
    return text.getvalue().encode()
