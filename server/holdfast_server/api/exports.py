"""A window of a job as files."""

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
    int | None, Query(alias="from", ge=0, le=MAX_ITERATION, description="iteration; none: the first")
]
Last = Annotated[int | None, Query(alias="to", ge=0, le=MAX_ITERATION, description="iteration; none: the last")]

router = APIRouter(prefix="/jobs/{job}/export", tags=["jobs"])


def _file(kind: str, example: str, **others: str) -> dict[int | str, dict[str, Any]]:
    content = {kind: {"schema": {"type": "string"}, "example": example}}
    answers: dict[int | str, dict[str, Any]] = {
        200: {"description": "The file", "content": content},
        404: {"description": NOT_FOUND},
    }
    return answers | {int(name.removeprefix("_")): {"description": why} for name, why in others.items()}


def _named(job: str, name: str) -> dict[str, str]:
    # A job's name is made of letters, digits and a few signs that a file's name may have.
    return {"Content-Disposition": f'attachment; filename="{job.replace("/", "-")}-{name}"'}


@router.get("/samples.csv", responses=_file(CSV, "iteration,loss\r\n1,2.5\r\n"), response_class=Response)
async def samples_csv(job: str, db: Db, room: Exporting, first: First = None, last: Last = None) -> Response:
    """A row for each iteration of rank 0; of what was thinned, for each bucket: `iterations` says of how many."""
    wanted = await exports.samples(db, job, first, last)
    return StreamingResponse(exports.csv_of(db, room, wanted), media_type=CSV, headers=_named(job, "samples.csv"))


@router.get(
    "/samples.parquet",
    responses=_file(PARQUET, "PAR1…PAR1", _409="The server has no pyarrow"),
    response_class=Response,
)
async def samples_parquet(job: str, db: Db, room: Exporting, first: First = None, last: Last = None) -> Response:
    """The same by column; 409 where the server has no pyarrow, which the extra `parquet` installs."""
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
    """All checkpoints of the window, in every state."""
    wanted = await exports.taken(db, job, first, last)
    rows = exports.checkpoints_csv(db, room, wanted)
    return StreamingResponse(rows, media_type=CSV, headers=_named(job, "checkpoints.csv"))


@router.get("/trace.json", responses=returns(dict[str, Any], _404=NOT_FOUND, _422="No such attempt"))
async def trace(
    job: str,
    db: Db,
    room: Exporting,
    attempt: Annotated[
        int | None, Query(ge=0, le=MAX_ITERATION, description="none: the one at the window's end, or the newest")
    ] = None,
    first: First = None,
    last: Last = None,
) -> Response:
    """An attempt in Chrome's trace format, for ui.perfetto.dev."""
    told = await traces.trace(db, room, job, attempt, first, last)
    answer = await asyncio.to_thread(Json, told)
    answer.headers.update(_named(job, "trace.json"))
    return answer
