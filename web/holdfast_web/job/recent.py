"""What changed in the last hour of a job, in one list, and the end of its output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fastapi.responses import Response

from holdfast.protocol.administration import Alert
from holdfast.protocol.attempts import AttemptOutput
from holdfast.protocol.jobs import Annotation, Edit, JobSummary, NoticeInfo, Order, is_alert
from holdfast_server.api.endpoints import Router
from holdfast_server.core.access import VIEW
from holdfast_server.http.dependencies import Db, Now
from holdfast_server.queries import attempts
from holdfast_server.queries.job_view import view_job
from holdfast_web.shared.render import View
from holdfast_web.shared.routing import Htmx

RECENT_SECONDS, RECENT_MOST = 3600.0, 12
LOG_LINES = 40

router = Router()


@dataclass(frozen=True, kw_only=True)
class RecentChange:
    at: float
    kind: str
    """`settings`, `restore`, `start`, `annotation`, `notice` or `alert`."""
    text: str
    who: str
    iteration: int | None = None


def recent_changes(
    job: JobSummary,
    *,
    edits: Sequence[Edit],
    orders: Sequence[Order],
    annotations: Sequence[Annotation],
    notices: Sequence[NoticeInfo],
    alerts: Sequence[Alert],
    now: float,
) -> list[RecentChange]:
    """Return what changed in the last hour, newest first."""
    found = [
        *_operations(job, edits, orders),
        *(
            RecentChange(
                at=row.written_at,
                kind="annotation",
                text=row.text,
                who=row.who or "script",
                iteration=row.iteration,
            )
            for row in annotations
        ),
        *(
            RecentChange(at=row.at, kind="notice", text=row.message, who=row.level, iteration=row.iteration)
            for row in notices
        ),
        *(
            RecentChange(at=row.fired_at, kind="alert", text=f"{row.title}: {row.message}", who=row.severity)
            for row in alerts
            if row.fired_at is not None
        ),
    ]
    latest = sorted((row for row in found if row.at >= now - RECENT_SECONDS), key=lambda row: -row.at)
    return latest[:RECENT_MOST]


def _operations(job: JobSummary, edits: Sequence[Edit], orders: Sequence[Order]) -> Iterator[RecentChange]:
    for edit in edits:
        is_order = all(change.field == "restore" for change in edit.changes)
        if not is_order and not is_alert(edit.who):
            yield RecentChange(
                at=edit.at, kind="settings", text=edit.summary, who=edit.who, iteration=edit.applied_iteration
            )
    for order in orders:
        text = f"restore to {order.iteration:,} from {order.from_iteration:,}: {order.state}"
        yield RecentChange(at=order.created_at, kind="restore", text=text, who=order.who)
    if job.started_at is not None:
        yield RecentChange(at=job.started_at, kind="start", text=f"attempt {job.attempt} started", who=job.owner)


@dataclass(frozen=True, kw_only=True)
class LogPart(View):
    """The last lines of output of the newest attempt."""

    template: ClassVar[str] = "job/_log.html"
    page_template: ClassVar[str] = "job/panel.html"
    panel: str = "log"
    job: str
    output: AttemptOutput | None
    """`None` before the first attempt."""
    shown: int = LOG_LINES


@router.endpoint("GET", "/jobs/{job}/log", access=VIEW)
def job_log(job: str, db: Db, now: Now, htmx: Htmx = False) -> Response:
    with view_job(db, job, now=now) as view:
        newest = attempts.attempts(view, limit=1)
        output = attempts.output(view, newest[0].attempt) if newest else None
    return LogPart(job=job, output=output).part_or_page(htmx)
