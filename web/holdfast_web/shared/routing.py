"""Routes that answer with pages: parameters, error pages, status codes."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from fastapi import Form, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute

from holdfast_server.api.responses import retry_after
from holdfast_server.core.errors import RequestRefused
from holdfast_web.shared.render import View

Htmx = Annotated[bool, Header(alias="HX-Request")]
Text = Annotated[str, Form()]

_TITLES = {
    403: "Permission denied", 404: "Page not found", 422: "Invalid request", 429: "Too many requests",
    500: "Internal server error", 503: "Service unavailable", 507: "Disk full",
}  # fmt: skip


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
    return ErrorPage(status=status, title=title_of(status), detail=detail).response(status, headers=kept)


def title_of(status: int) -> str:
    return _TITLES.get(status, "Request refused")


def headers_of(refusal: RequestRefused) -> dict[str, str]:
    return {} if refusal.retry_seconds is None else retry_after(refusal.retry_seconds)


class PageRoute(APIRoute):
    """A route that turns refusals into error pages."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestRefused as refusal:
                page = ErrorPage(status=refusal.status, title=title_of(refusal.status), detail=str(refusal))
                return page.response(refusal.status, headers_of(refusal))
            except RequestValidationError as error:
                detail = "; ".join(f"{problem['loc'][-1]}: {problem['msg']}" for problem in error.errors())
                return ErrorPage(status=422, title=title_of(422), detail=detail).response(422)

        return answer


def local_path(path: str) -> str:
    """Return `path` if it is a path of this server, else "/", to prevent open redirects."""
    ours = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if ours else "/"
