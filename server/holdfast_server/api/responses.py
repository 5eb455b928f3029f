"""Answers of the API: structs as JSON, refusals as `{"error": code, "message": sentence}`."""

from __future__ import annotations

import gzip
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import OperationalError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from holdfast_server.core.compression import compress
from holdfast_server.core.encoding import to_json
from holdfast_server.core.errors import InvalidSetting, RequestRefused
from holdfast_server.db import DatabaseBusy, DatabaseClosed, DatabaseUnavailable
from holdfast_server.http.security import protected
from holdfast_server.http.services import services_of

T = TypeVar("T")

RETRY_AFTER_SECONDS = 1
COMPRESSION_LEVEL = 4
"""Shrinks a timeline to a third in a few milliseconds. Level 9 takes five times as long for 10 % less."""
ZSTD_LEVEL = 1
"""Level 3 takes two to three times as long; a timeline is then 4 to 11 % larger, a page 3 to 4 % smaller."""
Encoding = Literal["zstd", "gzip"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
"""The fastest first."""
_NEVER = ("q=0", "q=0.0", "q=0.00", "q=0.000")


class Json(Response):
    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return to_json(content)


def encoding_for(accepted: str) -> Encoding | None:
    """Return the fastest encoding that an Accept-Encoding header allows."""
    offers = (offer.partition(";") for offer in accepted.lower().split(","))
    named = {name.strip() for name, _, weight in offers if weight.strip() not in _NEVER}
    return next((encoding for encoding in ENCODINGS if encoding in named), None)


@dataclass(frozen=True, slots=True)
class EncodedBody:
    """A body that several clients receive: encoded and compressed once."""

    content: bytes
    encoding: Encoding | None
    media_type: str = Json.media_type

    @classmethod
    def of(cls, content: object, encoding: Encoding | None) -> EncodedBody:
        return cls(compressed(to_json(content), encoding), encoding)

    @classmethod
    def of_page(cls, html: str, encoding: Encoding | None) -> EncodedBody:
        return cls(compressed(html.encode(), encoding), encoding, "text/html")

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        all_headers = dict(headers or {})
        all_headers["Vary"] = ", ".join(filter(None, [all_headers.get("Vary"), "Accept-Encoding"]))
        if self.encoding is not None:
            all_headers["Content-Encoding"] = self.encoding
        return Response(self.content, media_type=self.media_type, headers=all_headers)


def compressed(
    plain: bytes, encoding: Encoding | None, *, zstd_level: int = ZSTD_LEVEL, gzip_level: int = COMPRESSION_LEVEL
) -> bytes:
    match encoding:
        case "zstd":
            return compress(plain, zstd_level)
        case "gzip":
            return gzip.compress(plain, gzip_level, mtime=0)
    return plain


def refusal(status: int, error: str, message: str, **details: Any) -> Json:
    return Json({"error": error, "message": message, **details}, status_code=status)


Handler = Callable[[Request, Exception], Awaitable[Response]]


def as_page_or_json(handler: Handler) -> Handler:
    """Answer outside /api with an HTML page if the client accepts HTML, with the same sentence."""

    async def answer(request: Request, error: Exception) -> Response:
        refused = await handler(request, error)
        error_page = services_of(request.app).error_page
        is_api = request.url.path == "/api" or request.url.path.startswith("/api/")
        if is_api or error_page is None or "text/html" not in request.headers.get("accept", ""):
            return refused
        return error_page(refused)

    return answer


def install(app: FastAPI) -> None:
    """Register the handlers that turn exceptions into answers."""
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, as_page_or_json(handler))
    app.add_exception_handler(Exception, protected(as_page_or_json(_failed)))


async def refuse(request: Request, error: Exception) -> Response:
    """Answer a request that middleware refused before it reached a route."""
    handler = next((handler for kind, handler in _HANDLERS.items() if isinstance(error, kind)), _database)
    return await as_page_or_json(handler)(request, error)


def retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRefused)
    details = {name: getattr(error, name) for name in error.details}
    answer = refusal(error.status, error.code, str(error), **details)
    if error.retry_seconds is not None:
        answer.headers.update(retry_after(error.retry_seconds))
    return answer


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code, message = {
        404: ("not_found", f"page not found: {request.url.path}"),
        403: ("forbidden", str(error.detail)),
        405: ("method_not_allowed", f"{request.url.path} does not accept {request.method}: see /docs"),
        413: ("too_large", "the request is too large: send it in smaller parts"),
    }.get(error.status_code, ("refused", str(error.detail)))
    answer = refusal(error.status_code, code, message)
    answer.headers.update(error.headers or {})
    return answer


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"][1:])
    return refusal(422, "invalid_request", f"{field}: {first['msg']}", field=field)


async def _failed(_: Request, __: Exception) -> Response:
    return refusal(500, "internal", "internal server error: the server's log has the details")


async def _database(_: Request, error: Exception) -> Response:
    if "is full" in str(error):
        answer = refusal(507, "disk_full", "the server's disk is full")
    else:
        answer = refusal(503, "unavailable", "the database is busy or shutting down: try again")
    answer.headers.update(retry_after(RETRY_AFTER_SECONDS))
    return answer


_HANDLERS: dict[type[Exception], Handler] = {
    RequestRefused: _refused,
    HTTPException: _http,
    RequestValidationError: _invalid,
    **dict.fromkeys((OperationalError, DatabaseBusy, DatabaseClosed, DatabaseUnavailable), _database),
}


def parse(body: bytes, kind: type[T]) -> T:
    """Decode the JSON body of a request. Raises InvalidSetting, which names the field."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidSetting("body", f"invalid JSON in the request: {error}") from None
