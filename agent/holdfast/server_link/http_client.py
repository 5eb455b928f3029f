"""HTTP to a Holdfast server: for the agent, the supervisor, `holdfast.client` and the command line.

Connections are kept alive, requests are limited in time and size, and redirects are not followed. A request that
gets no answer raises `NoAnswer`. `AgentClient` is for agents and supervisors, `JsonClient` for all others.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import logging
import random
import socket
import weakref
from collections.abc import Mapping
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

from holdfast.protocol.messages import DEFAULT_PORT, Ack, Batch, Desired

log = logging.getLogger("holdfast")

DEFAULT_SERVER = f"http://127.0.0.1:{DEFAULT_PORT}"
CONNECT_SECONDS = 5.0
REQUEST_SECONDS = 15.0
"""The limit of a whole request, however slowly its answer arrives."""
ANSWER_BYTES = 256 * 1024
"""The largest answer that an agent reads."""
MOST_RETRY_AFTER_SECONDS = 600.0
SLOW_PROBE_SECONDS = 60.0
FIRST_SECONDS, MOST_SECONDS = 0.1, 30.0


class NoAnswer(Exception):
    """The server did not do what was asked, for a reason that may pass."""

    def __init__(self, reason: str, *, retry_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_seconds = retry_seconds


class NotHttp(NoAnswer):
    """What answers there is no web server."""


class Later(NoAnswer):
    """The server takes no more of these for now."""


class NotAllowed(NoAnswer):
    """The server wants another token."""

    way_out = "set HOLDFAST_TOKEN to the server's"


class NotOurJob(NotAllowed):
    """The token is for another project than the job."""

    way_out = (
        "a job of this name belongs to another project there; give this one another name, "
        "or set HOLDFAST_TOKEN to a key of that project"
    )


class Refused(Exception):
    """The server will never take this batch."""


class Superseded(Refused):
    """The server takes no batch of this attempt any more: a newer one of the job has begun."""


def validate_server(server: str) -> str:
    """Return an address without the slash at its end, or raise ValueError with what is wrong with it."""
    try:
        parts = urlsplit(server)
        host, port, reason = parts.hostname, parts.port, ""
    except ValueError as error:  # a port that is none, a bracket that is not closed
        raise ValueError(_no_address(server, str(error))) from None
    if parts.scheme not in ("http", "https"):
        reason = "it begins with neither http:// nor https://"
    elif not host or any(character.isspace() for character in server):
        reason = "it names no host"
    elif port == 0:
        reason = "Port out of range 1-65535"
    if reason:
        raise ValueError(_no_address(server, reason))
    return server.rstrip("/")


def _no_address(server: str, reason: str) -> str:
    return f"server {server!r} is no address ({reason}): give one such as {DEFAULT_SERVER}"


class Backoff:
    """Exponential with full jitter, so that the jobs of a server that returns do not all come at once."""

    def __init__(self, longest_seconds: float | None = None) -> None:
        # A generator of its own: the random state of the training process must not move.
        self._random = random.Random()  # noqa: S311
        self._longest_seconds = MOST_SECONDS if longest_seconds is None else longest_seconds
        self._failures = 0

    def reset(self) -> None:
        self._failures = 0

    def next_seconds(self, at_least: float = 0.0) -> float:
        """The wait after one more failure; `at_least` is what the server asked for, met and a little exceeded."""
        ceiling: float = min(self._longest_seconds, FIRST_SECONDS * 2.0 ** min(self._failures, 16))
        self._failures += 1
        return at_least + self._random.uniform(0, at_least / 10 if at_least else ceiling)


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes
    retry_after_seconds: float


class HttpClient:
    """Requests to one server; any thread may make them, and `shut` ends those under way.

    Args:
        server: its address; ValueError for what is none.
        token: a key, or the shared secret, when the server asks for one.
        name: for the header User-Agent.
    """

    def __init__(self, server: str, token: str | None, name: str) -> None:
        self._address = validate_server(server)
        url = urlsplit(self._address)
        self.server = f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"
        """The address, without credentials and without a slash at its end."""
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
        most_bytes: int | None = None,
        tries: int = 1,
    ) -> Answer:
        """Make a request and read the whole answer.

        Args:
            method: GET, POST, …
            path: with its query, after the address.
            body: of the request.
            headers: in addition to the client's own.
            seconds: the limit of the whole request.
            most_bytes: the limit of the answer.
            tries: 2 repeats the request at once when the server closed a connection that was kept alive.

        Raises:
            NoAnswer: it may or may not have arrived.
        """
        deadline = monotonic() + seconds
        timeout = urllib3.Timeout(total=seconds, connect=min(CONNECT_SECONDS, seconds))
        try:
            if self._shut:
                raise NoAnswer("the connection is closed")
            reply = self._pool.urlopen(
                method, self._base + path, body, {**self._headers, **(headers or {})}, retries=False,
                redirect=False, timeout=timeout, preload_content=False,
            )  # fmt: skip
            content = reply.read(None if most_bytes is None else most_bytes + 1)
            if most_bytes is not None and len(content) > most_bytes:
                reply.close()
                raise NoAnswer(f"it answered with more than {most_bytes} bytes")
            reply.release_conn()
        except (HTTPError, OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            # ValueError and AttributeError: how http.client meets a socket that `shut` has ended.
            left = deadline - monotonic()
            if tries > 1 and left > 0 and isinstance(error, ProtocolError) and not self._shut:
                return self.exchange(method, path, body, headers, seconds=left, most_bytes=most_bytes)
            raise no_answer_after(error) from None
        return Answer(reply.status, content, _retry_after(reply.headers.get("Retry-After")))

    def shut(self) -> None:
        """Take no more requests, and end those under way with a `NoAnswer` in the threads that wait for them."""
        self._shut = True
        self.abort()

    def abort(self) -> None:
        """End the requests under way with a `NoAnswer`."""
        opened: list[_TimedHTTPConnection] | None = None
        while opened is None:
            with contextlib.suppress(RuntimeError):  # another thread has added a connection meanwhile
                opened = list(self._opened)
        for connection in opened:
            if connection.sock is not None:
                # The plain socket's own method: TLS would tear its state down under the reading thread.
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the connections back; the next request opens one."""
        self._pool.close()
        self._pool = self._new_pool()

    def _new_pool(self) -> urllib3.HTTPConnectionPool:
        pool = urllib3.connection_from_url(self._address, opened=self._opened)
        pool.ConnectionCls = (
            _TimedHTTPSConnection if isinstance(pool, urllib3.HTTPSConnectionPool) else _TimedHTTPConnection
        )
        return pool


