"""The HTTP API of a server for operators: what `holdfast.client` and the command line ask, and how it says no."""

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
    DEFAULT_SERVER,
    Answer,
    Backoff,
    HttpClient,
    NoAnswer,
    NotHttp,
    no_answer_after,
)

LONGEST_PAUSE_SECONDS = 5.0
ASK_AGAIN = (429, 502, 503, 504)
"""Statuses of a server, or of a proxy in front of it, that has no time now."""

T = TypeVar("T")


class ServerError(Exception):
    """The server understood and said no; `str()` is its own sentence.

    `status` is the HTTP status, `code` the server's word for what is wrong, `body` the whole answer.
    """

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(body.get("message") or f"the server answered with HTTP status {status}")
        self.status = status
        self.code = str(body.get("error", ""))
        self.body = body


class NotFound(ServerError):
    """There is no such job, checkpoint, order, rule, key …, or not for whoever asks."""


class Conflict(ServerError):
    """It cannot be done as things are now: somebody was quicker, or it is over."""


class Invalid(ServerError):
    """A value that cannot be; `body["field"]` says which, where it is one."""


class NotPermitted(ServerError):
    """The key may be used, and not for this."""


class ServerBusy(ServerError):
    """No time, no room, or a fault of the server's own; asking later may help."""


class UnreachableError(Exception):
    """Nobody answered, or somebody who is no Holdfast server, or it refused our key."""


_KINDS: dict[int, type[ServerError]] = {
    403: NotPermitted, 404: NotFound, 409: Conflict, 410: NotFound, 422: Invalid, 428: Invalid, 429: ServerBusy,
}  # fmt: skip


