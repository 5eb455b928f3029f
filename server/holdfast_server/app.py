"""The application: the API, the dashboard that is passed in, and the middleware around them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version

from anyio import to_thread
from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.gzip import DEFAULT_EXCLUDED_CONTENT_TYPES, GZipMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast_server.accounts import sign_ins
from holdfast_server.accounts.auth_backends import choose_backend
from holdfast_server.accounts.job_projects import JobProjects
from holdfast_server.accounts.oidc import Provider
from holdfast_server.alerts import deliveries, evaluation
from holdfast_server.api import ROUTERS, openapi, responses
from holdfast_server.api.endpoints import EndpointTable, MountedApp, Router, check_routes
from holdfast_server.api.exports import PARQUET
from holdfast_server.control import accounting, report_retention
from holdfast_server.core.access import PUBLIC, match_of
from holdfast_server.core.bus import ChangeBus
from holdfast_server.core.request_coalescing import RequestCoalescer
from holdfast_server.core.settings import ServerSettings
from holdfast_server.db import Database
from holdfast_server.db.background_jobs import BackgroundJob, background_jobs_running
from holdfast_server.http import security
from holdfast_server.http.access_log import RequestMiddleware
from holdfast_server.http.auth_middleware import AuthMiddleware
from holdfast_server.http.metrics import ServerMetrics
from holdfast_server.http.services import Services
from holdfast_server.ingest.admission import AdmissionControl
from holdfast_server.records import audit, desired_state, restore_orders, store_shares
from holdfast_server.samples import compaction

COMPRESSED_BYTES = 1400
"""Smallest compressed answer: a shorter one fits into one packet."""

BACKGROUND_JOBS: tuple[BackgroundJob, ...] = (
    BackgroundJob("account", accounting.EVERY_SECONDS, accounting.keep_account),
    BackgroundJob("accounts", sign_ins.TIDY_SECONDS, sign_ins.delete_expired),
    BackgroundJob("audit anchor", audit.ANCHOR_SECONDS, audit.log_head),
    BackgroundJob("alerts", evaluation.EVERY_SECONDS, evaluation.evaluate),
    BackgroundJob(
        "alerts that need analysis", evaluation.ANALYZED_EVERY_SECONDS, partial(evaluation.evaluate, analyzed=True)
    ),
    BackgroundJob(
        "alerts of ended jobs", evaluation.AT_REST_EVERY_SECONDS, partial(evaluation.evaluate, at_rest=True)
    ),
    BackgroundJob("compaction", compaction.EVERY_SECONDS, compaction.compact),
    BackgroundJob("orders", restore_orders.EVERY_SECONDS, restore_orders.check_timeouts),
    BackgroundJob("overrides", desired_state.OVERRIDES_EVERY_SECONDS, desired_state.end_overrides),
    BackgroundJob("store shares", store_shares.EVERY_SECONDS, store_shares.divide_regularly),
    BackgroundJob("retention", report_retention.EVERY_SECONDS, report_retention.apply_all),
)


@dataclass(frozen=True, slots=True)
class Web:
    """A dashboard that the server mounts without depending on it."""

    routers: Callable[[], Sequence[Router]]
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
    table = _table(web)
    metrics = ServerMetrics()
    post = deliveries.chore(settings.alerts, address=settings.address or "", metrics=metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        check_routes(app)
        db.prepare()
        try:
            db.open()
            app.state.services = Services(
                settings=settings,
                database=db,
                auth=await db.ask("access", partial(choose_backend, settings, db)),
                clock=clock,
                metrics=metrics,
                coalescer=RequestCoalescer(db.changes),
                admission=AdmissionControl(db),
                job_projects=JobProjects(db),
                streams=Counter(),
                provider=Provider(settings.provider) if settings.provider else None,
                find_route=table.find,
                error_page=web.error_page if web else None,
            )
            async with background_jobs_running((*BACKGROUND_JOBS, post), db, clock):
                yield
        finally:
            db.changes.close()
            await to_thread.run_sync(db.close)

    app = FastAPI(
        title="Holdfast",
        version=version("holdfast"),
        description="Shows what the checkpoints of PyTorch training cost, controls them, and restores jobs to an "
        "earlier iteration.",
        lifespan=lifespan,
        openapi_url=None,  # the API has endpoints for it
        redirect_slashes=False,
        middleware=_middleware(settings),
        # the server has its own metrics and logs; FastAPI would look for a provider at each request
        telemetry={"metrics": False, "logs": False},
    )
    app.router.routes = [table]
    app.openapi = cache(partial(openapi.document_of, app, table.routes, table.access))  # type: ignore[method-assign]
    responses.install(app)
    return app


def _table(web: Web | None) -> EndpointTable:
    routers = (*ROUTERS, *(web.routers() if web else ()))
    endpoints = (endpoint for router in routers for endpoint in router.endpoints)
    return EndpointTable([*endpoints, *([MountedApp("/static", web.static, PUBLIC)] if web else ())])


class _Compression(GZipMiddleware):
    """Compresses answers, except those to reports: they are short, and most requests are reports."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match = match_of(scope) if scope["type"] == "http" else None
        is_report = match is not None and match.rule.audience == "report"
        await (self.app if is_report else super().__call__)(scope, receive, send)


def _middleware(settings: ServerSettings) -> list[Middleware]:
    """Return the middleware, the outermost first."""
    return [
        Middleware(RequestMiddleware),
        Middleware(
            _Compression,
            minimum_size=COMPRESSED_BYTES,
            compresslevel=responses.COMPRESSION_LEVEL,
            exclude_content_types=(*DEFAULT_EXCLUDED_CONTENT_TYPES, PARQUET),
        ),
        Middleware(security.BodyMiddleware),
        Middleware(
            AuthMiddleware,
            refuse=responses.refuse,
            checks=(security.HostCheck(settings), security.OriginCheck(settings)),
        ),
    ]
