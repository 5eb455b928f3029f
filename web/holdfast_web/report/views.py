"""View of the report page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import urlencode

from holdfast.protocol.analyses import Bucket
from holdfast.protocol.report import Report, cost_text, outcome_text
from holdfast_server.queries.time_buckets import BUCKETS
from holdfast_web.shared.render import View

SINCE = {"12h": "last 12 h", "24h": "last 24 h", "3d": "last 3 days", "7d": "last 7 days", "30d": "last 30 days"}
ROWS_SHOWN = 6
"""Rows of each list before the rest is folded, so that a night fits one screen."""


@dataclass(frozen=True, kw_only=True)
class BarPart:
    """A category in the bar of the time, in percent of the whole."""

    name: Bucket
    share: float
    begin: float
    length: float


@dataclass(frozen=True, kw_only=True)
class FailureTexts:
    cost: str
    outcome: str


@dataclass(frozen=True, kw_only=True)
class ReportPage(View):
    template: ClassVar[str] = "report/report.html"
    report: Report
    texts: list[FailureTexts]
    """Texts of the failures, in their order."""
    since: str
    """The window as it was asked for."""
    windows: dict[str, str]
    projects: Sequence[str]
    """Projects that the user may see."""
    bar: list[BarPart]
    shown: int = ROWS_SHOWN
    query: str
    """The query string of the same report from the API."""


def report_page(report: Report, since: str, projects: Sequence[str]) -> ReportPage:
    asked = {"since": since} | ({"project": report.project} if report.project else {})
    return ReportPage(
        report=report,
        texts=[FailureTexts(cost=cost_text(row), outcome=outcome_text(row)) for row in report.failures],
        since=since,
        windows=SINCE if since in SINCE else SINCE | {since: f"last {since}"},
        projects=projects,
        bar=_bar(report),
        query=urlencode(asked),
    )


def _bar(report: Report) -> list[BarPart]:
    total, begin, parts = report.gpu_hours, 0.0, []
    for name in BUCKETS:
        share = sum(row.buckets[name] for row in report.projects) / total if total else 0.0
        if share > 0:
            parts.append(BarPart(name=name, share=share, begin=begin, length=share * 100))
            begin += share * 100
    return parts
