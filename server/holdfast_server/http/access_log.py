"""Request ids, security headers, the access log and request metrics."""

from __future__ import annotations

import logging
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast_server.core import access
from holdfast_server.core.request_id import HEADER, begin
from holdfast_server.http.auth_middleware import address_of
from holdfast_server.http.security import protect
from holdfast_server.http.services import services_of

NO_ROUTE = "none"
QUIET = (*access.HEALTH_CHECKS, "/metrics", "/static")
"""Routes that are requested every few seconds, or dozens of times per page: logged at debug level."""

access_log = logging.getLogger("holdfast_server.access")


class RequestMiddleware:
    """The outermost middleware, so that it also names, counts and logs the requests that others refuse.

    It searches for the route of the request, for all that come after it.

    It logs the route's template instead of the path, and neither the query nor headers: users put secrets in the
    wrong places.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # The id is never reset: the server logs a failed request after this returns, in the same task.
        name = begin(Headers(scope=scope).get(HEADER, ""))
        state = scope.setdefault("state", {})
        state["request_id"] = name
        state["route"] = services_of(scope["app"]).find_route(scope["method"], scope["path"])
        started, status = time.perf_counter(), 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[HEADER] = name
                protect(scope, headers)
            await send(message)

        try:
            await self.app(scope, receive, send_with_headers)
        except Exception:  # a handler outside this middleware answers it
            status = 500
            raise
        finally:
            _record(scope, status, time.perf_counter() - started)


def _record(scope: Scope, status: int, seconds: float) -> None:
    match = access.match_of(scope)
    route = NO_ROUTE if match is None else match.path
    # The duration of long polls and streams depends on the client.
    timed = not route.endswith("/stream") and b"wait=" not in scope.get("query_string", b"")
    services_of(scope["app"]).metrics.answered(
        method=scope["method"], route=route, status=status, seconds=seconds if timed else None
    )
    level = logging.DEBUG if route.startswith(QUIET) and status < 400 else logging.INFO
    if not access_log.isEnabledFor(level):
        return
    access_log.log(
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
