"""What is known of jobs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from holdfast_server import timeline
from holdfast_server.api.answers import Json
from holdfast_server.api.schema import returns
from holdfast_server.dependencies import Clock, Db
from holdfast_server.samples import MAX_ITERATION
from holdfast_server.views import CheckpointRow, Edit, JobSummary, NoticeRow, Timeline

NOT_FOUND = "No such job"

Limit = Annotated[int, Query(ge=1, le=500)]

router = APIRouter(prefix="/jobs", tags=["jobs"])


@router.get("", responses=returns(dict[str, list[JobSummary]]))
async def fleet(db: Db, clock: Clock, search: str = "") -> Response:
    """All jobs, the one heard last first."""
    return Json({"jobs": await timeline.fleet(db, now=clock(), search=search)})


@router.get("/{job}", responses=returns(JobSummary, _404=NOT_FOUND))
async def summary(job: str, db: Db, clock: Clock) -> Response:
    return Json(await timeline.job_summary(db, job, now=clock()))


@router.get("/{job}/timeline", responses=returns(Timeline, _404=NOT_FOUND))
async def job_timeline(
    job: str,
    db: Db,
    clock: Clock,
    first: Annotated[int | None, Query(alias="from", ge=0, le=MAX_ITERATION)] = None,
    last: Annotated[int | None, Query(alias="to", ge=0, le=MAX_ITERATION)] = None,
    points: Annotated[int, Query(ge=2, le=timeline.MAX_POINTS)] = 1200,
) -> Response:
    """What happened from one iteration to another, in at most `points` buckets a lineage."""
    return Json(await timeline.timeline(db, job, start=first, end=last, points=points, now=clock()))


@router.get(
    "/{job}/checkpoints",
    responses=returns(dict[str, list[CheckpointRow]], _404=NOT_FOUND, _422="No checkpoint `before`"),
)
async def restore_points(job: str, db: Db, limit: Limit = 50, before: str | None = None) -> Response:
    """The last taken first, in every state; `before` is the id that the page before ended with."""
    return Json({"checkpoints": await timeline.restore_points(db, job, limit=limit, before=before)})


@router.get("/{job}/edits", responses=returns(dict[str, list[Edit]], _404=NOT_FOUND))
async def edits(job: str, db: Db, limit: Limit = 20) -> Response:
    """The versions of what was desired, newest first."""
    return Json({"edits": await timeline.edits(db, job, limit=limit)})


@router.get("/{job}/notices", responses=returns(dict[str, list[NoticeRow]], _404=NOT_FOUND))
async def notices(job: str, db: Db, limit: Limit = 20) -> Response:
    return Json({"notices": await timeline.notices(db, job, limit=limit)})
