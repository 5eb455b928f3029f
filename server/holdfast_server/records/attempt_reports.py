"""What attempts report of their processes: their configuration and output."""

from __future__ import annotations

import math

import msgspec
import numpy as np
from sqlalchemy import Connection, delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.protocol.attempt_reports import (
    MACHINE_METRICS,
    MAX_CONFIGURATION_VALUE,
    MAX_OUTPUT_CHARACTERS,
    MAX_OUTPUT_LINES,
    ConfigurationReport,
    ConfigurationSection,
    MachineSample,
    OutputReport,
)
from holdfast_server import models
from holdfast_server.core.compression import compress, decompress
from holdfast_server.samples import sample_series
from holdfast_server.samples.limits import MACHINE_RANK
from holdfast_server.samples.sample_codec import BUILT_IN, Table

COMPRESSION_LEVEL = 3
MAX_CONTENTS_BYTES = 8 * 2**20
"""Decompressed; the limits of a report amount to less."""

_values, _lines = msgspec.msgpack.Decoder(dict[str, str]), msgspec.msgpack.Decoder(list[str])


async def record_configuration(
    session: AsyncSession, attempt: models.AttemptRecord, event: ConfigurationReport
) -> None:
    """Store a section, in the place of an earlier report of it."""
    values = {name: value[:MAX_CONFIGURATION_VALUE] for name, value in event.values.items()}
    contents = compress(msgspec.msgpack.encode(values), COMPRESSION_LEVEL)
    await session.merge(
        models.AttemptConfigurationRecord(
            job=attempt.job, uid=attempt.uid, section=event.section, contents=contents
        )
    )


async def configuration_of(
    session: AsyncSession, job: str, uid: str
) -> dict[ConfigurationSection, dict[str, str]]:
    """Return the values by name of each section that the attempt reported."""
    rows = models.AttemptConfigurationRecord
    query = select(rows.section, rows.contents).where(rows.job == job, rows.uid == uid)
    return {
        section: _values.decode(decompress(contents, MAX_CONTENTS_BYTES))  # type: ignore[misc]
        for section, contents in await session.execute(query)
    }


async def record_output(session: AsyncSession, attempt: models.AttemptRecord, event: OutputReport) -> None:
    """Store lines of output, and delete those before the last `MAX_OUTPUT_LINES`."""
    lines = [line[:MAX_OUTPUT_CHARACTERS] for line in event.lines[-MAX_OUTPUT_LINES:]]
    if not lines:
        return
    end = event.first + len(event.lines)
    rows = models.OutputRecord
    contents = compress(msgspec.msgpack.encode(lines), COMPRESSION_LEVEL)
    await session.merge(rows(job=attempt.job, uid=attempt.uid, first=end - len(lines), end=end, contents=contents))
    await session.flush()
    of_attempt = (rows.job == attempt.job, rows.uid == attempt.uid)
    await session.execute(
        delete(rows).where(*of_attempt, rows.end <= end - MAX_OUTPUT_LINES),
        execution_options={"synchronize_session": False},
    )


async def output_of(session: AsyncSession, job: str, uid: str) -> tuple[int, list[str]]:
    """Return the number of the first line, and the last lines of output without those that were not reported."""
    rows = models.OutputRecord
    query = select(rows.first, rows.contents).where(rows.job == job, rows.uid == uid).order_by(rows.first)
    chunks = [(first, lines_of(contents)) for first, contents in await session.execute(query)]
    lines = [line for _, chunk in chunks for line in chunk][-MAX_OUTPUT_LINES:]
    last, chunk = chunks[-1] if chunks else (0, [])
    return last + len(chunk) - len(lines), lines


def lines_of(contents: bytes) -> list[str]:
    """Return the lines of one stored report of output."""
    return _lines.decode(decompress(contents, MAX_CONTENTS_BYTES))


def add_machine_sample(
    connection: Connection, attempt: models.AttemptRecord, rank: int, event: MachineSample, sequence: int
) -> None:
    """Add a sample to the series of a rank's machine, which is stored as those of its iterations."""
    measured = {name: value for name in MACHINE_METRICS if (value := getattr(event, name)) is not None}
    values = [event.at, *[math.nan] * (len(BUILT_IN) - 1), *measured.values()]
    table = Table(np.array([event.iteration]), tuple(measured), np.array(values).reshape(-1, 1))
    place = {"job": attempt.job, "uid": attempt.uid, "attempt": attempt.attempt, "lineage": event.lineage}
    sample_series.add(connection, {**place, "rank": MACHINE_RANK + rank, "sequence": sequence}, table)
