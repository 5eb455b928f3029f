"""The HTTP client for the agent, the supervisor, `holdfast.client` and the command line.

Connections are kept alive, requests are limited in time and size, and redirects are not followed. A request that
fails raises `RequestFailed`. `AgentClient` is for agents and supervisors, `JsonClient` for all others.

One module, since all of them share connections, limits and errors.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import logging
import random
import socket
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from time import monotonic, time
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec
import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import ConnectTimeoutError, HTTPError, ProtocolError, ReadTimeoutError

from holdfast.protocol.wire import DEFAULT_PORT, Ack, Batch, Desired

log = logging.getLogger("holdfast")

DEFAULT_SERVER = f"http://127.0.0.1:{DEFAULT_PORT}"
CONNECT_SECONDS = 5.0
REQUEST_SECONDS = 15.0
"""The limit of a request, however slowly the response arrives."""
MAX_RESPONSE_BYTES = 256 * 1024
"""The largest response that an agent reads."""
_NO_TLS = "WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"
NO_API = f"no Holdfast API here: give only the server's address, such as {DEFAULT_SERVER}"
MAX_RETRY_AFTER_SECONDS = 600.0
UNAUTHORIZED_RETRY_SECONDS = 60.0
_FOR_AGENTS: Any = {"max_bytes": MAX_RESPONSE_BYTES, "tries": 2}
FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.1, 30.0


class RequestFailed(Exception):
    """A request failed for a reason that may be temporary."""

    def __init__(self, reason: str, *, retry_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_seconds = retry_seconds


class NotHttpServer(RequestFailed):
    """The peer does not speak HTTP."""


class WrongAddress(RequestFailed):
    """A server answers, but its API is at another address."""


class TooManyRequests(RequestFailed):
    """The server limits the rate of such requests."""


class InvalidToken(RequestFailed):
    """The server rejects the token."""

    remedy = "set HOLDFAST_TOKEN to a key of this server"


class JobOfOtherProject(InvalidToken):
    """The job belongs to another project than the token."""

    remedy = (
        "a job of this name belongs to another project; rename this job, "
        "or set HOLDFAST_TOKEN to a key of that project"
    )


class BatchRejected(Exception):
    """The server will never accept this batch."""


class AttemptFenced(BatchRejected):
    """The server accepts no more batches of this attempt: a newer attempt has begun."""


def validate_server(server: str) -> str:
    """Return an address without trailing slashes. ValueError: it is not valid."""
    try:
        parts = urlsplit(server)
        if parts.scheme not in ("http", "https"):
            raise ValueError("it must begin with http:// or https://")
        if not parts.hostname or any(character.isspace() for character in server):
            raise ValueError("it has no host name")
        if parts.port == 0:
            raise ValueError("Port out of range 1-65535")
    except ValueError as error:  # also of urlsplit, for an invalid port or an unclosed bracket
        raise ValueError(
            f"invalid server address {server!r} ({error}): use one such as {DEFAULT_SERVER}"
        ) from None
    return server.rstrip("/")


class Backoff:
    """Exponential back-off with full jitter, so that jobs do not all reconnect at the same time."""

    def __init__(self, longest_seconds: float | None = None) -> None:
        # A separate generator: the random state of the training process must not change.
        self._random = random.Random()  # noqa: S311
        self._longest_seconds = MAX_BACKOFF_SECONDS if longest_seconds is None else longest_seconds
        self._failures = 0

    def reset(self) -> None:
        self._failures = 0

    def next_seconds(self, at_least: float = 0.0) -> float:
        """Return the wait after one more failure: `at_least`, plus jitter that grows with each failure."""
        ceiling: float = min(self._longest_seconds, FIRST_BACKOFF_SECONDS * 2.0 ** min(self._failures, 16))
        self._failures += 1
        return at_least + self._random.uniform(0, max(at_least / 10, ceiling))


@dataclass(frozen=True, slots=True)
class HttpResponse:
    status: int
    body: bytes
    retry_after_seconds: float


class HttpClient:
    """Sends requests to one server. Any thread may send; `shut` ends the requests in progress.

    Args:
        server: address of the server; ValueError if it is not valid.
    """

    def __init__(self, server: str, token: str | None, name: str) -> None:
        self._address = validate_server(server)
        url = urlsplit(self._address)
        self.server = f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"
        """Address of the server, without credentials and trailing slash."""
        self._base = url.path
        self._headers = {"User-Agent": name} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._opened: weakref.WeakSet[_TimedHTTPConnection] = weakref.WeakSet()
        self._pool = self._new_pool()
        self._shut = False

    def exchange(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        seconds: float = REQUEST_SECONDS,
        max_bytes: int | None = None,
        tries: int = 1,
    ) -> HttpResponse:
        """Send a request and read the response.

        Args:
            path: path and query, relative to the server's address.
            seconds: limit of the request. Connecting takes at most `CONNECT_SECONDS` of it. Sending to a server
                that reads slowly has this limit too, separately.
            max_bytes: limit of the response's size.
            tries: 2 repeats the request at once if the server closed a connection that was kept alive.

        Raises:
            RequestFailed: the server may or may not have received it.
        """
        deadline = monotonic() + seconds
        try:
            if self._shut:
                raise RequestFailed("the client is closed")
            reply = self._pool.urlopen(
                method, self._base + path, body, {**self._headers, **(headers or {})}, retries=False,
                redirect=False, timeout=urllib3.Timeout(total=seconds), preload_content=False,
            )  # fmt: skip
            content = reply.read(None if max_bytes is None else max_bytes + 1)
            if max_bytes is not None and len(content) > max_bytes:
                reply.close()
                raise RequestFailed(f"the response exceeds {max_bytes} bytes")
            reply.release_conn()
        except (HTTPError, OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            # http.client raises ValueError or AttributeError if `shut` has ended its socket.
            left = deadline - monotonic()
            if tries > 1 and left > 0 and isinstance(error, ProtocolError) and not self._shut:
                return self.exchange(method, path, body, headers, seconds=left, max_bytes=max_bytes)
            raise as_request_failed(error) from None
        return HttpResponse(reply.status, content, _retry_after(reply.headers.get("Retry-After")))

    def shut(self) -> None:
        """Reject further requests, and end those in progress with `RequestFailed` in their threads."""
        self._shut = True
        self.abort()

    def abort(self) -> None:
        """End the requests in progress with `RequestFailed`."""
        opened: list[_TimedHTTPConnection] | None = None
        while opened is None:
            with contextlib.suppress(RuntimeError):  # another thread added a connection
                opened = list(self._opened)
        for connection in opened:
            connection.abort()

    def close(self) -> None:
        """Close all connections; the next request opens one."""
        self._pool.close()
        self._pool = self._new_pool()

    def _new_pool(self) -> urllib3.HTTPConnectionPool:
        pool = urllib3.connection_from_url(self._address, opened=self._opened)
        pool.ConnectionCls = (
            _TimedHTTPSConnection if isinstance(pool, urllib3.HTTPSConnectionPool) else _TimedHTTPConnection
        )
        return pool


class _TimedHTTPConnection(HTTPConnection):
    """A connection whose timeout limits its request, and that another thread can end.

    A socket's timeout limits each operation separately, and name resolution has none. Connecting is limited by
    `CONNECT_SECONDS`, sending the request by the timeout, and reading the response by what is left of it.
    """

    def __init__(self, *args: Any, opened: weakref.WeakSet[_TimedHTTPConnection], **more: Any) -> None:
        super().__init__(*args, **more)
        self._connecting: Future[socket.socket] = Future()
        self._handshake: socket.socket | None = None
        """A second descriptor of the socket during a TLS handshake, which detaches the first one."""
        opened.add(self)

    def _new_conn(self) -> socket.socket:
        """Connect in a thread, which is abandoned at the limit: name resolution cannot be interrupted."""
        connecting = self._connecting = Future()
        try:
            threading.Thread(
                target=self._connect, args=(connecting,), name="holdfast-connect", daemon=True
            ).start()
        except RuntimeError:  # the process may start no more threads, or is exiting
            return super()._new_conn()
        try:
            return connecting.result(min(CONNECT_SECONDS, self.timeout or CONNECT_SECONDS))
        except (TimeoutError, CancelledError):
            if connecting.cancel():
                raise ConnectTimeoutError(self, "timed out") from None
            return connecting.result()  # it has just connected

    def _connect(self, connecting: Future[socket.socket]) -> None:
        try:
            connected = super()._new_conn()
        except Exception as error:  # raised again in `_new_conn`, whatever it is
            with contextlib.suppress(InvalidStateError):
                connecting.set_exception(error)
            return
        try:
            connecting.set_result(connected)
        except InvalidStateError:
            connected.close()

    def request(self, *args: Any, **more: Any) -> None:
        if self.sock is not None:  # kept alive; the timeout is still that of the previous request
            self.sock.settimeout(self.timeout)
        super().request(*args, **more)

    def abort(self) -> None:
        """End the request in progress, from another thread."""
        self._connecting.cancel()
        for opened in filter(None, (self.sock, self._handshake)):
            # the plain socket's method: that of a TLS socket would discard state that the reading thread uses
            with contextlib.suppress(OSError):
                socket.socket.shutdown(opened, socket.SHUT_RDWR)

    def response_class(  # type: ignore[override]
        self, sock: socket.socket, *args: Any, **more: Any
    ) -> http.client.HTTPResponse:
        """Called by `http.client` in place of its `HTTPResponse`."""
        timed: Any = _TimedFile(sock, monotonic() + (self.timeout or 0.0))
        return http.client.HTTPResponse(timed, *args, **more)


class _TimedHTTPSConnection(_TimedHTTPConnection, HTTPSConnection):
    """As `_TimedHTTPConnection`; the TLS handshake is limited by `CONNECT_SECONDS` as well, and can be aborted."""

    def _new_conn(self) -> socket.socket:
        connected = super()._new_conn()
        connected.settimeout(min(CONNECT_SECONDS, self.timeout or CONNECT_SECONDS))  # until `request` sets its own
        self._handshake = connected.dup()
        return connected

    def connect(self) -> None:
        try:
            super().connect()
        finally:
            if (handshake := self._handshake) is not None:
                self._handshake = None
                handshake.close()


class _TimedFile(io.RawIOBase):
    """Reads a socket until a deadline."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock, self._deadline = sock, deadline
        self._file = sock.makefile("rb", buffering=0)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._deadline - monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(left)
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


