"""Views of the fleet page."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import ClassVar
from urllib.parse import urlencode

from holdfast.protocol.administration import Alert
from holdfast.protocol.jobs import BulkOutcome, Fleet, JobStatus, JobSummary
from holdfast.protocol.timeline import ShortWindow
from holdfast_server.alerts.incidents import open_of_jobs
from holdfast_server.db import Database
from holdfast_server.queries import goodput
from holdfast_server.queries.fleet import PAGE_ROWS, FleetQuery, FleetSort
from holdfast_server.queries.fleet import fleet as fleet_of
from holdfast_server.queries.goodput import GoodputShare
from holdfast_web.shared.render import View

SIZES = (25, 50, 100, 200)
ORDERS: dict[FleetSort, str] = {
    "living": "Running first",
    "name": "Name",
    "heard": "Latest report first",
    "iteration": "Most iterations first",
    "status": "Status",
    "risk": "Most unsaved work first",
    "overhead": "Furthest over budget first",
    "durable": "Oldest checkpoint first",
}
GOODPUT_WINDOW: ShortWindow = "1h"
LATE_INTERVALS = 2
"""Age, in intervals, from which the newest checkpoint is late."""
NEIGHBORS = 2
"""Number of links to pages before and after the current one."""


@dataclass(frozen=True, slots=True)
class FleetLinks:
    """Addresses of the same query with one parameter changed."""

    question: FleetQuery

    @property
    def here(self) -> str:
        return self._to(self.question)

    def page(self, number: int) -> str:
        return self._to(replace(self.question, page=number))

    def status(self, status: JobStatus | None) -> str:
        return self._to(replace(self.question, status=status, page=1))

    def _to(self, question: FleetQuery) -> str:
        parameters = {
            "search": question.search,
            "status": question.status or "",
            "project": question.project or "",
            "group": "project" if question.grouped else "",
            "sort": "" if question.order == "living" else question.order,
            "size": "" if question.size == PAGE_ROWS else str(question.size),
            "page": "" if question.page == 1 else str(question.page),
        }
        query = urlencode({name: value for name, value in parameters.items() if value})
        return f"/?{query}" if query else "/"


@dataclass(frozen=True, slots=True)
class JobGroup:
    """The jobs of one project on this page, or all jobs when they are not grouped."""

    project: str
    jobs: list[JobSummary]

    @property
    def gpu_hours(self) -> float:
        """Return the unsaved work of the group."""
        return sum(job.exposure_gpu_hours or 0.0 for job in self.jobs)


@dataclass(frozen=True, kw_only=True)
class FleetRows(View):
    template: ClassVar[str] = "fleet/fleet_live.html"
    page_template: ClassVar[str] = "fleet/fleet.html"
    fleet: Fleet
    groups: list[JobGroup]
    question: FleetQuery
    links: FleetLinks
    pages: list[int | None]
    """Page numbers to link; None marks a gap."""
    alerts: dict[str, list[Alert]]
    """Open alerts by job, most severe first."""
    goodput: dict[str, GoodputShare]
    """Goodput of the last hour by job."""
    late: frozenset[str]
    """Jobs whose newest checkpoint is too old."""
    server: str
    """The address for agents."""
    orders: dict[FleetSort, str] = field(default_factory=lambda: ORDERS)
    sizes: tuple[int, ...] = SIZES
    now: float


@dataclass(frozen=True, kw_only=True)
class BulkPage(View):
    """The results of one change to several jobs."""

    template: ClassVar[str] = "fleet/bulk.html"
    outcomes: list[BulkOutcome]
    typed: str
    back: str


async def fleet_rows(db: Database, question: FleetQuery, *, server: str, now: float) -> FleetRows:
    async with db.one_view():
        fleet = await fleet_of(db, question, now=now)
        names = [job.job for job in fleet.jobs]
        alerts = await open_of_jobs(db, names, now=now)
        shares = await goodput.shares(db, names, GOODPUT_WINDOW, now=now)
    shown = replace(question, page=fleet.page)
    return FleetRows(
        fleet=fleet,
        groups=_groups(fleet.jobs) if question.grouped else [JobGroup("", fleet.jobs)],
        question=shown,
        links=FleetLinks(shown),
        pages=_pages(fleet.page, fleet.pages),
        alerts=alerts,
        goodput=shares,
        late=frozenset(job.job for job in fleet.jobs if _late(job, now)),
        server=server,
        sizes=tuple(sorted({*SIZES, question.size})),
        now=now,
    )


def _groups(jobs: list[JobSummary]) -> list[JobGroup]:
    """Group jobs, which are sorted by project."""
    return [JobGroup(project, list(of_project)) for project, of_project in groupby(jobs, attrgetter("project"))]


def _late(job: JobSummary, now: float) -> bool:
    """Return whether a running job has no durable checkpoint for more than `LATE_INTERVALS` intervals."""
    interval_seconds = job.interval_seconds
    if interval_seconds is None and job.interval is not None and job.iterations_per_second:
        interval_seconds = job.interval / job.iterations_per_second
    if not job.alive or interval_seconds is None or job.desired.paused:
        return False
    since = job.last_durable.at if job.last_durable else job.started_at
    return since is not None and now - since > LATE_INTERVALS * interval_seconds


def _pages(page: int, pages: int) -> list[int | None]:
    near = range(max(1, page - NEIGHBORS), min(pages, page + NEIGHBORS) + 1)
    shown: list[int | None] = []
    for number in sorted({1, *near, pages}):
        before = shown[-1] if shown else 0
        if before is not None and number > before + 1:
            shown.append(None)
        shown.append(number)
    return shown
