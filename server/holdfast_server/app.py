"""The application: the API, the pages that are passed in, and the middleware around them."""

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

from holdfast_server.accounts import expiry
from holdfast_server.accounts.auth_backends import door_for
from holdfast_server.accounts.auth_middleware import IdentityMiddleware, PolicyMiddleware
from holdfast_server.accounts.job_projects import Belonging
from holdfast_server.accounts.oidc import Provider
from holdfast_server.alerts import deliveries, evaluation
from holdfast_server.api import openapi, responses, router
from holdfast_server.api.exports import PARQUET
from holdfast_server.control import retention
from holdfast_server.core.bus import LocalBus
from holdfast_server.core.request_coalescing import Shared
from holdfast_server.core.settings import ServerSettings
from holdfast_server.db import Database
from holdfast_server.db.background_jobs import Chore, kept_up
from holdfast_server.http import api_reference, security
from holdfast_server.http.access_log import RequestMiddleware
from holdfast_server.http.metrics import ServerMeasures
from holdfast_server.ingest.admission import Intake
from holdfast_server.queries import exports
from holdfast_server.records import desired_state, restore_orders
from holdfast_server.samples import compaction

MAX_FORM_BYTES = 2**20

COMPRESSED_BYTES = 1400
"""Shorter answers fit one packet as they are."""

CHORES: tuple[Chore, ...] = (
    Chore("accounts", expiry.TIDY_SECONDS, expiry.tidy),
    Chore("audit anchor", expiry.ANCHOR_SECONDS, expiry.anchor),
    Chore("alerts", evaluation.EVERY_SECONDS, evaluation.evaluate),
    Chore("alerts of jobs at rest", evaluation.AT_REST_EVERY_SECONDS, partial(evaluation.evaluate, at_rest=True)),
    Chore("compaction", compaction.EVERY_SECONDS, compaction.compact),
    Chore("orders", restore_orders.EVERY_SECONDS, restore_orders.watch),
    Chore("overrides", desired_state.OVERRIDES_EVERY_SECONDS, desired_state.end_overrides),
    Chore("retention", retention.EVERY_SECONDS, retention.carry_out),
)


@dataclass(frozen=True, slots=True)
class Web:
    """A dashboard: the server mounts what it is given, and does not depend on it."""

    routers: Callable[[], Sequence[APIRouter]]
    static: ASGIApp
    """What serves its files, under /static."""
    error_page: Callable[[Response], Response]
    """The page for people of a refusal in JSON."""


def create_app(
    settings: ServerSettings,
    *,
    web: Web | None = None,
    database: Database | None = None,
    clock: Callable[[], float] = time.time,
) -> FastAPI:
    """The server as an ASGI application.

    Args:
        settings: where it stores, and who may talk to it.
        web: its dashboard; without one, the API is all there is.
        database: one that is prepared already; without it, the app prepares its own when it starts.
        clock: seconds since the epoch.
    """
    db = Database(settings.database, LocalBus()) if database is None else database
    measures = ServerMeasures()
    post = deliveries.chore(settings.alerts, address=settings.address or "", measures=measures)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        db.prepare()
        await db.open()
        try:
            app.state.door = await door_for(settings, db)
            async with kept_up((*CHORES, post), db, clock):
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
    app.state.shared = Shared(db.changes)
    app.state.clock, app.state.measures, app.state.web = clock, measures, web
    app.state.room = Intake(db)
    app.state.exporting = asyncio.Semaphore(exports.AT_ONCE)
    app.state.belonging = Belonging(db)
    app.state.streams = Counter()
    app.state.provider = Provider(settings.provider) if settings.provider else None
    responses.install(app)
    openapi.install(app)
    app.router.routes += _routes(web)
    if web is not None:
        app.mount("/static", web.static, name="static")
    return app


def _middleware(settings: ServerSettings) -> list[Middleware]:
    """The outermost first."""
    return [
        Middleware(RequestMiddleware),
        Middleware(
            GZipMiddleware,
            minimum_size=COMPRESSED_BYTES,
            compresslevel=responses.COMPRESSION_LEVEL,
            exclude_content_types=(*DEFAULT_EXCLUDED_CONTENT_TYPES, PARQUET),
        ),
        Middleware(security.HeadersMiddleware),
        Middleware(security.BodyDeadlineMiddleware),
        Middleware(IdentityMiddleware, refuse=responses.answered),
        Middleware(security.HostMiddleware, settings=settings),
        Middleware(security.CrossOriginMiddleware, settings=settings),
        Middleware(PolicyMiddleware, refuse=responses.answered),
    ]


@cache
def _routes(web: Web | None) -> list[BaseRoute]:
    """Every route. What FastAPI makes of their signatures takes longer than all else about an application, and is
    the same for each that a process has."""
    every = APIRouter(max_body_size=MAX_FORM_BYTES)
    for part in (router, api_reference.router, *(web.routers() if web else ())):
        every.include_router(part)
    return every.routes
