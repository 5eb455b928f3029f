"""Requests to a server and its answers: where it is, what went wrong, and when to ask again."""

from __future__ import annotations

import http.client
import random
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import msgspec
import urllib3

from holdfast.protocol import DEFAULT_PORT

DEFAULT_SERVER = f"http://127.0.0.1:{DEFAULT_PORT}"
ASK_AGAIN = (429, 502, 503, 504)
"""The server, or a proxy before it, has no time now."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 5.0


class ServerError(Exception):
    """The server understood and said no; `str()` is its own sentence.

    `status` is the HTTP status, `code` the server's word for what is wrong, `body` all that it told.
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


def validate_server(server: str) -> str:
    """Return an address without the slash at its end, or raise ValueError with what is wrong with it."""
    try:
        parts = urlsplit(server)
        host, port = parts.hostname, parts.port
    except ValueError as error:  # a port that is none, a bracket that is not closed
        raise ValueError(_no_address(server, str(error))) from None
    if parts.scheme not in ("http", "https"):
        raise ValueError(_no_address(server, "it begins with neither http:// nor https://"))
    if not host or any(character.isspace() for character in server):
        raise ValueError(_no_address(server, "it names no host"))
    if port == 0:
        raise ValueError(_no_address(server, "Port out of range 1-65535"))
    return server.rstrip("/")


def _no_address(server: str, reason: str) -> str:
    return f"server {server!r} is no address ({reason}): give one such as {DEFAULT_SERVER}"


class Conversation:
    """With one server. What may be asked twice is asked again when the server has no time or went away.

    Args:
        server: its address; ValueError for what is none.
        token: a key, or the shared secret, when the server asks for one.
        timeout_seconds: for each attempt.
        retries: further attempts, after pauses that grow, or as long as the server says.
    """

    def __init__(
        self,
        server: str,
        token: str | None,
        *,
        timeout_seconds: float,
        retries: int,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.server = validate_server(server)
        self.retries = retries
        self._sleep = sleep
        headers = {"Accept": "application/json", "User-Agent": "holdfast-client"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._pool = urllib3.PoolManager(headers=headers, timeout=timeout_seconds, retries=False)

    def close(self) -> None:
        self._pool.clear()

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
            twice: it may be sent twice and happens once. None: as its method has it.

        Raises:
            ServerError: the server said no; one of its subclasses says in which way.
            UnreachableError: there is no use in asking it anything else either.
        """
        again = method in ("GET", "PUT", "DELETE") if twice is None else twice
        attempts = 1 + (self.retries if again else 0)
        for attempt in range(attempts):
            last = attempt == attempts - 1
            try:
                reply = self._once(method, path, body, headers)
            except UnreachableError:
                if last:
                    raise
                self._sleep(_pause(attempt))
                continue
            if reply.status not in ASK_AGAIN or last:
                return self._answer(reply)
            self._sleep(_told(reply) or _pause(attempt))
        raise AssertionError("the last attempt answers or raises")

    def stream(self, path: str) -> Iterator[Any]:
        """The data of server-sent events as they come, until the server ends the stream."""
        try:
            reply = self._pool.request("GET", self._url(path), preload_content=False)
            if reply.status != 200:
                reply.read(cache_content=True)
                self._answer(reply)
            rest = b""
            for part in reply.stream(65536):
                *lines, rest = (rest + part).split(b"\n")
                yield from (msgspec.json.decode(line[5:]) for line in lines if line.startswith(b"data:"))
        except urllib3.exceptions.HTTPError as error:
            raise self._unreachable(error) from None

    def _once(
        self, method: str, path: str, body: object, headers: dict[str, str] | None
    ) -> urllib3.BaseHTTPResponse:
        sent = {**self._pool.headers, **(headers or {})}
        if body is not None:
            sent["Content-Type"] = "application/json"
        data = None if body is None else msgspec.json.encode(body)
        try:
            return self._pool.request(method, self._url(path), body=data, headers=sent)
        except urllib3.exceptions.HTTPError as error:
            raise self._unreachable(error) from None

    def _url(self, path: str) -> str:
        return f"{self.server}/api/v1{path}"

    def _unreachable(self, error: urllib3.exceptions.HTTPError) -> UnreachableError:
        if (fault := fault_of_http(error)) is not None:
            return UnreachableError(f"what answers at {self.server} is no Holdfast server ({fault})")
        why = str(error).rpartition(": ")[2] or type(error).__name__
        reason = f"no Holdfast server answers at {self.server} ({why})"
        return UnreachableError(f"{reason}: start one with `holdfast serve` or give --server")

    def _answer(self, reply: urllib3.BaseHTTPResponse) -> Any:
        if reply.status == 204:
            return None
        try:
            answer = msgspec.json.decode(reply.data)
        except msgspec.DecodeError:
            answer = None
        if reply.status == 401:
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


def fault_of_http(error: BaseException) -> str | None:
    """Say what is wrong with an answer that no web server gives; None where the error is another one."""
    cause = error.args[-1] if isinstance(error, urllib3.exceptions.ProtocolError) and error.args else error
    if isinstance(cause, http.client.RemoteDisconnected):
        return "it closed the connection without an answer"
    return "it does not speak HTTP" if isinstance(cause, http.client.HTTPException) else None


def filled(template: str, **parts: object) -> str:
    """`/jobs/{job}` with its parts, each as one segment whatever is in it."""
    return template.format(**{name: quote(str(part), safe="") for name, part in parts.items()})


def asked(path: str, **query: object) -> str:
    """A path with what is asked of it; None asks nothing, and each of several values is asked for."""
    said = {name: value for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(said, doseq=True)}" if said else path


def _pause(attempt: int) -> float:
    longest: float = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 4**attempt)
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - many that wait do not come back together


def _told(reply: urllib3.BaseHTTPResponse) -> float:
    said = reply.headers.get("Retry-After", "")
    return min(LONGEST_PAUSE_SECONDS, float(said)) if said.isascii() and said.isdigit() else 0.0