class _TimedHTTPConnection(HTTPConnection):
    """A connection whose timeout limits an answer as a whole: a socket's own starts anew with each byte."""

    def __init__(self, *args: Any, opened: weakref.WeakSet[_TimedHTTPConnection], **more: Any) -> None:
        super().__init__(*args, **more)
        opened.add(self)

    def response_class(  # type: ignore[override]
        self, sock: socket.socket, *args: Any, **more: Any
    ) -> http.client.HTTPResponse:
        """Called by `http.client` where it would make an `HTTPResponse` of the socket."""
        timed: Any = _TimedFile(sock, monotonic() + (self.timeout or 0.0))
        return http.client.HTTPResponse(timed, *args, **more)


class _TimedHTTPSConnection(_TimedHTTPConnection, HTTPSConnection): ...


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
            raise TimeoutError("it took too long")
        self._sock.settimeout(left)
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


def no_answer_after(error: Exception) -> NoAnswer:
    """The system's own words where urllib3 has wrapped them in its own."""
    if isinstance(error, TimeoutError | ReadTimeoutError) or type(error) is ConnectTimeoutError:
        return NoAnswer("it took too long")
    cause = error.args[-1] if isinstance(error, ProtocolError) and error.args else error
    if isinstance(cause, http.client.RemoteDisconnected):
        return NotHttp("it closed the connection without an answer")
    if isinstance(cause, http.client.HTTPException):
        return NotHttp("it does not speak HTTP")
    cause = error.__cause__ or cause
    return NoAnswer(getattr(cause, "strerror", None) or str(cause) or type(cause).__name__)


