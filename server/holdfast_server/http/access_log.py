"""Each request from its door to its end: a name for it, a line in the log, and how long it took."""

from __future__ import annotations

import logging
import time
from typing import cast

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast_server.accounts import policy
from holdfast_server.accounts.auth_middleware import address_of
from holdfast_server.core.request_id import HEADER, begin
from holdfast_server.http.metrics import ServerMeasures

UNMATCHED = "none"
QUIET = ("/healthz", "/readyz", "/metrics", "/static")
"""Asked for every few seconds by programs, or by the dozen by a page: told at the level of debugging only."""

access = logging.getLogger("holdfast_server.access")


class RequestMiddleware:
    """The outermost: what the others refuse is named, counted and logged as well.

    Neither the query nor any header is logged, and of the path what the route calls its parts: what people and
    agents write there may be a secret put in the wrong place.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # Never reset: what the server itself logs of a request that failed comes after us, in the same task.
        name = begin(Headers(scope=scope).get(HEADER, ""))
        scope.setdefault("state", {})["request_id"] = name
        started, status = time.perf_counter(), 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = name
            await send(message)

        try:
            await self.app(scope, receive, send_named)
        except Exception:  # answered outside, as a fault of ours; here it is only counted
            status = 500
            raise
        finally:
            self._end(scope, status, time.perf_counter() - started)

    def _end(self, scope: Scope, status: int, seconds: float) -> None:
        route, streaming = route_of(scope), _streams(scope)
        cast("ServerMeasures", scope["app"].state.measures).answered(
            method=scope["method"], route=route, status=status, seconds=None if streaming else seconds
        )
        level = logging.DEBUG if route.startswith(QUIET) and status < 400 else logging.INFO
        access.log(
            level,
            "%s %s %s %.1f ms",
            scope["method"],
            route,
            status or "gone",
            seconds * 1e3,
            extra={
                "method": scope["method"],
                "route": route,
                "status": status or None,
                "duration_ms": round(seconds * 1e3, 3),
                "client": address_of(scope),
            },
        )


def route_of(scope: Scope) -> str:
    """The template of the path, `/jobs/{job}`: what is asked for does not make new names."""
    found = policy.find(scope["method"], scope["path"])
    return UNMATCHED if found is None else found.path


def _streams(scope: Scope) -> bool:
    """Long polls and streams last as long as somebody listens, which says nothing of how quick the server is."""
    return route_of(scope).endswith("/stream") or b"wait=" in scope.get("query_string", b"")
