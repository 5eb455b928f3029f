"""Health checks, metrics and documentation."""

from __future__ import annotations

from sqlalchemy.exc import SQLAlchemyError
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from holdfast_server.alerts import incidents
from holdfast_server.api import openapi
from holdfast_server.api.endpoints import Router
from holdfast_server.api.responses import Json, refusal
from holdfast_server.core.access import LISTS, PUBLIC
from holdfast_server.db import DatabaseClosed, DatabaseUnavailable, size_bytes
from holdfast_server.http.dependencies import Asker, Changes, Config, Db, Metrics, Now, ServicesOf
from holdfast_server.http.metrics import MOST_JOBS, MOST_STORES, MetricsSnapshot
from holdfast_server.queries import fleet, stores
from holdfast_server.queries.account import AccountQuery, account

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_BUSY = {503: "The database is not available"}

router = Router(tag="system")
documentation = Router()


@router.endpoint("GET", "/healthz", access=PUBLIC, returns=dict, success="Healthy", example={"status": "ok"})
async def health() -> Response:
    """Return 200 while the process answers."""
    return Json({"status": "ok"})


@router.endpoint(
    "GET", "/readyz", access=PUBLIC, returns=dict, success="Healthy", example={"status": "ok"}, errors=_BUSY
)
async def ready(db: Db) -> Response:
    """Return 200 while the database can be read and written."""
    try:
        await db.ready()
    except (DatabaseClosed, DatabaseUnavailable, SQLAlchemyError) as error:
        return refusal(503, "not_ready", f"the database is not available: {error}")
    return Json({"status": "ready"})


@router.endpoint(
    "GET",
    "/metrics",
    access=LISTS,
    returns=str,
    success="Metrics",
    errors=_BUSY,
    media_type="text/plain",
    response_class=PlainTextResponse,
)
def metrics(db: Db, changes: Changes, now: Now, config: Config, exported: Metrics, asker: Asker) -> Response:
    """Return the metrics of the server and of the most recently active jobs, for Prometheus."""
    visible = asker.visible_projects
    question = fleet.FleetQuery(order="heard", size=MOST_JOBS, visible_projects=visible)
    with db.read() as session:
        page = fleet.fleet(session, question, now=now)
        stored_bytes = size_bytes(session)
        sums = account(session, AccountQuery(visible_projects=visible), config.prices, now=now)
        busiest = stores.StoreQuery(size=MOST_STORES, visible_projects=visible)
        shared = stores.find(session, busiest, now=now).stores
    seen = MetricsSnapshot(
        jobs=page.jobs,
        by_status=page.counts,
        listeners=len(changes),
        database_bytes=stored_bytes,
        writes_waiting=db.writes_waiting,
        alerts_by_severity=incidents.open_by_severity(db, visible_projects=visible),
        account=sums,
        stores=shared,
    )
    return PlainTextResponse(exported.exposition(seen), media_type=METRICS_TYPE)


@documentation.endpoint("GET", "/openapi.json", access=LISTS)
def openapi_document(request: Request) -> Response:
    return JSONResponse(request.app.openapi())


@documentation.endpoint("GET", "/docs", access=LISTS)
def reference(request: Request, services: ServicesOf) -> Response:
    return HTMLResponse(openapi.reference_page(request.app.openapi(), icon=services.error_page is not None))


@documentation.endpoint("GET", "/docs/style.css", access=LISTS)
def reference_style() -> Response:
    return Response(openapi.REFERENCE_STYLE, media_type="text/css")
