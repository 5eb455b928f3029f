"""Routes that answer with pages: parameters, error pages, status codes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fastapi import Form, Header
from fastapi.responses import Response

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
    title = _TITLES.get(status, "Request refused")
    return ErrorPage(status=status, title=title, detail=detail).response(status, headers=kept)


def headers_of(refusal: RequestRefused) -> dict[str, str]:
    return {} if refusal.retry_seconds is None else retry_after(refusal.retry_seconds)


def local_path(path: str) -> str:
    """Return `path` if it is a path of this server, else "/", to prevent open redirects."""
    ours = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if ours else "/"
