"""Whether the server lives, what it measures, and what it answers to."""

from __future__ import annotations

from fastapi import APIRouter
from sqlalchemy.exc import SQLAlchemyError
from starlette.responses import PlainTextResponse, Response

from holdfast_server import timeline
from holdfast_server.api.answers import Json, refusal
from holdfast_server.db import DatabaseClosed
from holdfast_server.dependencies import Changes, Clock, Db, Measures

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

router = APIRouter(tags=["system"])


@router.get("/healthz")
async def alive() -> Response:
    """The process answers."""
    return Json({"status": "ok"})


@router.get("/readyz", responses={503: {"description": "The database does not answer"}})
async def ready(db: Db) -> Response:
    """The database can be read, and what is written to it is stored."""
    try:
        await db.ready()
    except (DatabaseClosed, SQLAlchemyError) as error:
        return refusal(503, "not_ready", f"the database does not answer: {error}")
    return Json({"status": "ready"})


@router.get("/metrics")
async def metrics(db: Db, changes: Changes, clock: Clock, measures: Measures) -> Response:
    """For Prometheus: the server's own figures, and the newest of every job."""
    jobs = await timeline.fleet(db, now=clock())
    return PlainTextResponse(measures.exposition(jobs, listeners=len(changes)), media_type=METRICS_TYPE)
