"""Metrics of several jobs, forks and lineages on one axis."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from sqlalchemy.orm import Session

from holdfast.protocol.field_types import MAX_ITERATION
from holdfast.protocol.timeline import ComparedCurve, ComparedJob, Comparison, ComparisonAxis, Series
from holdfast_server import models
from holdfast_server.core.errors import InvalidSetting, UnknownJob
from holdfast_server.db import Database
from holdfast_server.queries.job_view import find_job
from holdfast_server.queries.summaries import origin_of
from holdfast_server.queries.timeline import JobSeries, TimelineQuery, read_series

MOST_JOBS = 8
MOST_METRICS = 4
MOST_POINTS = 1000
DIGITS = 5
MOST_COARSER = 16
"""By time, the most buckets of a job that are united: its iterations may be much slower than another's."""


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


def compare(db: Database, asked: ComparisonQuery, *, visible: Collection[str] | None) -> Comparison:
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
    with db.read() as session:
        reads = [_read(session, name, asked, visible) for name in dict.fromkeys(asked.jobs)]
        widest = max((read.width for read in reads), default=1)
        jobs = [_compared(session, read, asked, visible, widest) for read in reads]
    metrics = dict.fromkeys(metric for read in reads for metric in read.series.metrics)
    return Comparison(axis=asked.axis, metrics=list(metrics), jobs=jobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobRead:
    """The samples of a job that a comparison shows."""

    name: str
    record: models.JobRecord
    lineage: int | None
    window: TimelineQuery
    series: JobSeries

    @property
    def width(self) -> int:
        """Return the number of iterations in one of its buckets."""
        return max((1 if plan.each else plan.width for plan in self.series.plans), default=1)

    def draw(self, width: int = 1) -> list[Series]:
        """Return its curves; of more than one iteration, in buckets of `width`, which none of its own exceeds."""
        plans = [plan if width == 1 else replace(plan, each=False, width=width) for plan in self.series.plans]
        drawn, _ = replace(self.series, plans=plans).draw(self.window)
        return sorted(drawn, key=lambda one: one.lineage)


def _read(session: Session, name: str, asked: ComparisonQuery, visible: Collection[str] | None) -> _JobRead:
    job, _, number = name.partition(":")
    row = find_job(session, job)
    if visible is not None and row.project not in visible:
        raise UnknownJob(job)
    window = _window(session, row, asked)
    found = read_series(session, row, window)
    lineage = None
    if number:
        lineages = [one.lineage for one in found.lineages]
        lineage = int(number) if number.isascii() and number.isdigit() and len(number) < 10 else -1
        if lineage not in lineages:
            raise InvalidSetting("job", f"{job} has no lineage {number!r}; it has {', '.join(map(str, lineages))}")
    return _JobRead(name=name, record=row, lineage=lineage, window=window, series=_shown(found, lineage))


def _shown(found: JobSeries, lineage: int | None) -> JobSeries:
    """Keep one lineage to its end, or each up to where the job continued on another one."""
    ends = {one.lineage: one.stands_until for one in found.lineages}
    if lineage is not None:
        ends = {lineage: MAX_ITERATION}
    plans = []
    for plan in found.plans:
        end = -1 if plan.lost else ends.get(plan.lineage, -1)
        parts = [replace(part, last=min(part.last, end)) for part in plan.segments if part.first <= end]
        if parts:
            plans.append(replace(plan, segments=parts))
    return replace(found, plans=plans)


def _compared(
    session: Session, read: _JobRead, asked: ComparisonQuery, visible: Collection[str] | None, widest: int
) -> ComparedJob:
    found, job = read.series, read.record.name
    width = widest if asked.axis == "iteration" else min(widest, MOST_COARSER * read.width)
    fine = read.draw()
    drawn = fine if width == 1 else read.draw(width)
    origin = origin_of(session, job)
    seen = origin is not None and (visible is None or origin.project in visible)
    began = found.times[0] if found.times else None
    return ComparedJob(
        name=read.name,
        job=job,
        lineage=read.lineage,
        lineages=[one.lineage for one in found.lineages],
        started_at=began,
        last_iteration=read.record.iteration,
        origin=origin.job if origin and seen else None,
        origin_iteration=origin.iteration if origin and seen else None,
        bucket_iterations=width,
        curves=[
            curve
            for metric in asked.metrics
            if (curve := _curve(metric, drawn, fine, asked, began=began or 0.0)) is not None
        ],
    )


def _window(session: Session, job: models.JobRecord, asked: ComparisonQuery) -> TimelineQuery:
    """Return the query of a job's samples: in time where the window is, since buckets are as wide as it needs."""
    query = TimelineQuery(
        start=asked.start, end=asked.end, points=max(2, min(asked.points, MOST_POINTS)), metrics=asked.metrics,
        digits=DIGITS,
    )  # fmt: skip
    if asked.axis == "iteration":
        return query
    if asked.axis == "time" or (asked.start is None and asked.end is None):
        return replace(query, axis="time")
    whole = read_series(session, job, replace(query, axis="time", start=None, end=None, points=2))
    began = whole.times[0] if whole.times else 0.0
    start, end = (None if each is None else began + each for each in (asked.start, asked.end))
    return replace(query, axis="time", start=start, end=end)


def _curve(
    metric: str, drawn: Sequence[Series], fine: Sequence[Series], asked: ComparisonQuery, *, began: float
) -> ComparedCurve | None:
    """Return the curve of a metric as drawn, with figures of its finest buckets."""
    points = [
        (x, mean)
        for one in drawn
        if metric in one.metrics
        for x, mean in zip(_places(one, asked.axis, began), one.metrics[metric].mean, strict=True)
    ]
    if not points:
        return None
    # lineages are bucketed one by one: a job of many has more points than one curve needs
    points = points[:: -(-len(points) // (2 * asked.points))]
    known = [one for one in fine if metric in one.metrics]
    iterations = [iteration for one in known for iteration in one.iteration]
    means = [mean for one in known for mean in one.metrics[metric].mean]
    lows = (low for one in known for low in one.metrics[metric].min if math.isfinite(low))
    return ComparedCurve(
        metric=metric,
        x=[x for x, _ in points],
        mean=[mean for _, mean in points],
        newest=means[-1],
        lowest=min(lows, default=None),
        not_finite_from=_not_finite_from(iterations, means),
    )


def _not_finite_from(iterations: Sequence[int], means: Sequence[float]) -> int | None:
    """Return the iteration after the last finite value; a metric that is measured now and then has none."""
    finite = [math.isfinite(mean) for mean in means]
    alone = sum(_alone(finite))
    if finite[-1] or (2 * sum(finite) < len(finite) and 2 * alone > sum(finite)):
        return None
    last = max((place for place, known in enumerate(finite) if known), default=None)
    return iterations[0] if last is None else iterations[last] + 1


def _alone(finite: Sequence[bool]) -> Iterator[bool]:
    for before, here, after in zip([False, *finite], finite, [*finite[1:], False], strict=False):
        yield here and not before and not after


def _places(series: Series, axis: ComparisonAxis, began: float) -> Sequence[float]:
    if axis == "iteration":
        return series.iteration
    return series.at if axis == "time" else [round(at - began, 3) for at in series.at]
