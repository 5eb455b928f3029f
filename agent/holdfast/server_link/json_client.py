"""The client of the HTTP API for operators, and its errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from time import sleep
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import msgspec
import urllib3

from holdfast.server_link.http_client import (
    NO_API,
    Backoff,
    HttpClient,
    HttpResponse,
    NotHttpServer,
    RequestFailed,
    WrongAddress,
    as_request_failed,
)

MAX_PAUSE_SECONDS = 5.0
RETRIED_STATUSES = (429, 502, 503, 504)
"""HTTP statuses of a server that is overloaded, or of a proxy that cannot reach it."""

T = TypeVar("T")


class ServerError(Exception):
    """The server rejected the request; `str()` is its message.

    `status` is the HTTP status, `code` the server's error code, `body` the whole response.
    """

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(body.get("message") or f"the server responded with HTTP status {status}")
        self.status = status
        self.code = str(body.get("error", ""))
        self.body = body


class NotFound(ServerError):
    """The object does not exist, or is not visible with this key."""


class Conflict(ServerError):
    """The current state does not allow it, for example after a concurrent change."""


class Invalid(ServerError):
    """A value is not valid; `body["field"]` names it, if it is one field."""


class NotPermitted(ServerError):
    """The key is valid, but lacks the permission."""


class ServerBusy(ServerError):
    """The server is overloaded, out of space or failed; a later retry may succeed."""


class UnreachableError(Exception):
    """No Holdfast server answered, or it rejected the key."""


_ERRORS: dict[int, type[ServerError]] = {
    403: NotPermitted, 404: NotFound, 409: Conflict, 410: NotFound, 422: Invalid, 428: Invalid, 429: ServerBusy,
}  # fmt: skip


class JsonClient(HttpClient):
    """The transport of a `Client`, with its arguments, to the API under /api/v1."""

    def __init__(self, server: str, token: str | None, *, timeout_seconds: float, retries: int) -> None:
        super().__init__(server, token, "holdfast-client")
        self._headers["Accept"] = "application/json"
        self._timeout_seconds, self._retries = timeout_seconds, retries

    def get(self, path: str, **query: object) -> Any:
        """Return the decoded response to a path under /api/v1. Raises as `send` does."""
        return self.send("GET", _path(path, query=query))

    def send(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: dict[str, str] | None = None,
        *,
        idempotent: bool | None = None,
    ) -> Any:
        """Send a request under /api/v1 and return the decoded response, or `None` if it is empty.

        Args:
            method: HTTP method.
            path: path and query, after /api/v1.
            body: body, sent as JSON.
            headers: headers in addition to the client's.
            idempotent: whether to retry. `None`: as HTTP defines it for the method.

        Raises:
            ServerError: the server rejected the request; the subclass says why.
            UnreachableError: no Holdfast server answered, or it rejected the key.
        """
        retry = method in ("GET", "PUT", "DELETE") if idempotent is None else idempotent
        data = None if body is None else msgspec.json.encode(body)
        sent = (headers or {}) | ({} if body is None else {"Content-Type": "application/json"})
        backoff = Backoff(MAX_PAUSE_SECONDS)
        for left in reversed(range(1 + (self._retries if retry else 0))):
            try:
                answer = self.exchange(method, f"/api/v1{path}", data, sent, seconds=self._timeout_seconds)
            except RequestFailed as error:
                if not left:
                    raise self._unreachable(error) from None
                pause = backoff.next_seconds()
            else:
                if answer.status not in RETRIED_STATUSES or not left:
                    return self._decoded(answer)
                pause = backoff.next_seconds(min(MAX_PAUSE_SECONDS, answer.retry_after_seconds))
            sleep(pause)
        raise AssertionError("the last try returns or raises")

    def stream(self, template: str, *parts: object) -> Iterator[Any]:
        """Yield the data of server-sent events until the server ends the stream."""
        path = f"{self._base}/api/v1{_path(template, parts)}"
        pool = urllib3.connection_from_url(self._address, timeout=self._timeout_seconds, headers=self._headers)
        try:
            with pool:
                reply = pool.request("GET", path, retries=False, redirect=False, preload_content=False)
                if reply.status != HTTPStatus.OK:
                    self._decoded(HttpResponse(reply.status, reply.read(), 0.0))
                rest = b""
                for part in reply.stream(65536):
                    *lines, rest = (rest + part).split(b"\n")
                    yield from (msgspec.json.decode(line[5:]) for line in lines if line.startswith(b"data:"))
        except urllib3.exceptions.HTTPError as error:
            raise self._unreachable(as_request_failed(error)) from None

    def fetch(self, kind: type[T], method: str, template: str, *parts: object, **more: Any) -> T:
        """Return the response to a request as `kind`; the arguments are those of `call`."""
        return decoded(self.call(method, template, *parts, **more), kind)

    def rows(self, kind: type[T], name: str, template: str, *parts: object, **more: Any) -> list[T]:
        """Return the list `name` of a response, or the response where it is a list."""
        answer = self.call("GET", template, *parts, **more)
        rows = answer.get(name, []) if isinstance(answer, dict) else answer
        return [decoded(row, kind) for row in rows]

    def call(
        self,
        method: str,
        template: str,
        *parts: object,
        body: object = None,
        query: Mapping[str, object] | None = None,
        headers: dict[str, str] | None = None,
        idempotent: bool | None = None,
    ) -> Any:
        """Send a request; `parts` fill the template, each as one quoted path segment."""
        return self.send(method, _path(template, parts, query), body, headers, idempotent=idempotent)

    def _unreachable(self, error: RequestFailed) -> UnreachableError:
        if isinstance(error, WrongAddress):
            return UnreachableError(f"{self.server}: {error}")
        if isinstance(error, NotHttpServer):
            return UnreachableError(f"{self.server} is not a Holdfast server ({error})")
        reason = f"no server answers at {self.server} ({error})"
        return UnreachableError(f"{reason}: start one with `holdfast serve` or give --server")

    def _decoded(self, reply: HttpResponse) -> Any:
        if reply.status == HTTPStatus.NO_CONTENT:
            return None
        try:
            answer = msgspec.json.decode(reply.body)
        except msgspec.DecodeError:
            answer = None
        if reply.status == HTTPStatus.UNAUTHORIZED:
            reason = answer.get("message") if isinstance(answer, dict) else None
            raise UnreachableError(
                f"{self.server} rejected the request: {reason or 'it requires a token'}; "
                "set HOLDFAST_TOKEN or give --token"
            )
        if not isinstance(answer, dict | list):
            reason = f"HTTP status {reply.status} and no JSON"
            raise UnreachableError(f"{self.server} is not a Holdfast server ({reason})")
        if reply.status == HTTPStatus.NOT_FOUND and self._base and b'"not_found"' in reply.body:
            raise self._unreachable(WrongAddress(NO_API))
        if reply.status >= 400:
            kind = _ERRORS.get(reply.status, ServerBusy if reply.status >= 500 else ServerError)
            raise kind(reply.status, answer if isinstance(answer, dict) else {})
        return answer


def decoded(answer: Any, kind: type[T]) -> T:
    try:
        # not strict: non-finite numbers are sent as "nan", "inf" and "-inf"
        return msgspec.convert(answer, kind, strict=False)
    except msgspec.ValidationError as error:
        raise UnreachableError(f"the server has an incompatible version of Holdfast: {error}") from None


def _path(template: str, parts: Sequence[object] = (), query: Mapping[str, object] | None = None) -> str:
    """Fill a template such as `/jobs/{job}` and add the query, without values that are `None`."""
    segments = iter(parts)
    path = re.sub(r"{\w+}", lambda _: quote(str(next(segments)), safe=""), template)
    given = {name: value for name, value in (query or {}).items() if value is not None}
    return f"{path}?{urlencode(given, doseq=True)}" if given else path