def _retry_after(header: str | None) -> float:
    """Seconds to wait, from either form of the header; 0 where there is none that makes sense."""
    if header is None:
        return 0.0
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - time()
        except ValueError:
            return 0.0
    return min(max(seconds, 0.0), MOST_RETRY_AFTER_SECONDS) if seconds == seconds else 0.0


_FOR_AGENTS: Any = {"most_bytes": ANSWER_BYTES, "tries": 2}


class AgentClient(HttpClient):
    """What agents and supervisors ask of a server; its address may lack http://."""

    def __init__(self, server: str, token: str | None) -> None:
        super().__init__(server if "//" in server else f"http://{server}", token, "holdfast-agent")

    def ingest(self, payload: bytes, sequence: int, *, limit_seconds: float = REQUEST_SECONDS) -> Ack:
        """Hand over one batch.

        Raises:
            Superseded: a newer attempt has begun, and this one has no more to say.
            Refused: this batch is unacceptable, others may not be.
            NoAnswer: it may or may not have arrived; send it again under the same key.
        """
        headers = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
        answer = self.exchange("POST", "/api/v1/ingest", payload, headers, seconds=limit_seconds, **_FOR_AGENTS)
        if answer.status in (400, 409, 413, 415, 422):
            kind = Superseded if answer.status == HTTPStatus.CONFLICT and b'"fenced"' in answer.body else Refused
            raise kind(f"HTTP {answer.status}: {answer.body[:200].decode(errors='replace')}")
        if answer.status not in (200, 201, 202):
            raise _refusal(answer)
        try:
            ack = msgspec.msgpack.decode(answer.body, type=Ack)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise NoAnswer("what it answered is not an acknowledgement") from None
        if ack.acked != sequence:
            raise NoAnswer(f"it acknowledged batch {ack.acked} when batch {sequence} was sent")
        return ack

    def desired(self, job: str, *, after: int | None, wait_seconds: float = 0.0) -> Desired | None:
        """What is wanted of `job`: at once where `after` is None, else as soon as it is newer; None: it is not."""
        path = f"/api/v1/jobs/{quote(job, safe='')}/desired"
        if after is not None:
            path += f"?after={after}&wait={wait_seconds:g}"
        seconds = wait_seconds + REQUEST_SECONDS
        answer = self.exchange("GET", path, headers={"Accept": "application/json"}, seconds=seconds, **_FOR_AGENTS)
        if answer.status == HTTPStatus.NO_CONTENT:
            return None
        if answer.status != HTTPStatus.OK:
            raise _refusal(answer)
        try:
            return msgspec.json.decode(answer.body, type=Desired)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise NoAnswer("what it answered is not a desired state") from None


def send_once(server: str, token: str | None, batch: Batch, limit_seconds: float) -> bool:
    """Hand over a batch outside of any queue; whether the server has it. ValueError: `server` is no address."""
    client = AgentClient(server, token)
    try:
        client.ingest(msgspec.msgpack.encode(batch), batch.sequence, limit_seconds=limit_seconds)
    except (NoAnswer, Refused) as error:
        log.debug("%s does not have a batch of %s: %s", client.server, batch.job, error)
        return False
    finally:
        client.close()
    return True


def _refusal(answer: Answer) -> NoAnswer:
    status = answer.status
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return NotAllowed(f"HTTP {status}", retry_seconds=SLOW_PROBE_SECONDS)
    if status == HTTPStatus.NOT_FOUND and b'"unknown_job"' in answer.body:
        # The first report of a job makes it known, so a job that is known to others belongs to another project.
        return NotOurJob(f"HTTP {status}", retry_seconds=SLOW_PROBE_SECONDS)
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return Later(f"HTTP {status}", retry_seconds=answer.retry_after_seconds)
    if 300 <= status < 400:
        return NoAnswer(f"HTTP {status}: it points elsewhere, and redirects are not followed")
    if 400 <= status < 500 or status == HTTPStatus.NOT_IMPLEMENTED:
        try:
            msgspec.json.decode(answer.body)
        except msgspec.DecodeError:
            return NoAnswer(f"HTTP {status}: what answers there is no Holdfast server")
    return NoAnswer(f"HTTP {status}", retry_seconds=answer.retry_after_seconds)
