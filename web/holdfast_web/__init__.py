"""The dashboard: pages and fragments rendered by the server, and the static files that they use."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastapi import APIRouter, FastAPI

from holdfast_server.app import Web
from holdfast_server.app import create_app as create_server
from holdfast_server.core.settings import ServerSettings
from holdfast_server.db import Database
from holdfast_web.assets import static_app
from holdfast_web.routing import error_page


def _routers() -> list[APIRouter]:
    from holdfast_web import (
        alert_routes,
        audit_routes,
        checkpoint_routes,
        control_routes,
        questions,
        routes,
        settings_routes,
        signing_in,
    )

    pages = [routes, control_routes, checkpoint_routes, alert_routes, questions, signing_in, settings_routes]
    return [page.router for page in (*pages, audit_routes)]


web = Web(_routers, static_app, error_page)


def create_app(
    settings: ServerSettings, *, database: Database | None = None, clock: Callable[[], float] = time.time
) -> FastAPI:
    """The server with its dashboard, as an ASGI application."""
    return create_server(settings, web=web, database=database, clock=clock)
