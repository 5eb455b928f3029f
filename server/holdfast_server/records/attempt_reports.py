"""What attempts report of their processes: their configuration and output."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import numpy as np
from sqlalchemy import Connection, and_, delete, func, insert, or_, select
from sqlalchemy.orm import Session

from holdfast.protocol.field_types import HeldSnapshot
from holdfast.protocol.tracebacks import exception_in, is_of_launcher
from holdfast.protocol.wire import (
    MACHINE_METRICS,
    MAX_CONFIGURATION_VALUE,
    MAX_OUTPUT_CHARACTERS,
    MAX_OUTPUT_LINES,
    ConfigurationReport,
    ConfigurationSection,
    MachineSample,
    MemoryReport,
    OutputReport,
    RankPlace,
)
from holdfast_server import models
from holdfast_server.core.compression import compress, decompress
from holdfast_server.samples import sample_series
from holdfast_server.samples.limits import MACHINE_RANK
from holdfast_server.samples.sample_codec import BUILT_IN, Table

COMPRESSION_LEVEL = 3
MAX_CONTENTS_BYTES = 8 * 2**20
"""Decompressed; the limits of a report amount to less."""

_held = msgspec.msgpack.Decoder(list[HeldSnapshot])
_values, _lines = msgspec.msgpack.Decoder(dict[str, str]), msgspec.msgpack.Decoder(list[str])


def record_configuration(session: Session, attempt: models.AttemptRecord, event: ConfigurationReport) -> None:
    """Store a section, in the place of an earlier report of it."""
    values = {name: value[:MAX_CONFIGURATION_VALUE] for name, value in event.values.items()}
    contents = compress(msgspec.msgpack.encode(values), COMPRESSION_LEVEL)
    session.merge(
        models.AttemptConfigurationRecord(
            job=attempt.job, uid=attempt.uid, section=event.section, contents=contents
        )
    )


def configuration_of(session: Session, job: str, uid: str) -> dict[ConfigurationSection, dict[str, str]]:
    """Return the values by name of each section that the attempt reported."""
    rows = models.AttemptConfigurationRecord
    query = select(rows.section, rows.contents).where(rows.job == job, rows.uid == uid)
    return {
        section: _values.decode(decompress(contents, MAX_CONTENTS_BYTES))  # type: ignore[misc]
        for section, contents in session.execute(query)
    }


def record_output(session: Session, attempt: models.AttemptRecord, event: OutputReport) -> None:
    """Store lines of output, whatever numbers the report gives them, and keep the last `MAX_OUTPUT_LINES`.

    A report replaces what was reported with the same numbers, so that an attempt has at most twice as many.
    """
    lines = [line[:MAX_OUTPUT_CHARACTERS] for line in event.lines[-MAX_OUTPUT_LINES:]]
    if not lines:
        return
    rows, end = models.OutputRecord, event.first + len(event.lines)
    first = end - len(lines)
    of_attempt = (rows.job == attempt.job, rows.uid == attempt.uid)
    newest = max(end, session.scalar(select(func.max(rows.end)).where(*of_attempt)) or end)
    outdated = rows.end <= newest - MAX_OUTPUT_LINES
    same_numbers = and_(rows.first < end, rows.end > first)
    session.execute(
        delete(rows).where(*of_attempt, or_(outdated, same_numbers)),
        execution_options={"synchronize_session": False},
    )
    if end > newest - MAX_OUTPUT_LINES:
        contents = compress(msgspec.msgpack.encode(lines), COMPRESSION_LEVEL)
        session.execute(
            insert(rows).values(job=attempt.job, uid=attempt.uid, first=first, end=end, contents=contents)
        )
        _note_exception(session, attempt, first, lines)


def _note_exception(session: Session, attempt: models.AttemptRecord, first: int, lines: list[str]) -> None:
    """Note the exception of the last traceback, which may have begun in the report before."""
    position = exception_in(lines)
    if position is None:
        rows = models.OutputRecord
        of_attempt = (rows.job == attempt.job, rows.uid == attempt.uid)
        query = select(rows.contents).where(*of_attempt, rows.first < first).order_by(rows.first.desc()).limit(1)
        if (before := session.scalar(query)) is not None:
            earlier = lines_of(before)
            position, lines = exception_in([*earlier, *lines]), [*earlier, *lines]
    if position is not None and (attempt.exception is None or not is_of_launcher(lines[position])):
        attempt.exception = lines[position]


def output_of(session: Session, job: str, uid: str) -> tuple[int, list[str]]:
    """Return the number of the first line, and the last lines of output without those that were not reported."""
    rows = models.OutputRecord
    query = select(rows.end, rows.contents).where(rows.job == job, rows.uid == uid).order_by(rows.first.desc())
    lines: list[str] = []
    last: int | None = None
    for end, contents in session.execute(query):
        last = end if last is None else last
        lines = [*lines_of(contents), *lines]
        if len(lines) >= MAX_OUTPUT_LINES:
            break
    lines = lines[-MAX_OUTPUT_LINES:]
    return (last or 0) - len(lines), lines


def lines_of(contents: bytes) -> list[str]:
    """Return the lines of one stored report of output."""
    return _lines.decode(decompress(contents, MAX_CONTENTS_BYTES))


def record_memory(session: Session, attempt: models.AttemptRecord, rank: int, event: MemoryReport) -> None:
    """Store the snapshots in the memory of a host, in place of the previous report."""
    session.merge(
        models.HostMemoryRecord(
            job=attempt.job, rank=rank, uid=attempt.uid, host=event.host, at=event.at,
            snapshots=msgspec.msgpack.encode(event.snapshots),
        )
    )  # fmt: skip


def record_place(session: Session, attempt: models.AttemptRecord, rank: int, event: RankPlace) -> None:
    """Store where a rank runs, in the place of the report before."""
    session.merge(
        models.RankPlaceRecord(
            job=attempt.job, rank=rank, uid=attempt.uid, at=event.at, host=event.host, device=event.device,
            scheduler_job=event.scheduler_job,
        )
    )  # fmt: skip


def places_of(session: Session, job: str, uid: str) -> dict[int, models.RankPlaceRecord]:
    """Return by rank where the ranks of an attempt run."""
    rows = models.RankPlaceRecord
    query = select(rows).where(rows.job == job, rows.uid == uid)
    return {row.rank: row for row in session.scalars(query)}


def memories_of(session: Session, job: str, uid: str) -> dict[str, list[HeldSnapshot]]:
    """Return the snapshots in the memory of an attempt's hosts, by host."""
    rows = models.HostMemoryRecord
    query = select(rows.rank, rows.host, rows.snapshots).where(rows.job == job, rows.uid == uid)
    found = session.execute(query.order_by(rows.rank)).all()
    named = Counter(host for _, host, _ in found)
    return {
        (host if named[host] == 1 else f"{host} (rank {rank})"): _held.decode(snapshots)
        for rank, host, snapshots in found
    }


def add_machine_sample(
    connection: Connection, attempt: models.AttemptRecord, rank: int, event: MachineSample, sequence: int
) -> None:
    """Add a sample to the series of a rank's machine, which is stored as those of its iterations."""
    measured = {name: value for name in MACHINE_METRICS if (value := getattr(event, name)) is not None}
    values = [event.at, *[math.nan] * (len(BUILT_IN) - 1), *measured.values()]
    table = Table(np.array([event.iteration]), tuple(measured), np.array(values).reshape(-1, 1))
    place = {"job": attempt.job, "uid": attempt.uid, "attempt": attempt.attempt, "lineage": event.lineage}
    sample_series.add(connection, {**place, "rank": MACHINE_RANK + rank, "sequence": sequence}, table)
