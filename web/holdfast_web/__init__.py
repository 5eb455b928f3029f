"""The dashboard: pages and fragments rendered by the server, and their static files.

Each area has a folder with its routes, contexts (typed template variables) and templates; `shared` has the rest.
Entry point: `create_app`. May import holdfast_server and holdfast.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fastapi import FastAPI

from holdfast_server.api.endpoints import Router
from holdfast_server.app import Web
from holdfast_server.app import create_app as create_server
from holdfast_server.core.settings import ServerSettings
from holdfast_server.db import Database
from holdfast_web.shared.assets import static_app
from holdfast_web.shared.routing import error_page


def _routers() -> list[Router]:
    from holdfast_web.account import routes as account
    from holdfast_web.accounts import routes as accounts
    from holdfast_web.alerts import routes as alerts
    from holdfast_web.audit import routes as audit
    from holdfast_web.checkpoint import routes as checkpoint
    from holdfast_web.comparison import routes as comparison
    from holdfast_web.fleet import routes as fleet
    from holdfast_web.guide import routes as guide
    from holdfast_web.job import annotation_dialogs, approvals, attempts, controls, panels, recent, training
    from holdfast_web.job import routes as job
    from holdfast_web.report import routes as report
    from holdfast_web.settings import routes as settings
    from holdfast_web.stores import routes as stores

    areas = (
        fleet, comparison, report, account, job, annotation_dialogs, controls, training, approvals, panels, recent,
        attempts, checkpoint, stores, alerts, accounts, settings, audit, guide,
    )  # fmt: skip
    return [area.router for area in areas]


web = Web(_routers, static_app, error_page)


def create_app(
    settings: ServerSettings, *, database: Database | None = None, clock: Callable[[], float] = time.time
) -> FastAPI:
    """Return the server with the dashboard as an ASGI application."""
    return create_server(settings, web=web, database=database, clock=clock)
