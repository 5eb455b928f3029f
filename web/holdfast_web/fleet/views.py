"""Views of the fleet page."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import ClassVar
from urllib.parse import urlencode, urlsplit

from holdfast.protocol.administration import Alert
from holdfast.protocol.fleet import BulkAction, BulkOutcome, BulkResult, Fleet
from holdfast.protocol.jobs import JobStatus, JobSummary
from holdfast.protocol.timeline import ShortWindow
from holdfast.protocol.verdicts import VerdictCause, VerdictLevel
from holdfast_server.alerts.incidents import open_of_jobs
from holdfast_server.control.saved_views import SavedView, saved_views
from holdfast_server.core.principal import Principal, Role
from holdfast_server.core.settings import Prices
from holdfast_server.db import Database
from holdfast_server.queries import goodput
from holdfast_server.queries.account import AccountQuery, account
from holdfast_server.queries.fleet import PAGE_ROWS, FleetQuery, FleetSort, listed_names
from holdfast_server.queries.fleet import fleet as fleet_of
from holdfast_server.queries.goodput import GoodputShare
from holdfast_server.queries.verdicts import is_late
from holdfast_web.account.views import AccountStrip, account_strip
from holdfast_web.shared.render import View

SIZES = (25, 50, 100, 200)
DEFAULT_ORDER: FleetSort = "attention"
ORDERS: dict[FleetSort, str] = {
    "attention": "Needs attention first",
    "living": "Running first",
    "name": "Name",
    "heard": "Latest report first",
    "iteration": "Most iterations first",
    "status": "Status",
    "unsaved": "Most unsaved work first",
    "overhead": "Furthest over budget first",
    "durable": "Oldest checkpoint first",
    "owner": "Owner",
    "loss": "Lowest loss first",
    "interval": "Longest interval first",
    "iteration_time": "Slowest iterations first",
}
ASCENDING: frozenset[FleetSort] = frozenset(("attention", "name", "status", "owner", "loss"))
"""Orders whose values increase; those of the others decrease."""
COLUMNS = {
    "owner": "Owner",
    "iteration": "Iteration",
    "loss": "Loss",
    "goodput": "Goodput",
    "overhead": "Overhead",
    "interval": "Interval",
    "durable": "Last durable",
    "unsaved": "Unsaved work",
    "iteration_time": "Iteration time",
    "report": "Last report",
}
ACTIONS: dict[BulkAction, tuple[str, str]] = {
    "checkpoint": ("Take a checkpoint now of", "with a checkpoint requested"),
    "pause": ("Pause checkpoints of", "paused"),
    "resume": ("Resume checkpoints of", "resumed"),
    "pause_training": ("Pause training of", "asked to pause"),
    "continue_training": ("Continue training of", "asked to continue"),
    "budget": ("Set the budget of", "changed"),
    "write_budget": ("Set the write budget of", "changed"),
    "on_trouble": ("Set the reaction to wrong losses of", "changed"),
    "acknowledge": ("Acknowledge the alerts of", "acknowledged"),
    "archive": ("Archive", "archived"),
    "unarchive": ("Unarchive", "unarchived"),
    "delete": ("Delete", "deleted"),
}
"""Question before a bulk action, which the number of jobs follows; and result, which follows that number."""
JOBS_NAMED = 50
"""Most jobs that the confirmation of a bulk action lists."""
SAYS_STATUS: tuple[VerdictCause, ...] = (
    "failed", "silent", "restarting", "late", "data", "straggler", "starting", "healthy", "stopped", "finished",
)  # fmt: skip
"""Verdicts that imply the status, which their rows do not repeat."""
GOODPUT_WINDOW: ShortWindow = "1h"
NEIGHBORS = 2
"""Number of links to pages before and after the current one."""


@dataclass(frozen=True, slots=True)
class FleetLinks:
    """Addresses of the same view with one parameter changed."""

    question: FleetQuery
    hidden: frozenset[str]

    @property
    def here(self) -> str:
        return self._to(self.question)

    @property
    def query(self) -> str:
        """The query of this view, without its page."""
        return urlsplit(self._filtered()).query

    def page(self, number: int) -> str:
        return self._to(replace(self.question, page=number))

    def status(self, status: JobStatus | None) -> str:
        return self._filtered(status=status, archived=False)

    def archive(self) -> str:
        """Return the address of the archived jobs."""
        return self._filtered(status=None, archived=True)

    def owner(self, owner: str | None) -> str:
        return self._filtered(owner=owner)

    def labelled(self, name: str, value: str) -> str:
        """Return the address of the jobs that have a label too."""
        # the field for labels separates them by commas
        label = f"{name}: {value}" if value and "," not in value else name
        return self._filtered(labels=(*dict.fromkeys((*self.question.labels, label)),))

    def unlabelled(self, label: str) -> str:
        return self._filtered(labels=tuple(each for each in self.question.labels if each != label))

    def sorted_by(self, order: FleetSort) -> str:
        """Return the address of this order, or of the reverse one where this is the current order."""
        same = order == self.question.order
        return self._filtered(order=order, reverse=same and not self.question.reverse)

    def _filtered(self, **changes: object) -> str:
        return self._to(replace(self.question, page=1, **changes))  # type: ignore[arg-type]

    def _to(self, question: FleetQuery) -> str:
        order = ("-" if question.reverse else "") + question.order
        parameters = {
            "search": question.search,
            "status": question.status or "",
            "project": question.project or "",
            "owner": question.owner or "",
            "label": ", ".join(question.labels),
            "group": "project" if question.grouped else "",
            "archived": "1" if question.archived else "",
            "sort": "" if order == DEFAULT_ORDER else order,
            "size": "" if question.size == PAGE_ROWS else str(question.size),
            "hide": [column for column in COLUMNS if column in self.hidden],
            "page": "" if question.page == 1 else str(question.page),
        }
        query = urlencode({name: value for name, value in parameters.items() if value}, doseq=True)
        return f"/?{query}" if query else "/"


@dataclass(frozen=True, slots=True)
class JobGroup:
    """The jobs of one project on this page, or all jobs when they are not grouped."""

    project: str
    jobs: list[JobSummary]

    @property
    def gpu_hours(self) -> float:
        """Return the unsaved work of the group."""
        return sum(job.unsaved_gpu_hours or 0.0 for job in self.jobs)


@dataclass(frozen=True, kw_only=True)
class FleetRows(View):
    template: ClassVar[str] = "fleet/fleet_live.html"
    page_template: ClassVar[str] = "fleet/fleet.html"
    fleet: Fleet
    groups: list[JobGroup]
    question: FleetQuery
    hidden: frozenset[str]
    """Columns that are not shown."""
    links: FleetLinks
    pages: list[int | None]
    """Page numbers to link; None marks a gap."""
    alerts: dict[str, list[Alert]]
    """Open alerts by job, most severe first."""
    goodput: dict[str, GoodputShare]
    """Goodput of the last hour by job."""
    late: frozenset[str]
    """Jobs whose newest checkpoint is too old."""
    worst: VerdictLevel
    """Level of the worst verdict on this page."""
    tab_name: str
    """Title of the page, with the number of jobs with a critical verdict."""
    server: str
    """The address for agents."""
    views: list[SavedView]
    """The views that the viewer has saved."""
    says_status: tuple[VerdictCause, ...] = SAYS_STATUS
    default_order: FleetSort = DEFAULT_ORDER
    orders: dict[FleetSort, str] = field(default_factory=lambda: ORDERS)
    ascending: frozenset[FleetSort] = ASCENDING
    columns: dict[str, str] = field(default_factory=lambda: COLUMNS)
    sizes: tuple[int, ...] = SIZES
    now: float

    filtered: bool
    """Whether some jobs may be left out."""
    operating: bool
    """Whether the viewer may change a job on this page."""
    administering: bool
    """Whether the viewer may delete a job on this page."""
    owners: list[str]
    """Owners on this page, for suggestions."""
    labels: list[str]
    """Labels on this page, for suggestions."""


@dataclass(frozen=True, slots=True)
class SkippedJobs:
    """Jobs that a bulk action does not change, for the same reason."""

    reason: str
    jobs: list[str]


@dataclass(frozen=True, kw_only=True)
class BulkConfirmation(View):
    """The question before one change of several jobs: how many, which, and which are skipped."""

    template: ClassVar[str] = "fleet/confirm.html"
    action: BulkAction
    words: str
    jobs: list[str]
    """Jobs that would be changed."""
    later: list[str]
    """Those of them that have ended, and apply a setting at their next start."""
    skipped: list[SkippedJobs]
    value: str
    """The budget that was typed, in percent, or the write budget."""
    back: str
    named: int = JOBS_NAMED


@dataclass(frozen=True, kw_only=True)
class BulkPage(View):
    """The results of one change of several jobs."""

    template: ClassVar[str] = "fleet/bulk.html"
    action: BulkAction
    outcomes: list[BulkOutcome]
    words: str
    back: str
    unseen: tuple[BulkAction, ...] = ("archive", "unarchive", "delete")
    """Actions that are done at once, without an agent."""
    questions: dict[BulkAction, str] = field(
        default_factory=lambda: {action: question for action, (question, _) in ACTIONS.items()}
    )


def bulk_confirmation(
    action: BulkAction, preview: BulkResult, ended: list[str], *, value: str, back: str
) -> BulkConfirmation:
    """Return the question; `ended`: those of the jobs to change that are not running."""
    skipped: dict[str, list[str]] = {}
    for one in preview.outcomes:
        if one.refusal:
            # reasons that name the job differ for each; the list of jobs has the name
            skipped.setdefault(one.refusal.replace(one.job, "this job"), []).append(one.job)
    return BulkConfirmation(
        action=action,
        words=ACTIONS[action][0],
        jobs=[one.job for one in preview.outcomes if not one.refusal],
        later=ended if action in ("pause", "resume", "budget", "write_budget", "on_trouble") else [],
        skipped=[SkippedJobs(reason, jobs) for reason, jobs in skipped.items()],
        value=value,
        back=back,
    )


def fleet_rows(
    db: Database, question: FleetQuery, *, hidden: frozenset[str], asker: Principal, server: str, now: float
) -> FleetRows:
    with db.read() as session:
        fleet = fleet_of(session, question, now=now)
        names = [job.job for job in fleet.jobs]
        alerts = open_of_jobs(session, names, now=now)
        shares = goodput.shares(session, names, GOODPUT_WINDOW, now=now)
        views = saved_views(session, asker.name)
    shown = replace(question, page=fleet.page)
    critical = sum(job.verdict is not None and job.verdict.level == "critical" for job in fleet.jobs)
    return FleetRows(
        fleet=fleet,
        groups=_groups(fleet.jobs) if question.grouped else [JobGroup("", fleet.jobs)],
        question=shown,
        hidden=hidden,
        links=FleetLinks(shown, hidden),
        pages=_pages(fleet.page, fleet.pages),
        alerts=alerts,
        goodput=shares,
        late=frozenset(job.job for job in fleet.jobs if is_late(job, now)),
        worst=_worst(fleet.jobs),
        tab_name=f"{critical} critical, Fleet" if critical else "Fleet",
        filtered=any((shown.search, shown.status, shown.project, shown.owner, shown.labels, shown.archived)),
        operating=_may(asker, Role.operator, fleet.jobs),
        administering=_may(asker, Role.admin, fleet.jobs),
        owners=sorted({job.owner for job in fleet.jobs if job.owner}),
        labels=_labels(fleet.jobs),
        server=server,
        views=views,
        sizes=tuple(sorted({*SIZES, question.size})),
        now=now,
    )


def fleet_account(
    db: Database, question: FleetQuery, prices: Prices, *, asker: Principal, now: float
) -> AccountStrip:
    """Return the account of the jobs that a question lists; without a filter, of deleted jobs too."""
    filtered = any((question.search, question.status, question.archived))
    asked = AccountQuery(
        project=question.project,
        owner=question.owner,
        labels=question.labels,
        jobs=listed_names(question, now=now) if filtered else None,
        visible_projects=asker.visible_projects,
    )
    with db.read() as session:
        return account_strip(account(session, asked, prices, now=now), asked)


def _may(asker: Principal, role: Role, jobs: list[JobSummary]) -> bool:
    return any((asker.role_in(job.project) or 0) >= role for job in jobs)


def _labels(jobs: list[JobSummary]) -> list[str]:
    found = {(name, value) for job in jobs for name, value in job.labels.items()}
    return [f"{name}: {value}" if value else name for name, value in sorted(found)]


def _groups(jobs: list[JobSummary]) -> list[JobGroup]:
    """Group jobs, which are sorted by project."""
    return [JobGroup(project, list(of_project)) for project, of_project in groupby(jobs, attrgetter("project"))]


def _worst(jobs: list[JobSummary]) -> VerdictLevel:
    levels = {job.verdict.level for job in jobs if job.verdict}
    return "critical" if "critical" in levels else "warning" if "warning" in levels else "good"


def _pages(page: int, pages: int) -> list[int | None]:
    near = range(max(1, page - NEIGHBORS), min(pages, page + NEIGHBORS) + 1)
    shown: list[int | None] = []
    for number in sorted({1, *near, pages}):
        before = shown[-1] if shown else 0
        if before is not None and number > before + 1:
            shown.append(None)
        shown.append(number)
    return shown
