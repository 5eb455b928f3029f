"""Exports of a part of a job as files."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import IO, Annotated, Any

from fastapi import Query
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from holdfast.protocol.field_types import MAX_ITERATION
from holdfast_server.api.endpoints import Router
from holdfast_server.api.responses import Json
from holdfast_server.core.access import FOLLOW, VIEW
from holdfast_server.db import Database
from holdfast_server.http.dependencies import Db
from holdfast_server.queries import exports, traces

NOT_FOUND = "No such job"
SENT_BYTES = 2**18
CSV, PARQUET = "text/csv; charset=utf-8", "application/vnd.apache.parquet"

First = Annotated[
    int | None,
    Query(alias="from", ge=0, le=MAX_ITERATION, description="first iteration; by default, that of the job"),
]
Last = Annotated[
    int | None,
    Query(alias="to", ge=0, le=MAX_ITERATION, description="last iteration; by default, that of the job"),
]

router = Router("/api/v1/jobs/{job}/export", tag="jobs", threads="exports")


def _named(job: str, name: str) -> dict[str, str]:
    # All other characters of a job's name are valid in a file name.
    return {"Content-Disposition": f'attachment; filename="{job.replace("/", "-")}-{name}"'}


async def _sent(db: Database, parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Make each part in a thread once the client has taken the one before."""
    while (part := await db.ask("exports", partial(next, parts, None))) is not None:
        yield part


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
def samples_csv(job: str, db: Db, first: First = None, last: Last = None) -> Response:
    """Export a row per iteration of rank 0, or per bucket of `iterations` iterations where data was
    downsampled."""
    wanted = exports.samples(db, job, first, last)
    return StreamingResponse(
        _sent(db, exports.csv_of(db, wanted)), media_type=CSV, headers=_named(job, "samples.csv")
    )


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
def samples_parquet(job: str, db: Db, first: First = None, last: Last = None) -> Response:
    """Export the same as Parquet. Requires pyarrow on the server, which the extra `parquet` installs."""
    wanted = exports.samples(db, job, first, last)
    file = exports.parquet_of(db, wanted)
    return _FileAnswer(db, file, _named(job, "samples.parquet"))


class _FileAnswer(StreamingResponse):
    """The content of a file, which is closed afterwards, also when the client has gone."""

    def __init__(self, db: Database, file: IO[bytes], headers: dict[str, str]) -> None:
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        parts = _sent(db, iter(partial(file.read, SENT_BYTES), b""))
        super().__init__(parts, media_type=PARQUET, headers=headers | {"Content-Length": str(size_bytes)})
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


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
def checkpoints_csv(job: str, db: Db, first: First = None, last: Last = None) -> Response:
    """Export all checkpoints, in every state."""
    wanted = exports.select_checkpoints(db, job, first, last)
    rows = exports.checkpoints_csv(db, wanted)
    return StreamingResponse(_sent(db, rows), media_type=CSV, headers=_named(job, "checkpoints.csv"))


@router.endpoint(
    "GET", "/trace.json", access=VIEW, returns=dict[str, Any], errors={404: NOT_FOUND, 422: "No such attempt"}
)
def export_trace(
    job: str,
    db: Db,
    attempt: Annotated[
        int | None, Query(ge=0, le=MAX_ITERATION, description="by default, the one at `to`, or the newest")
    ] = None,
    first: First = None,
    last: Last = None,
) -> Response:
    """Export an attempt in Chrome's trace format, for ui.perfetto.dev."""
    trace = traces.trace(db, job, attempt, first, last)
    answer = Json(trace)
    answer.headers.update(_named(job, "trace.json"))
    return answer
