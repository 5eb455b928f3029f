"""Exports of a part of a job as files."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response, StreamingResponse

from holdfast.protocol.messages import MAX_ITERATION
from holdfast_server.api.openapi import returns
from holdfast_server.api.responses import Json
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

router = APIRouter(prefix="/jobs/{job}/export", tags=["jobs"])


def _file(kind: str, example: str, **others: str) -> dict[int | str, dict[str, Any]]:
    content = {kind: {"schema": {"type": "string"}, "example": example}}
    return returns(None, 200, _404=NOT_FOUND, **others) | {200: {"description": "The file", "content": content}}


def _named(job: str, name: str) -> dict[str, str]:
    # All other characters of a job's name are valid in a file name.
    return {"Content-Disposition": f'attachment; filename="{job.replace("/", "-")}-{name}"'}


@router.get("/samples.csv", responses=_file(CSV, "iteration,loss\r\n1,2.5\r\n"), response_class=Response)
async def samples_csv(job: str, db: Db, room: Exporting, first: First = None, last: Last = None) -> Response:
    """Export a row per iteration of rank 0, or per bucket of `iterations` iterations where data was
    downsampled."""
    wanted = await exports.samples(db, job, first, last)
    return StreamingResponse(exports.csv_of(db, room, wanted), media_type=CSV, headers=_named(job, "samples.csv"))


@router.get(
    "/samples.parquet",
    responses=_file(PARQUET, "PAR1…PAR1", _409="The server has no pyarrow"),
    response_class=Response,
)
async def samples_parquet(job: str, db: Db, room: Exporting, first: First = None, last: Last = None) -> Response:
    """Export the same as Parquet. Requires pyarrow on the server, which the extra `parquet` installs."""
    wanted = await exports.samples(db, job, first, last)
    file = await exports.parquet_of(db, room, wanted)
    about = _named(job, "samples.parquet") | {"Content-Length": str(file.seek(0, os.SEEK_END))}
    return StreamingResponse(exports.sent(file), media_type=PARQUET, headers=about)


@router.get(
    "/checkpoints.csv",
    responses=_file(CSV, "checkpoint,state\r\n000000001200-1,durable\r\n"),
    response_class=Response,
)
async def checkpoints_csv(job: str, db: Db, room: Exporting, first: First = None, last: Last = None) -> Response:
    """Export all checkpoints, in every state."""
    wanted = await exports.select_checkpoints(db, job, first, last)
    rows = exports.checkpoints_csv(db, room, wanted)
    return StreamingResponse(rows, media_type=CSV, headers=_named(job, "checkpoints.csv"))


@router.get("/trace.json", responses=returns(dict[str, Any], _404=NOT_FOUND, _422="No such attempt"))
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
