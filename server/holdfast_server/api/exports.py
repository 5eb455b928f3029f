"""Exports of a part of a job as files."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Any

from fastapi import Query
from starlette.responses import Response, StreamingResponse

from holdfast.protocol.field_types import MAX_ITERATION
from holdfast_server.api.endpoints import Router
from holdfast_server.api.responses import Json
from holdfast_server.core.access import FOLLOW, VIEW
from holdfast_server.http.dependencies import Db, Exporting
from holdfast_server.queries import exports, traces

NOT_FOUND = "No such job"
CSV, PARQUET = "text/csv; charset=utf-8", "application/vnd.apache.parquet"

First = Annotated[
    int | None,
    Query(alias="from", ge=0, le=MAX_ITERATION, description="first iteration; by default, that of the job"),
]
Last = Annotated[
    int | None,
    Query(alias="to", ge=0, le=MAX_ITERATION, description="last iteration; by default, that of the job"),
]

router = Router("/api/v1/jobs/{job}/export", tag="jobs")


def _named(job: str, name: str) -> dict[str, str]:
    # All other characters of a job's name are valid in a file name.
    return {"Content-Disposition": f'attachment; filename="{job.replace("/", "-")}-{name}"'}


@router.endpoint(
    "GET",
    "/samples.csv",
    access=FOLLOW,
    returns=str,
    success="The file",
    errors={404: NOT_FOUND},
    media_type=CSV,
    example="iteration,loss\r\n1,2.5\r\n",
    response_class=Response,
)
async def samples_csv(job: str, db: Db, room: Exporting, first: First = None, last: Last = None) -> Response:
    """Export a row per iteration of rank 0, or per bucket of `iterations` iterations where data was
    downsampled."""
    wanted = await exports.samples(db, job, first, last)
    return StreamingResponse(exports.csv_of(db, room, wanted), media_type=CSV, headers=_named(job, "samples.csv"))


@router.endpoint(
    "GET",
    "/samples.parquet",
    access=FOLLOW,
    returns=str,
    success="The file",
    errors={404: NOT_FOUND, 409: "The server has no pyarrow"},
    media_type=PARQUET,
    example="PAR1…PAR1",
    response_class=Response,
)
async def samples_parquet(job: str, db: Db, room: Exporting, first: First = None, last: Last = None) -> Response:
    """Export the same as Parquet. Requires pyarrow on the server, which the extra `parquet` installs."""
    wanted = await exports.samples(db, job, first, last)
    file = await exports.parquet_of(db, room, wanted)
    about = _named(job, "samples.parquet") | {"Content-Length": str(file.seek(0, os.SEEK_END))}
    return StreamingResponse(exports.sent(file), media_type=PARQUET, headers=about)


@router.endpoint(
    "GET",
    "/checkpoints.csv",
    access=FOLLOW,
    returns=str,
    success="The file",
    errors={404: NOT_FOUND},
    media_type=CSV,
    example="checkpoint,state\r\n000000001200-1,durable\r\n",
    response_class=Response,
)
async def checkpoints_csv(job: str, db: Db, room: Exporting, first: First = None, last: Last = None) -> Response:
    """Export all checkpoints, in every state."""
    wanted = await exports.select_checkpoints(db, job, first, last)
    rows = exports.checkpoints_csv(db, room, wanted)
    return StreamingResponse(rows, media_type=CSV, headers=_named(job, "checkpoints.csv"))


@router.endpoint(
    "GET", "/trace.json", access=VIEW, returns=dict[str, Any], errors={404: NOT_FOUND, 422: "No such attempt"}
)
async def export_trace(
    job: str,
    db: Db,
    room: Exporting,
    attempt: Annotated[
        int | None, Query(ge=0, le=MAX_ITERATION, description="by default, the one at `to`, or the newest")
    ] = None,
    first: First = None,
    last: Last = None,
) -> Response:
    """Export an attempt in Chrome's trace format, for ui.perfetto.dev."""
    trace = await traces.trace(db, room, job, attempt, first, last)
    answer = await asyncio.to_thread(Json, trace)
    answer.headers.update(_named(job, "trace.json"))
    return answer