def as_request_failed(error: Exception) -> RequestFailed:
    """Return the error with the operating system's message, which urllib3 wraps in its own."""
    if isinstance(error, TimeoutError | ReadTimeoutError) or type(error) is ConnectTimeoutError:
        return RequestFailed("timed out")
    cause = error.args[-1] if isinstance(error, ProtocolError) and error.args else error
    if isinstance(cause, http.client.RemoteDisconnected):
        return NotHttpServer("it closed the connection without a response")
    if isinstance(cause, http.client.HTTPException):
        return NotHttpServer("it does not speak HTTP")
    cause = error.__cause__ or cause
    if getattr(error.args[0] if error.args else cause, "reason", "") in _NO_TLS:
        return WrongAddress("the server does not speak HTTPS: use http://")
    return RequestFailed(getattr(cause, "strerror", None) or str(cause) or type(cause).__name__)


def _retry_after(header: str | None) -> float:
    """Return the seconds to wait from either form of the header; 0 if it is absent or malformed."""
    if header is None:
        return 0.0
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - time()
        except ValueError:
            return 0.0
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_SECONDS) if seconds == seconds else 0.0


class AgentClient(HttpClient):
    """The requests of agents and supervisors. The address may lack http://."""

    def __init__(self, server: str, token: str | None) -> None:
        super().__init__(server if "//" in server else f"http://{server}", token, "holdfast-agent")

    def ingest(self, payload: bytes, sequence: int, *, limit_seconds: float = REQUEST_SECONDS) -> Ack:
        """Send one batch.

        Raises:
            AttemptFenced: a newer attempt has begun.
            BatchRejected: the server will never accept this batch; it may accept others.
            RequestFailed: the server may or may not have received the batch; send it again.
        """
        headers = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
        response = self.exchange("POST", "/api/v1/ingest", payload, headers, seconds=limit_seconds, **_FOR_AGENTS)
        if response.status in (400, 409, 413, 415, 422):
            is_fenced = response.status == HTTPStatus.CONFLICT and b'"fenced"' in response.body
            kind = AttemptFenced if is_fenced else BatchRejected
            raise kind(f"HTTP {response.status}: {response.body[:200].decode(errors='replace')}")
        if response.status not in (200, 201, 202):
            raise _failure(response)
        try:
            ack = msgspec.msgpack.decode(response.body, type=Ack)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise RequestFailed("the response is not an acknowledgement") from None
        if ack.acked != sequence:
            raise RequestFailed(f"it acknowledged batch {ack.acked} when batch {sequence} was sent")
        return ack

    def desired(
        self,
        job: str,
        *,
        after: int | None = None,
        alert_pins: Sequence[str] | None = None,
        share_number: int | None = None,
        wait_seconds: float = 0.0,
        limit_seconds: float | None = None,
    ) -> Desired | None:
        """Return the desired state of `job`: at once, or with `after` once its version or what follows differs.

        None: no newer one came within `wait_seconds`. Raises RequestFailed.
        """
        path = f"/api/v1/jobs/{quote(job, safe='')}/desired"
        if after is not None:
            known = "" if alert_pins is None else f"&alert_pins={','.join(alert_pins)}"
            known += "" if share_number is None else f"&share_number={share_number}"
            path += f"?after={after}&wait={wait_seconds:g}{known}"
        seconds = wait_seconds + (REQUEST_SECONDS if limit_seconds is None else limit_seconds)
        response = self.exchange(
            "GET", path, headers={"Accept": "application/json"}, seconds=seconds, **_FOR_AGENTS
        )
        if response.status == HTTPStatus.NO_CONTENT:
            return None
        if response.status != HTTPStatus.OK:
            raise _failure(response)
        try:
            return msgspec.json.decode(response.body, type=Desired)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise RequestFailed("the response is not a desired state") from None


