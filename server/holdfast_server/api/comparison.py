"""Metrics of several jobs on one axis."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.responses import Response

from holdfast.protocol.field_types import MAX_ITERATION
from holdfast.protocol.timeline import Comparison, ComparisonAxis
from holdfast_server.api.endpoints import Router
from holdfast_server.api.responses import Json
from holdfast_server.core.access import LISTS
from holdfast_server.http.dependencies import Asker, Db
from holdfast_server.queries import comparison

router = Router("/api/v1", tag="jobs")


@router.endpoint(
    "GET",
    "/compare",
    access=LISTS,  # the query checks each job
    returns=Comparison,
    errors={404: "No such job", 422: "Invalid parameter"},
)
def compare(
    db: Db,
    asker: Asker,
    job: Annotated[list[str], Query(description="`job`, or `job:lineage` for one lineage; at most 8")],
    metric: Annotated[list[str] | None, Query(description="at most 4; by default, `loss`")] = None,
    x: Annotated[
        ComparisonAxis, Query(description="iterations, seconds since the start of each job, or seconds since 1970")
    ] = "iteration",
    first: Annotated[float | None, Query(alias="from", ge=0, le=MAX_ITERATION)] = None,
    last: Annotated[float | None, Query(alias="to", ge=0, le=MAX_ITERATION)] = None,
    points: Annotated[
        int, Query(ge=2, le=comparison.MOST_POINTS, description="approximate number of points per curve")
    ] = 300,
) -> Response:
    """Return metrics of several jobs on one axis, downsampled."""
    asked = comparison.ComparisonQuery(
        jobs=tuple(job), metrics=tuple(metric or ["loss"]), axis=x, start=first, end=last, points=points
    )
    return Json(comparison.compare(db, asked, visible=asker.visible_projects))
