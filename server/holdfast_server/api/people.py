"""Refusals for people: outside /api, who asks for HTML gets a page with the sentence that programs get as JSON."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from holdfast_web.pages import ErrorPage

Handler = Callable[[Request, Exception], Awaitable[Response]]

_TITLES = {404: "Nothing here", 500: "Something broke", 503: "Not now", 507: "The disk is full"}


def for_whom(handler: Handler) -> Handler:
    """What `handler` answers, as a page where a person asked."""

    async def answer(request: Request, error: Exception) -> Response:
        refused = await handler(request, error)
        return _page(refused) if _a_person(request) else refused

    return answer


def _a_person(request: Request) -> bool:
    program = request.url.path == "/api" or request.url.path.startswith("/api/")
    return not program and "text/html" in request.headers.get("accept", "")


def _page(refused: Response) -> Response:
    status, detail = refused.status_code, json.loads(bytes(refused.body))["message"]
    kept = {name: value for name, value in refused.headers.items() if not name.startswith("content-")}
    page = ErrorPage(status=status, title=_TITLES.get(status, "Not possible"), detail=detail)
    return page.response(status, headers=kept)
