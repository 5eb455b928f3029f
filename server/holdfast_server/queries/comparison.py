"""Metrics of several jobs, forks and lineages on one axis."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from sqlalchemy.ext.asyncio import AsyncSession

from holdfast.protocol.timeline import ComparedCurve, ComparedJob, Comparison, ComparisonAxis, Series
from holdfast_server import models
from holdfast_server.core.errors import InvalidSetting, UnknownJob
from holdfast_server.db import Database
from holdfast_server.queries.summaries import find_job, origin_of
from holdfast_server.queries.timeline import TimelineQuery, read_series

MOST_JOBS = 8
MOST_METRICS = 4
MOST_POINTS = 1000
DIGITS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonQuery:
    """Parameters of a comparison."""

    jobs: tuple[str, ...]
    """Each `job`, or `job:lineage` for one lineage alone."""
    metrics: tuple[str, ...] = ("loss",)
    axis: ComparisonAxis = "iteration"
    start: float | None = None
    """Start of the window in units of the axis."""
    end: float | None = None
    points: int = 300
    """About the most points of a curve."""


async def compare(db: Database, asked: ComparisonQuery, *, visible: Collection[str] | None) -> Comparison:
    """Return the curves of up to `MOST_JOBS` jobs.

    `visible`: projects that the user may see; None: all.

    Raises:
        InvalidSetting: too many jobs or metrics, or a lineage that does not exist.
        UnknownJob: there is no such job, or the user may not see it.
    """
    if len(asked.jobs) > MOST_JOBS:
        raise InvalidSetting("job", f"{len(asked.jobs)} jobs are selected: at most {MOST_JOBS} can be compared")
    if not 1 <= len(asked.metrics) <= MOST_METRICS:
        raise InvalidSetting("metric", f"{len(asked.metrics)} metrics are selected: choose 1 to {MOST_METRICS}")
    known: dict[str, None] = {}
    jobs = []
    async with db.one_view(), db.read() as session:
        for name in dict.fromkeys(asked.jobs):
            found, metrics = await _compared(session, name, asked, visible)
            known |= dict.fromkeys(metrics)
            jobs.append(found)
    return Comparison(axis=asked.axis, metrics=list(known), jobs=jobs)


async def _compared(
    session: AsyncSession, name: str, asked: ComparisonQuery, visible: Collection[str] | None
) -> tuple[ComparedJob, list[str]]:
    job, _, number = name.partition(":")
    row = await find_job(session, job)
    if visible is not None and row.project not in visible:
        raise UnknownJob(job)
    window = await _window(session, row, asked)
    found = await read_series(session, row, window)
    drawn, _ = await found.draw(window)
    lineages = [one.lineage for one in found.lineages]
    lineage = None
    if number:
        lineage = int(number) if number.isascii() and number.isdigit() and len(number) < 10 else -1
        if lineage not in lineages:
            raise InvalidSetting("job", f"{job} has no lineage {number!r}; it has {', '.join(map(str, lineages))}")
    origin = await origin_of(session, job)
    seen = origin is not None and (visible is None or origin.project in visible)
    compared = ComparedJob(
        name=name,
        job=job,
        lineage=lineage,
        lineages=lineages,
        started_at=found.times[0] if found.times else None,
        last_iteration=row.iteration,
        origin=origin.job if origin and seen else None,
        origin_iteration=origin.iteration if origin and seen else None,
        curves=[
            curve
            for metric in asked.metrics
            if (curve := _curve(drawn, lineage, metric, asked, began=found.times[0] if found.times else 0.0))
        ],
    )
    return compared, found.metrics


async def _window(session: AsyncSession, job: models.JobRecord, asked: ComparisonQuery) -> TimelineQuery:
    """Return the query of a job's samples: in time where the window is, since buckets are as wide as it needs."""
    query = TimelineQuery(
        start=asked.start, end=asked.end, points=max(2, min(asked.points, MOST_POINTS)), metrics=asked.metrics,
        digits=DIGITS,
    )  # fmt: skip
    if asked.axis == "iteration":
        return query
    if asked.axis == "time" or (asked.start is None and asked.end is None):
        return replace(query, axis="time")
    whole = await read_series(session, job, replace(query, axis="time", start=None, end=None, points=2))
    began = whole.times[0] if whole.times else 0.0
    start, end = (None if each is None else began + each for each in (asked.start, asked.end))
    return replace(query, axis="time", start=start, end=end)


def _curve(
    drawn: Sequence[Series], lineage: int | None, metric: str, asked: ComparisonQuery, *, began: float
) -> ComparedCurve | None:
    points: list[tuple[float, float]] = []
    for one in sorted(drawn, key=lambda each: each.lineage):
        band = one.metrics.get(metric)
        if band is None or (one.lost if lineage is not None else False) or lineage not in (None, one.lineage):
            continue
        until = one.stands_until if lineage is None else math.inf
        places = _places(one, asked.axis, began)
        rows = zip(one.iteration, places, band.mean, strict=True)
        points += [(x, mean) for iteration, x, mean in rows if iteration <= until]
    if not points:
        return None
    # lineages are bucketed one by one: a job of many has more points than one curve needs
    points = points[:: -(-len(points) // (2 * asked.points))]
    return ComparedCurve(metric=metric, x=[x for x, _ in points], mean=[mean for _, mean in points])


def _places(series: Series, axis: ComparisonAxis, began: float) -> Sequence[float]:
    if axis == "iteration":
        return series.iteration
    return series.at if axis == "time" else [round(at - began, 3) for at in series.at]