def send_once(server: str, token: str | None, batch: Batch, limit_seconds: float) -> bool:
    """Send a batch without a queue. Return whether the server has it. ValueError: `server` is not valid."""
    client = AgentClient(server, token)
    try:
        client.ingest(msgspec.msgpack.encode(batch), batch.sequence, limit_seconds=limit_seconds)
    except (RequestFailed, BatchRejected) as error:
        log.debug("%s did not accept a batch of %s: %s", client.server, batch.job, error)
        return False
    finally:
        client.close()
    return True


def _failure(response: HttpResponse) -> RequestFailed:
    status = response.status
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return InvalidToken(f"HTTP {status}", retry_seconds=UNAUTHORIZED_RETRY_SECONDS)
    if status == HTTPStatus.NOT_FOUND and b'"unknown_job"' in response.body:
        # A job's first report creates it; a job that is unknown to this key belongs to another project.
        return JobOfOtherProject(f"HTTP {status}", retry_seconds=UNAUTHORIZED_RETRY_SECONDS)
    if status == HTTPStatus.NOT_FOUND and b'"not_found"' in response.body:
        return WrongAddress(NO_API)
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return TooManyRequests(f"HTTP {status}", retry_seconds=response.retry_after_seconds)
    if 300 <= status < 400:
        return RequestFailed(f"HTTP {status}: redirects are not followed")
    if 400 <= status < 500 or status == HTTPStatus.NOT_IMPLEMENTED:
        try:
            msgspec.json.decode(response.body)
        except msgspec.DecodeError:
            return RequestFailed(f"HTTP {status}: this is not a Holdfast server")
    return RequestFailed(f"HTTP {status}", retry_seconds=response.retry_after_seconds)
