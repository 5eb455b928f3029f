"""The application: the API, the dashboard that is passed in, and the middleware around them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version

from fastapi import APIRouter, FastAPI
from starlette.middleware import Middleware
from starlette.middleware.gzip import DEFAULT_EXCLUDED_CONTENT_TYPES, GZipMiddleware
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from holdfast_server.accounts import sign_ins
from holdfast_server.accounts.auth_backends import choose_backend
from holdfast_server.accounts.auth_middleware import AuthMiddleware
from holdfast_server.accounts.job_projects import JobProjects
from holdfast_server.accounts.oidc import Provider
from holdfast_server.alerts import deliveries, evaluation
from holdfast_server.api import openapi, responses, router
from holdfast_server.api.exports import PARQUET
from holdfast_server.control import report_retention
from holdfast_server.core.bus import ChangeBus
from holdfast_server.core.request_coalescing import RequestCoalescer
from holdfast_server.core.settings import ServerSettings
from holdfast_server.db import Database
from holdfast_server.db.background_jobs import BackgroundJob, background_jobs_running
from holdfast_server.http import api_reference, security
from holdfast_server.http.access_log import RequestMiddleware
from holdfast_server.http.metrics import ServerMetrics
from holdfast_server.ingest.admission import AdmissionControl
from holdfast_server.queries import exports
from holdfast_server.records import audit, desired_state, restore_orders
from holdfast_server.samples import compaction

MAX_FORM_BYTES = 2**20

COMPRESSED_BYTES = 1400
"""Smallest compressed answer: a shorter one fits into one packet."""

BACKGROUND_JOBS: tuple[BackgroundJob, ...] = (
    BackgroundJob("accounts", sign_ins.TIDY_SECONDS, sign_ins.delete_expired),
    BackgroundJob("audit anchor", audit.ANCHOR_SECONDS, audit.log_head),
    BackgroundJob("alerts", evaluation.EVERY_SECONDS, evaluation.evaluate),
    BackgroundJob(
        "alerts of jobs at rest", evaluation.AT_REST_EVERY_SECONDS, partial(evaluation.evaluate, at_rest=True)
    ),
    BackgroundJob("compaction", compaction.EVERY_SECONDS, compaction.compact),
    BackgroundJob("orders", restore_orders.EVERY_SECONDS, restore_orders.check_timeouts),
    BackgroundJob("overrides", desired_state.OVERRIDES_EVERY_SECONDS, desired_state.end_overrides),
    BackgroundJob("retention", report_retention.EVERY_SECONDS, report_retention.apply_all),
)


@dataclass(frozen=True, slots=True)
class Web:
    """A dashboard that the server mounts without depending on it."""

    routers: Callable[[], Sequence[APIRouter]]
    static: ASGIApp
    """Serves its files under /static."""
    error_page: Callable[[Response], Response]
    """Renders a refusal in JSON as a page."""


def create_app(
    settings: ServerSettings,
    *,
    web: Web | None = None,
    database: Database | None = None,
    clock: Callable[[], float] = time.time,
) -> FastAPI:
    """Create the server as an ASGI application.

    Args:
        web: its dashboard; without one, it serves the API only.
        database: one that is prepared already; otherwise the application prepares its own on start.
        clock: returns seconds since the epoch.
    """
    db = Database(settings.database, ChangeBus()) if database is None else database
    metrics = ServerMetrics()
    post = deliveries.chore(settings.alerts, address=settings.address or "", metrics=metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        db.prepare()
        try:
            await db.open()
            app.state.auth = await choose_backend(settings, db)
            async with background_jobs_running((*BACKGROUND_JOBS, post), db, clock):
                yield
        finally:
            db.changes.close()
            await db.close()

    app = FastAPI(
        title="Holdfast",
        version=version("holdfast"),
        description="Checkpoints that cost next to nothing, and any iteration back at one click.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        max_body_size=MAX_FORM_BYTES,
        middleware=_middleware(settings),
    )
    app.state.settings, app.state.database, app.state.changes = settings, db, db.changes
    app.state.coalescer = RequestCoalescer(db.changes)
    app.state.clock, app.state.metrics, app.state.web = clock, metrics, web
    app.state.admission = AdmissionControl(db)
    app.state.exporting = asyncio.Semaphore(exports.AT_ONCE)
    app.state.job_projects = JobProjects(db)
    app.state.streams = Counter()
    app.state.provider = Provider(settings.provider) if settings.provider else None
    responses.install(app)
    openapi.install(app)
    app.router.routes += _routes(web)
    if web is not None:
        app.mount("/static", web.static, name="static")
    return app


def _middleware(settings: ServerSettings) -> list[Middleware]:
    """Return the middleware, the outermost first."""
    return [
        Middleware(RequestMiddleware),
        Middleware(
            GZipMiddleware,
            minimum_size=COMPRESSED_BYTES,
            compresslevel=responses.COMPRESSION_LEVEL,
            exclude_content_types=(*DEFAULT_EXCLUDED_CONTENT_TYPES, PARQUET),
        ),
        Middleware(security.BodyDeadlineMiddleware),
        Middleware(
            AuthMiddleware,
            refuse=responses.refuse,
            checks=(security.HostCheck(settings), security.OriginCheck(settings)),
        ),
    ]


@cache
def _routes(web: Web | None) -> list[BaseRoute]:
    """Return all routes. They are cached: FastAPI's analysis of their signatures takes most of the start-up
    time."""
    every = APIRouter(max_body_size=MAX_FORM_BYTES)
    for part in (router, api_reference.router, *(web.routers() if web else ())):
        every.include_router(part)
    return every.routes