class JsonClient(HttpClient):
    """The API under /api/v1. What may be asked twice is asked again when the server has no time or went away.

    Args:
        server: its address, as in http://127.0.0.1:7117; ValueError for what is none.
        token: a key, or the shared secret, when the server asks for one.
        timeout_seconds: for each attempt of each request.
        retries: further attempts of what may be asked twice, when the server has no time or went away.
    """

    def __init__(
        self,
        server: str = DEFAULT_SERVER,
        token: str | None = None,
        *,
        timeout_seconds: float = 10.0,
        retries: int = 2,
    ) -> None:
        super().__init__(server, token, "holdfast-client")
        self._headers["Accept"] = "application/json"
        self._timeout_seconds, self._retries = timeout_seconds, retries

    def get(self, path: str, **query: object) -> Any:
        """The decoded answer to a path under /api/v1. Raises as all the others do."""
        return self.send("GET", _path(path, query=query))

    def send(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: dict[str, str] | None = None,
        *,
        twice: bool | None = None,
    ) -> Any:
        """The decoded answer to one request under /api/v1; None where there is nothing to tell.

        Args:
            method: GET, POST, …
            path: with its query, after /api/v1.
            body: sent as JSON.
            headers: in addition to the client's own.
            twice: it may be sent twice and happens once. None: as its method has it.

        Raises:
            ServerError: the server said no; one of its subclasses says in which way.
            UnreachableError: there is no use in asking it anything else either.
        """
        again = method in ("GET", "PUT", "DELETE") if twice is None else twice
        data = None if body is None else msgspec.json.encode(body)
        sent = (headers or {}) | ({} if body is None else {"Content-Type": "application/json"})
        backoff = Backoff(LONGEST_PAUSE_SECONDS)
        for left in reversed(range(1 + (self._retries if again else 0))):
            try:
                answer = self.exchange(method, f"/api/v1{path}", data, sent, seconds=self._timeout_seconds)
            except NoAnswer as error:
                if not left:
                    raise self._unreachable(error) from None
                pause = backoff.next_seconds()
            else:
                if answer.status not in ASK_AGAIN or not left:
                    return self._decoded(answer)
                pause = backoff.next_seconds(min(LONGEST_PAUSE_SECONDS, answer.retry_after_seconds))
            sleep(pause)
        raise AssertionError("the last attempt answers or raises")

    def _stream(self, template: str, *parts: object) -> Iterator[Any]:
        """The data of server-sent events as they come, until the server ends the stream."""
        path = f"{self._base}/api/v1{_path(template, parts)}"
        pool = urllib3.connection_from_url(self._address, timeout=self._timeout_seconds, headers=self._headers)
        try:
            with pool:
                reply = pool.request("GET", path, retries=False, redirect=False, preload_content=False)
                if reply.status != HTTPStatus.OK:
                    self._decoded(Answer(reply.status, reply.read(), 0.0))
                rest = b""
                for part in reply.stream(65536):
                    *lines, rest = (rest + part).split(b"\n")
                    yield from (msgspec.json.decode(line[5:]) for line in lines if line.startswith(b"data:"))
        except urllib3.exceptions.HTTPError as error:
            raise self._unreachable(no_answer_after(error)) from None

    def _ask(self, kind: type[T], method: str, template: str, *parts: object, **more: Any) -> T:
        return decoded(self._tell(method, template, *parts, **more), kind)

    def _rows(self, kind: type[T], name: str, template: str, *parts: object, **more: Any) -> list[T]:
        answer = self._tell("GET", template, *parts, **more)
        rows = answer.get(name, []) if isinstance(answer, dict) else answer
        return [decoded(row, kind) for row in rows]

    def _tell(
        self,
        method: str,
        template: str,
        *parts: object,
        body: object = None,
        query: Mapping[str, object] | None = None,
        headers: dict[str, str] | None = None,
        twice: bool | None = None,
    ) -> Any:
        """Send a request; `parts` fill the template, each as one segment whatever is in it."""
        return self.send(method, _path(template, parts, query), body, headers, twice=twice)

    def _unreachable(self, error: NoAnswer) -> UnreachableError:
        if isinstance(error, NotHttp):
            return UnreachableError(f"what answers at {self.server} is no Holdfast server ({error})")
        reason = f"no Holdfast server answers at {self.server} ({error})"
        return UnreachableError(f"{reason}: start one with `holdfast serve` or give --server")

    def _decoded(self, reply: Answer) -> Any:
        if reply.status == HTTPStatus.NO_CONTENT:
            return None
        try:
            answer = msgspec.json.decode(reply.body)
        except msgspec.DecodeError:
            answer = None
        if reply.status == HTTPStatus.UNAUTHORIZED:
            said = answer.get("message") if isinstance(answer, dict) else None
            refused = f"{self.server} refused: {said}" if said else f"{self.server} asks for its token"
            raise UnreachableError(f"{refused}; set HOLDFAST_TOKEN or give --token")
        if not isinstance(answer, dict | list):
            reason = f"HTTP status {reply.status} and no JSON"
            raise UnreachableError(f"what answers at {self.server} is no Holdfast server ({reason})")
        if reply.status >= 400:
            kind = _KINDS.get(reply.status, ServerBusy if reply.status >= 500 else ServerError)
            raise kind(reply.status, answer if isinstance(answer, dict) else {})
        return answer


def decoded(answer: Any, kind: type[T]) -> T:
    try:
        # Not strict: what JSON has no number for comes as "nan", "inf" and "-inf".
        return msgspec.convert(answer, kind, strict=False)
    except msgspec.ValidationError as error:
        raise UnreachableError(f"the server speaks another version of Holdfast's language: {error}") from None


def _path(template: str, parts: Sequence[object] = (), query: Mapping[str, object] | None = None) -> str:
    """`/jobs/{job}` with its parts and its query; None asks nothing, and each of several values is asked for."""
    segments = iter(parts)
    path = re.sub(r"{\w+}", lambda _: quote(str(next(segments)), safe=""), template)
    said = {name: value for name, value in (query or {}).items() if value is not None}
    return f"{path}?{urlencode(said, doseq=True)}" if said else path
