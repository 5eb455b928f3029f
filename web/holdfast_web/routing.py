"""What the routes of all pages share."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Form, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute

from holdfast_server.errors import (
    Conflict,
    NotPermitted,
    NotThere,
    Refused,
    RetryLater,
    UnknownJob,
    UnknownOrder,
)
from holdfast_web import pages

Htmx = Annotated[bool, Header(alias="HX-Request")]
Text = Annotated[str, Form()]

_TITLES = {403: "Not for you", 404: "Nothing here"}


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
    """Answers people, not programs: what the server refuses becomes a page that says why."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except Refused as refusal:
                status = status_of(refusal)
                title = _TITLES.get(status, "Not possible")
                return pages.ErrorPage(status=status, title=title, detail=str(refusal)).response(
                    status, headers_of(refusal)
                )
            except RequestValidationError as error:
                detail = "; ".join(f"{problem['loc'][-1]}: {problem['msg']}" for problem in error.errors())
                return pages.ErrorPage(status=422, title="Not understood", detail=detail).response(422)

        return answer


def local(path: str) -> str:
    """A path of ours, so that nobody is sent elsewhere by a link that somebody else made."""
    ours = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if ours else "/"
