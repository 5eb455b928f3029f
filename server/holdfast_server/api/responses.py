"""How the API answers: JSON of our own structs, and refusals as `{"error": code, "message": sentence}`."""

from __future__ import annotations

import asyncio
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

from holdfast_server.alerts import errors as alerts
from holdfast_server.core import errors
from holdfast_server.core.compression import compress
from holdfast_server.core.encoding import to_json
from holdfast_server.db import DatabaseBusy, DatabaseClosed, DatabaseUnavailable
from holdfast_server.http.security import protected
from holdfast_server.ingest.transaction import Implausible
from holdfast_server.samples.batches import InvalidBatch

T = TypeVar("T")

RETRY_AFTER_SECONDS = 1
COMPRESSION_LEVEL = 4
"""A timeline to a third of its size in a few milliseconds; the highest takes five times that for a tenth less."""
ZSTD_LEVEL = 3
Encoding = Literal["zstd", "gzip"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
"""The quickest first."""
_NEVER = ("q=0", "q=0.0", "q=0.00", "q=0.000")

_REFUSALS: dict[type[Exception], tuple[int, str, tuple[str, ...]]] = {
    errors.UnknownJob: (404, "unknown_job", ("job",)),
    errors.UnknownOrder: (404, "unknown_order", ("job", "order")),
    errors.InvalidSetting: (422, "invalid_setting", ("field", "reason")),
    errors.Conflict: (409, "conflict", ("version", "who", "at", "what")),
    errors.NoSuchCheckpoint: (404, "no_such_checkpoint", ("iteration", "nearest")),
    errors.NotRestorable: (409, "not_restorable", ("reason",)),
    errors.OpenOrder: (409, "open_order", ("order",)),
    errors.NotCancellable: (409, "not_cancellable", ("order",)),
    errors.UnknownPerson: (404, "unknown_person", ()),
    errors.UnknownProject: (404, "unknown_project", ()),
    errors.UnknownToken: (404, "unknown_key", ()),
    errors.UnknownSession: (404, "unknown_session", ()),
    errors.WeakPassword: (422, "weak_password", ()),
    errors.NotSignedIn: (401, "not_signed_in", ()),
    errors.TooManyTries: (429, "too_many_tries", ("retry_seconds",)),
    errors.TooManyJobs: (429, "too_many_jobs", ()),
    errors.TooManyStreams: (429, "too_many_streams", ()),
    errors.DeadLink: (410, "dead_link", ()),
    errors.NotPermitted: (403, "not_permitted", ()),
    errors.NotPossible: (409, "not_possible", ()),
    alerts.UnknownAlert: (404, "unknown_alert", ("alert",)),
    alerts.AlertOver: (409, "alert_over", ("alert",)),
    alerts.UnknownRule: (404, "unknown_rule", ()),
    alerts.UnknownChannel: (404, "unknown_channel", ()),
    alerts.WebhooksOff: (409, "webhooks_off", ()),
    alerts.MailOff: (409, "mail_off", ()),
    InvalidBatch: (422, "invalid_batch", ()),
    Implausible: (422, "implausible_numbers", ()),
}
"""Status, code, and what the answer tells beside the sentence."""


class Json(Response):
    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return to_json(content)


def encoding_for(accepted: str) -> Encoding | None:
    """The quickest of those that an Accept-Encoding names."""
    offers = (offer.partition(";") for offer in accepted.lower().split(","))
    named = {name.strip() for name, _, weight in offers if weight.strip() not in _NEVER}
    return next((encoding for encoding in ENCODINGS if encoding in named), None)


@dataclass(frozen=True, slots=True)
class Packed:
    """What several are sent: encoded once, and compressed once."""

    content: bytes
    encoding: Encoding | None
    """None: as it is."""
    media_type: str = Json.media_type

    @classmethod
    async def of(cls, content: object, encoding: Encoding | None) -> Packed:
        """Encode as JSON, off the event loop: a timeline has some hundred thousand characters."""
        packed = await asyncio.to_thread(lambda: _packed(to_json(content), encoding))
        return cls(packed, encoding)

    @classmethod
    async def of_page(cls, html: str, encoding: Encoding | None) -> Packed:
        return cls(await asyncio.to_thread(_packed, html.encode(), encoding), encoding, "text/html")

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        told = dict(headers or {})
        told["Vary"] = ", ".join(filter(None, [told.get("Vary"), "Accept-Encoding"]))
        if self.encoding is not None:
            told["Content-Encoding"] = self.encoding
        return Response(self.content, media_type=self.media_type, headers=told)


def _packed(plain: bytes, encoding: Encoding | None) -> bytes:
    match encoding:
        case "zstd":
            return compress(plain, ZSTD_LEVEL)
        case "gzip":
            return gzip.compress(plain, COMPRESSION_LEVEL, mtime=0)
    return plain


def refusal(status: int, error: str, message: str, **details: Any) -> Json:
    return Json({"error": error, "message": message, **details}, status_code=status)


Handler = Callable[[Request, Exception], Awaitable[Response]]


def for_whom(handler: Handler) -> Handler:
    """What `handler` answers; outside /api, as a page with the same sentence where HTML was asked for."""

    async def answer(request: Request, error: Exception) -> Response:
        refused = await handler(request, error)
        web = request.app.state.web
        program = request.url.path == "/api" or request.url.path.startswith("/api/")
        by_program = program or "text/html" not in request.headers.get("accept", "")
        return refused if by_program or web is None else web.error_page(refused)

    return answer


def install(app: FastAPI) -> None:
    for kind in _REFUSALS:
        app.add_exception_handler(kind, for_whom(_refused))
    app.add_exception_handler(HTTPException, for_whom(_http))
    app.add_exception_handler(RequestValidationError, for_whom(_invalid))
    for kind in (OperationalError, DatabaseBusy, DatabaseClosed, DatabaseUnavailable):
        app.add_exception_handler(kind, for_whom(_database))
    app.add_exception_handler(Exception, protected(for_whom(_failed)))


async def answered(request: Request, error: Exception) -> Response:
    """How a refusal is answered that was made before any route was reached."""
    if isinstance(error, HTTPException):
        return await for_whom(_http)(request, error)
    return await for_whom(_refused if type(error) in _REFUSALS else _database)(request, error)


async def _refused(_: Request, error: Exception) -> Response:
    status, code, details = _REFUSALS[type(error)]
    answer = refusal(status, code, str(error), **{name: getattr(error, name) for name in details})
    if isinstance(error, errors.RetryLater):
        answer.headers["Retry-After"] = str(max(1, math.ceil(error.retry_seconds)))
    return answer


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code, message = {
        404: ("not_found", f"nothing at {request.url.path}: /docs lists what there is"),
        403: ("forbidden", str(error.detail)),
        405: ("method_not_allowed", f"{request.method} is not for {request.url.path}: /docs lists what is"),
        413: ("too_large", "this request is larger than the server takes: send it in smaller parts"),
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
    return refusal(500, "internal", "the server failed at this request: its log says why")


async def _database(_: Request, error: Exception) -> Response:
    full = "is full" in str(error)
    message = "the disk of the server is full" if full else "the database is busy or stopping: try again"
    answer = refusal(507 if full else 503, "disk_full" if full else "unavailable", message)
    answer.headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    return answer


def parse(body: bytes, kind: type[T]) -> T:
    """The JSON of a request; InvalidSetting, naming the field, for what is not one."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise errors.InvalidSetting("body", f"the request's JSON: {error}") from None
