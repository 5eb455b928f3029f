"""The view of a comparison."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar
from urllib.parse import urlencode

from holdfast.protocol.attempts import AttemptConfiguration
from holdfast.protocol.timeline import ComparedCurve, ComparedJob, Comparison, ComparisonAxis
from holdfast.protocol.wire import ConfigurationSection
from holdfast_server.core.principal import Principal
from holdfast_server.db import Database
from holdfast_server.queries import attempts, comparison
from holdfast_server.queries.comparison import ComparisonQuery
from holdfast_server.queries.job_view import JobView, find_job
from holdfast_web.comparison import plot
from holdfast_web.shared.render import View

AXES: dict[ComparisonAxis, str] = {
    "iteration": "By iteration",
    "elapsed": "By time since the start",
    "time": "By time of day (UTC)",
}
LINEAGES_LINKED = 8
"""Newest lineages of a job that the page offers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonAddress:
    """The choices of the page, as its address has them."""

    query: ComparisonQuery
    chosen: tuple[str, ...]
    """Metrics that were chosen; empty: the default."""
    smoothing: float
    """Weight of the moving average, from 0 to below 1."""
    logarithmic: bool

    def with_job(self, name: str) -> str:
        return self._to(dict.fromkeys((*self.query.jobs, name)))

    def without_job(self, name: str) -> str:
        return self._to(dict.fromkeys(job for job in self.query.jobs if job != name))

    def _to(self, jobs: dict[str, None]) -> str:
        query = self.query
        parameters: dict[str, object] = {
            "job": list(jobs),
            "metric": self.chosen,
            "x": "" if query.axis == "iteration" else query.axis,
            "from": "" if query.start is None else f"{query.start:.10g}",
            "to": "" if query.end is None else f"{query.end:.10g}",
            "smooth": f"{self.smoothing:g}" if self.smoothing else "",
            "log": "1" if self.logarithmic else "",
        }
        return "/compare?" + urlencode({name: value for name, value in parameters.items() if value}, doseq=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPanel:
    """The chart of one metric."""

    metric: str
    lines: list[plot.PlottedCurve]
    x: plot.AxisRange
    y: plot.AxisRange | None
    """None: no value can be drawn."""
    x_ticks: list[plot.AxisTick]
    y_ticks: list[plot.AxisTick]
    forks: list[tuple[float, str]]
    """Position in percent and text of the places at which one of the jobs was forked from another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationTable:
    """The values that differ between the newest attempts of the jobs."""

    columns: list[tuple[str, int]]
    """Job and attempt."""
    rows: list[tuple[ConfigurationSection, str, list[str | None]]]
    """Section, name, and a value for each column."""


@dataclass(frozen=True, kw_only=True)
class ComparisonPage(View):
    template: ClassVar[str] = "comparison/compare.html"
    address: ComparisonAddress
    compared: Comparison
    panels: list[MetricPanel]
    bucket: str
    """What each point is the mean of; empty where each iteration is a point."""
    summaries: dict[tuple[str, str], ComparedCurve]
    """By the name of the job and the metric."""
    configuration: ConfigurationTable
    axes: dict[ComparisonAxis, str]
    most_jobs: int = comparison.MOST_JOBS
    lineages_linked: int = LINEAGES_LINKED


def comparison_page(db: Database, address: ComparisonAddress, asker: Principal, *, now: float) -> ComparisonPage:
    compared = comparison.compare(db, address.query, visible=asker.visible_projects)
    if not address.chosen and compared.metrics and not any(job.curves for job in compared.jobs):
        # no job reports a loss: show what they report
        query = replace(address.query, metrics=(compared.metrics[0],))
        address = replace(address, query=query)
        compared = comparison.compare(db, query, visible=asker.visible_projects)
    across = plot.x_range(
        (x for job in compared.jobs for curve in job.curves for x in curve.x),
        address.query.start,
        address.query.end,
    )
    return ComparisonPage(
        address=address,
        compared=compared,
        panels=[_panel(metric, compared, across, address) for metric in address.query.metrics],
        bucket=_bucket(compared),
        summaries={(job.name, curve.metric): curve for job in compared.jobs for curve in job.curves},
        configuration=_configuration(db, compared, now=now),
        axes=AXES,
    )


def _configuration(db: Database, compared: Comparison, *, now: float) -> ConfigurationTable:
    found: list[AttemptConfiguration] = []
    with db.read() as session:
        for name in dict.fromkeys(each.job for each in compared.jobs):
            view = JobView(session, find_job(session, name), now=now)
            found += [attempts.configuration(view, newest.attempt) for newest in attempts.attempts(view, limit=1)]
    reported = [each for each in found if each.configuration or each.environment]
    sections: dict[ConfigurationSection, list[dict[str, str]]] = {
        "configuration": [each.configuration for each in reported],
        "environment": [each.environment for each in reported],
    }
    rows = [
        (section, name, values)
        for section, columns in sections.items()
        for name in dict.fromkeys(name for column in columns for name in column)
        if len(set(values := [column.get(name) for column in columns])) > 1
    ]
    return ConfigurationTable(columns=[(each.job, each.attempt) for each in reported], rows=rows)


def _panel(metric: str, compared: Comparison, across: plot.AxisRange, address: ComparisonAddress) -> MetricPanel:
    curves = [
        (color, job, curve)
        for color, job in enumerate(compared.jobs)
        for curve in job.curves
        if curve.metric == metric
    ]
    shown = [
        value
        for _, _, curve in curves
        for x, value in zip(curve.x, curve.mean, strict=True)
        if across.low <= x <= across.high
    ]
    up = plot.y_range(shown, logarithmic=address.logarithmic)
    return MetricPanel(
        metric=metric,
        lines=[]
        if up is None
        else [_line(color, job, curve, across, up, address) for color, job, curve in curves],
        x=across,
        y=up,
        x_ticks=plot.ticks(across, plot.X_TICKS, lambda place: place),
        y_ticks=[] if up is None else plot.ticks(up, plot.Y_TICKS, lambda place: 1 - place),
        forks=_forks(compared, across),
    )


def _line(
    color: int, job: ComparedJob, curve: ComparedCurve, across: plot.AxisRange, up: plot.AxisRange,
    address: ComparisonAddress,
) -> plot.PlottedCurve:  # fmt: skip
    raw = plot.parts(curve.x, curve.mean, across, up)
    if not address.smoothing:
        return plot.PlottedCurve(name=job.name, color=color, points=raw, raw=[])
    values = plot.smoothed(curve.mean, address.smoothing)
    return plot.PlottedCurve(name=job.name, color=color, points=plot.parts(curve.x, values, across, up), raw=raw)


def _forks(compared: Comparison, across: plot.AxisRange) -> list[tuple[float, str]]:
    if compared.axis != "iteration":
        return []
    here = {job.job for job in compared.jobs}
    forks: dict[int, dict[str, None]] = {}
    for job in compared.jobs:
        at = job.origin_iteration
        if job.origin in here and at is not None and across.low <= at <= across.high:
            forks.setdefault(at, {})[job.job] = None
    return [(round(100 * across.place(at), 2), f"{', '.join(jobs)} forked") for at, jobs in forks.items()]


def _bucket(compared: Comparison) -> str:
    widths = [job.bucket_iterations for job in compared.jobs]
    low, high = min(widths, default=1), max(widths, default=1)
    return "" if high == 1 else f"each point: mean of {low if low == high else f'{low} to {high}'} iterations"
