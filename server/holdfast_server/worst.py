"""Jobs by what is worst about them. No column holds that: it is worked out for all that match, and then sorted."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import msgspec
from sqlalchemy import Row, Select
from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.protocol import Paced
from holdfast_server import checkpoints, models
from holdfast_server.checkpoints import LastDurable
from holdfast_server.samples import Recent
from holdfast_server.status import ALIVE, seconds_of_last, status_in_sql

Worst = Literal["risk", "overhead", "durable"]
"""Most GPU-hours at risk first; furthest over the budget first; longest without a durable checkpoint first."""
ORDERS: tuple[Worst, ...] = get_args(Worst)
WATCHED = (*ALIVE, "silent")
"""Jobs that may still lose something come before those that have ended."""

_paced, _recent = msgspec.msgpack.Decoder(Paced), msgspec.msgpack.Decoder(Recent)


async def names(
    session: AsyncSession, matching: Select[Any], order: Worst, *, grouped: bool, now: float
) -> list[str]:
    """`matching`: a choice of jobs, outer-joined with their current attempts."""
    job, status = models.Job, status_in_sql(now=now).label("status")
    columns = (job.name, job.project, job.created_at, status, *_COLUMNS[order])
    rows = (await session.execute(matching.with_only_columns(*columns))).all()
    durable: Mapping[str, LastDurable] = {}
    if order != "overhead":
        durable = await checkpoints.last_durable_of_many(session, matching.with_only_columns(job.name))
    bad = _BADNESS[order]

    def place(row: Row[Any]) -> tuple[str, bool, float, str]:
        badness = bad(row, durable)
        return (
            row.project if grouped else "",
            row.status not in WATCHED,
            math.inf if badness is None else -badness,
            row.name,
        )

    # Off the event loop: of ten thousand jobs, what each last said has to be looked into.
    return [row.name for row in await asyncio.to_thread(sorted, rows, key=place)]


def _risk(row: Row[Any], durable: Mapping[str, LastDurable]) -> float | None:
    last = durable.get(row.name)
    exposed = max(0, row.iteration - (last.iteration if last else 0))
    seconds = seconds_of_last(_recent.decode(row.recent) if row.recent else Recent(), exposed)
    return None if seconds is None else seconds * max(1, row.world_size or 1)


def _overhead(row: Row[Any], _: Mapping[str, LastDurable]) -> float | None:
    paced = _paced.decode(row.paced) if row.paced else None
    if paced is None or paced.measured_overhead is None or math.isnan(paced.measured_overhead):
        return None
    return paced.measured_overhead / paced.budget if paced.budget > 0 else None


def _age(row: Row[Any], durable: Mapping[str, LastDurable]) -> float:
    last = durable.get(row.name)
    return -(last.at if last else row.started_at or row.created_at)


_COLUMNS: dict[Worst, tuple[Any, ...]] = {
    "risk": (models.Job.iteration, models.Job.recent, models.Attempt.world_size),
    "overhead": (models.Job.paced,),
    "durable": (models.Attempt.started_at,),
}
_BADNESS: dict[Worst, Callable[[Row[Any], Mapping[str, LastDurable]], float | None]] = {
    "risk": _risk,
    "overhead": _overhead,
    "durable": _age,
}
