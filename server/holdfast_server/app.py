"""The application: rooms wired together, walls around them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from starlette.middleware import Middleware

from holdfast_server import documentation, security
from holdfast_server.api import answers, router, schema
from holdfast_server.bus import LocalBus
from holdfast_server.db import Database
from holdfast_server.measures import ServerMeasures
from holdfast_server.settings import ServerSettings

MAX_FORM_BYTES = 2**20


def create_app(
    settings: ServerSettings, *, database: Database | None = None, clock: Callable[[], float] = time.time
) -> FastAPI:
    """The server as an ASGI application.

    Args:
        settings: where it stores, and who may talk to it.
        database: one that is prepared already; without it, the app prepares its own when it starts.
        clock: seconds since the epoch.
    """
    import holdfast_web
    from holdfast_web.routes import router as pages

    db = Database(settings.database, LocalBus()) if database is None else database

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        db.prepare()
        await db.open()
        try:
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
        middleware=[
            Middleware(security.HeadersMiddleware),
            Middleware(security.HostMiddleware, settings=settings),
            Middleware(security.CrossOriginMiddleware),
            Middleware(security.LoginMiddleware, settings=settings),
        ],
    )
    app.state.settings, app.state.database, app.state.changes = settings, db, db.changes
    app.state.clock, app.state.measures = clock, ServerMeasures()
    answers.install(app)
    schema.install(app)
    app.include_router(router)
    app.include_router(documentation.router)
    app.include_router(pages)
    app.mount("/static", holdfast_web.static_app, name="static")
    return app
