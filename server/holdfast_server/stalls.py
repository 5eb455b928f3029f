"""What training waited for, and when."""

from __future__ import annotations

from typing import cast

from sqlalchemy import BigInteger, case, func, select
from sqlalchemy import cast as as_type

from holdfast.answers import StallsOverTime, Window
from holdfast.protocol import StallKind
from holdfast_server import models
from holdfast_server.db import Database
from holdfast_server.summaries import find_job
from holdfast_server.windows import begin_of

STRETCHES = 60
_MS = 1000


async def stalls_over_time(db: Database, job: str, window: Window, *, now: float) -> StallsOverTime:
    """Raises UnknownJob.

    A wait is told when it is over, by its end. A stretch shows at most its own length of a kind: the rest of a
    longer wait is laid into the stretches before it, and what of it lies before the window is left out.
    """
    rows, attempts = models.Stall, models.Attempt
    async with db.read() as session:
        row = await find_job(session, job)
        first = await session.scalar(select(func.min(attempts.started_at)).where(attempts.job == job))
        begins_at = max(begin_of(window, now=now), first or row.created_at)
        ends_at = max(now, begins_at + 1)
        stretch = (ends_at - begins_at) / STRETCHES
        # In whole numbers, which every database divides alike.
        place = as_type((rows.at - begins_at) * _MS, BigInteger) // max(1, round(stretch * _MS))
        bucket = case((place < STRETCHES, place), else_=STRETCHES - 1).label("bucket")
        query = (
            select(rows.kind, bucket, func.sum(rows.seconds))
            .where(rows.job == job, rows.at >= begins_at)
            .group_by(rows.kind, bucket)
        )
        found = (await session.execute(query)).all()
    ended: dict[str, list[float]] = {}
    for kind, number, waited in found:
        ended.setdefault(kind, [0.0] * STRETCHES)[number] = waited
    seconds = {cast("StallKind", kind): _spread(waited, stretch) for kind, waited in ended.items()}
    return StallsOverTime(
        job=job,
        window=window,
        begins_at=begins_at,
        ends_at=ends_at,
        stretch_seconds=stretch,
        seconds=dict(sorted(seconds.items(), key=lambda item: -sum(item[1]))),
    )


def _spread(ended: list[float], stretch: float) -> list[float]:
    """Of waits by the stretch in which they ended, how long each stretch was waited in."""
    spread, over = [0.0] * len(ended), 0.0
    for place in reversed(range(len(ended))):
        waited = ended[place] + over
        spread[place] = min(waited, stretch)
        over = waited - spread[place]
    return spread
