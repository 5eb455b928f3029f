"""Health checks and metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from sqlalchemy.exc import SQLAlchemyError
from starlette.responses import PlainTextResponse, Response

from holdfast_server.alerts import incidents
from holdfast_server.api.responses import Json, refusal
from holdfast_server.db import DatabaseClosed, DatabaseUnavailable, size_bytes
from holdfast_server.http.dependencies import Asker, Changes, Db, Metrics, Now
from holdfast_server.http.metrics import MOST_JOBS, MetricsSnapshot
from holdfast_server.queries import fleet

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_STATUS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Healthy",
        "content": {"application/json": {"schema": {"type": "object"}, "example": {"status": "ok"}}},
    }
}
_TEXT: dict[int | str, dict[str, Any]] = {
    200: {"description": "Metrics", "content": {"text/plain": {"schema": {"type": "string"}}}}
}
_BUSY: dict[int | str, dict[str, Any]] = {503: {"description": "The database is not available"}}

router = APIRouter(tags=["system"])


@router.get("/healthz", responses=_STATUS)
async def health() -> Response:
    """Return 200 while the process answers."""
    return Json({"status": "ok"})


@router.get("/readyz", responses=_STATUS | _BUSY)
async def ready(db: Db) -> Response:
    """Return 200 while the database can be read and written."""
    try:
        await db.ready()
    except (DatabaseClosed, DatabaseUnavailable, SQLAlchemyError) as error:
        return refusal(503, "not_ready", f"the database is not available: {error}")
    return Json({"status": "ready"})


@router.get("/metrics", response_class=PlainTextResponse, responses=_TEXT | _BUSY)
async def metrics(db: Db, changes: Changes, now: Now, exported: Metrics, asker: Asker) -> Response:
    """Return the metrics of the server and of the most recently active jobs, for Prometheus."""
    visible = asker.visible_projects
    question = fleet.FleetQuery(order="heard", size=MOST_JOBS, visible_projects=visible)
    page = await fleet.fleet(db, question, now=now)
    async with db.read() as session:
        stored_bytes = await size_bytes(session)
    seen = MetricsSnapshot(
        jobs=page.jobs,
        by_status=page.counts,
        listeners=len(changes),
        database_bytes=stored_bytes,
        writes_waiting=db.writes_waiting,
        alerts_by_severity=await incidents.open_by_severity(db, visible_projects=visible),
    )
    return PlainTextResponse(exported.exposition(seen), media_type=METRICS_TYPE)
