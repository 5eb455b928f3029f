"""Routes that answer with pages: parameters, error pages, status codes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from fastapi import Form, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute

from holdfast_server.core.errors import (
    Conflict,
    NotPermitted,
    NotThere,
    Refused,
    RetryLater,
    UnknownJob,
    UnknownOrder,
)
from holdfast_web.shared.render import View

Htmx = Annotated[bool, Header(alias="HX-Request")]
Text = Annotated[str, Form()]

_TITLES = {
    403: "Access denied",
    404: "Page not found",
    500: "Internal server error",
    503: "Service unavailable",
    507: "Disk full",
}


@dataclass(frozen=True, kw_only=True)
class ErrorPage(View):
    template: ClassVar[str] = "shared/error.html"
    status: int
    title: str
    detail: str


def error_page(refused: Response) -> Response:
    """Turn a JSON error into an error page."""
    status, detail = refused.status_code, json.loads(bytes(refused.body))["message"]
    kept = {name: value for name, value in refused.headers.items() if not name.startswith("content-")}
    title = "Request refused" if status == 403 else _TITLES.get(status, "Request refused")
    return ErrorPage(status=status, title=title, detail=detail).response(status, headers=kept)


def status_of(refusal: Refused) -> int:
    if isinstance(refusal, UnknownJob | UnknownOrder | NotThere):
        return 404
    if isinstance(refusal, NotPermitted):
        return 403
    if isinstance(refusal, RetryLater):
        return 429
    return 409 if isinstance(refusal, Conflict) else 422


def headers_of(refusal: Refused) -> dict[str, str]:
    if isinstance(refusal, RetryLater):
        return {"Retry-After": str(max(1, math.ceil(refusal.retry_seconds)))}
    return {}


class PageRoute(APIRoute):
    """A route that turns refusals into error pages."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except Refused as refusal:
                status = status_of(refusal)
                title = _TITLES.get(status, "Request refused")
                page = ErrorPage(status=status, title=title, detail=str(refusal))
                return page.response(status, headers_of(refusal))
            except RequestValidationError as error:
                detail = "; ".join(f"{problem['loc'][-1]}: {problem['msg']}" for problem in error.errors())
                return ErrorPage(status=422, title="Invalid request", detail=detail).response(422)

        return answer


def local_path(path: str) -> str:
    """Return `path` if it is a path of this server, else "/", to prevent open redirects."""
    ours = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if ours else "/"
