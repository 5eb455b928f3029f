"""Attempts of a job: their configuration and how two of them differ."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query
from starlette.responses import Response

from holdfast.protocol.attempts import AttemptConfiguration, AttemptOutput, AttemptSummary
from holdfast.protocol.field_types import MAX_ATTEMPT
from holdfast_server.api.endpoints import Router
from holdfast_server.api.responses import Json
from holdfast_server.core.access import VIEW
from holdfast_server.http.dependencies import Asker, Db, Now
from holdfast_server.queries import attempts
from holdfast_server.queries.job_view import view_job

AttemptNumber = Annotated[int, Path(ge=0, le=MAX_ATTEMPT)]

router = Router("/api/v1/jobs/{job}/attempts", tag="jobs")


@router.endpoint("GET", "", access=VIEW, returns=dict[str, list[AttemptSummary]], errors={404: "No such job"})
def job_attempts(job: str, db: Db, now: Now, limit: Annotated[int, Query(ge=1, le=500)] = 50) -> Response:
    """List the attempts of a job, newest first."""
    with view_job(db, job, now=now) as view:
        return Json({"attempts": attempts.attempts(view, limit=limit)})


@router.endpoint(
    "GET",
    "/{attempt}/configuration",
    access=VIEW,
    returns=AttemptConfiguration,
    errors={404: "No such job or attempt", 422: "Invalid `against`"},
)
def configuration(
    job: str,
    attempt: AttemptNumber,
    db: Db,
    now: Now,
    asker: Asker,
    against: Annotated[
        str, Query(description="number of an attempt to compare with, or `origin`: the attempt that was forked")
    ] = "",
) -> Response:
    """Return the configuration and environment of an attempt, and how they differ from another attempt's."""
    with view_job(db, job, now=now) as view:
        return Json(attempts.configuration(view, attempt, against=against, visible=asker.visible_projects))


@router.endpoint(
    "GET", "/{attempt}/output", access=VIEW, returns=AttemptOutput, errors={404: "No such job or attempt"}
)
def output(job: str, attempt: AttemptNumber, db: Db, now: Now) -> Response:
    """Return the last 1,000 lines of output of an attempt under `holdfast run`."""
    with view_job(db, job, now=now) as view:
        return Json(attempts.output(view, attempt))
