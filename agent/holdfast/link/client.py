"""HTTP to one server: kept alive, bounded in time and size, no redirects; what goes wrong is a `NoAnswer`."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from time import time
from urllib.parse import quote, urlsplit

import msgspec
import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

from holdfast.conversation import fault_of_http
from holdfast.protocol import Ack, Desired

CONNECT_SECONDS = 5.0
REQUEST_SECONDS = 15.0
"""A whole request, however slowly its answer drips in."""
ANSWER_BYTES = 256 * 1024
MOST_RETRY_AFTER_SECONDS = 600.0
SLOW_PROBE_SECONDS = 60.0


class NoAnswer(Exception):
    """The server did not do what was asked, for a reason that may pass."""

    def __init__(self, reason: str, *, retry_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_seconds = retry_seconds


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
    """Nor any other of this attempt: a newer one of the job has begun."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes
    retry_after_seconds: float


class Client:
    """One connection, used by one thread at a time; `shut` may come from any."""

    def __init__(self, server: str, token: str | None) -> None:
        url = urlsplit(server if "//" in server else f"http://{server}")
        try:
            valid = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
        except ValueError:
            valid = False
        if not valid or url.hostname is None:
            raise ValueError(f"server {server!r}: expected an address such as http://127.0.0.1:7117")
        self.server = f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path.rstrip('/')}"
        self._base = url.path.rstrip("/")
        self._shut = False
        self._headers = {"User-Agent": "holdfast-agent"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._connection: HTTPConnection
        if url.scheme == "https":
            context = ssl.create_default_context()
            self._connection = HTTPSConnection(
                url.hostname, url.port, timeout=CONNECT_SECONDS, ssl_context=context, cert_reqs="CERT_REQUIRED"
            )
        else:
            self._connection = HTTPConnection(url.hostname, url.port, timeout=CONNECT_SECONDS)

    def ingest(self, payload: bytes, sequence: int, *, limit_seconds: float = REQUEST_SECONDS) -> Ack:
        """Hand over one batch.

        Raises:
            Superseded: a newer attempt has begun, and this one has no more to say.
            Refused: this batch is unacceptable, others may not be.
            NoAnswer: it may or may not have arrived; send it again under the same key.
        """
        headers = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
        answer = self._request("POST", "/api/v1/ingest", payload, headers, limit_seconds)
        if answer.status in (400, 409, 413, 415, 422):
            kind = Superseded if answer.status == HTTPStatus.CONFLICT and b'"fenced"' in answer.body else Refused
            raise kind(f"HTTP {answer.status}: {answer.body[:200].decode(errors='replace')}")
        if answer.status not in (200, 201, 202):
            raise _no_answer(answer)
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
        limit = wait_seconds + REQUEST_SECONDS
        answer = self._request("GET", path, None, {"Accept": "application/json"}, limit, idle_seconds=limit)
        if answer.status == HTTPStatus.NO_CONTENT:
            return None
        if answer.status != HTTPStatus.OK:
            raise _no_answer(answer)
        try:
            return msgspec.json.decode(answer.body, type=Desired)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise NoAnswer("what it answered is not a desired state") from None

    def shut(self) -> None:
        """Take no more requests, and end the one under way. Any thread may say so."""
        self._shut = True
        self.abort()

    def abort(self) -> None:
        """End the request under way, if there is one, with a `NoAnswer` in the thread that waits for it."""
        sock = self._connection.sock
        if sock is not None:
            # The plain socket's own method: TLS would tear its state down under the reading thread.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()

    def _request(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        limit_seconds: float,
        idle_seconds: float = REQUEST_SECONDS,
    ) -> Answer:
        reused = self._connection.sock is not None
        try:
            return self._exchange(method, path, body, headers, limit_seconds, idle_seconds)
        except _Dropped as dropped:
            # A kept-alive connection may have been closed by the server in the meantime. All requests of ours
            # may be sent twice.
            if reused and not dropped.timed_out and not self._shut:
                with contextlib.suppress(_Dropped):
                    return self._exchange(method, path, body, headers, limit_seconds, idle_seconds)
            raise NoAnswer(str(dropped)) from None

    def _exchange(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        limit_seconds: float,
        idle_seconds: float,
    ) -> Answer:
        connection = self._connection
        watch = _Watch(self, limit_seconds)
        try:
            connection.timeout = min(CONNECT_SECONDS, limit_seconds)
            watch.start()
            connection.request(
                method, self._base + path, body, {**self._headers, **headers}, preload_content=False
            )
            if watch.expired or self._shut:
                raise TimeoutError("it took too long")
            connection.timeout = min(idle_seconds, limit_seconds)
            response = connection.getresponse()
            content = response.read(ANSWER_BYTES + 1, decode_content=False)
            if len(content) > ANSWER_BYTES:
                connection.close()
                raise NoAnswer(f"it answered with more than {ANSWER_BYTES} bytes")
            return Answer(response.status, content, _retry_after(response.headers.get("Retry-After")))
        except (
            OSError,
            http.client.HTTPException,
            urllib3.exceptions.HTTPError,
            ValueError,
            AttributeError,
        ) as error:
            # AttributeError and ValueError: http.client's way of meeting a socket that `abort` has shut.
            connection.close()
            reason = "it took too long" if watch.expired else _in_words(error)
            raise _Dropped(reason, timed_out=watch.expired or isinstance(error, TimeoutError)) from None
        finally:
            watch.cancel()


class _Dropped(Exception):
    def __init__(self, reason: str, *, timed_out: bool) -> None:
        super().__init__(reason)
        self.timed_out = timed_out


class _Watch:
    """Ends a request that outlives its limit: a socket's own timeout starts anew with each byte that arrives."""

    def __init__(self, client: Client, limit_seconds: float) -> None:
        self.expired = False
        self._client = client
        self._timer = threading.Timer(limit_seconds, self._expire)
        self._timer.daemon = True
        self._timer.name = "holdfast-watch"

    def start(self) -> None:
        # No new threads once the interpreter goes down; the socket's timeout has to do then.
        with contextlib.suppress(RuntimeError):
            self._timer.start()

    def cancel(self) -> None:
        self._timer.cancel()

    def _expire(self) -> None:
        self.expired = True
        self._client.abort()


def _in_words(error: BaseException) -> str:
    """The system's own words where urllib3 has wrapped them in its own."""
    if (fault := fault_of_http(error)) is not None:
        return f"{fault}; a Holdfast server would"
    cause = error.__cause__ or error
    return getattr(cause, "strerror", None) or str(error) or type(error).__name__


def _no_answer(answer: Answer) -> NoAnswer:
    status = answer.status
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return NotAllowed(f"HTTP {status}", retry_seconds=SLOW_PROBE_SECONDS)
    if status == HTTPStatus.NOT_FOUND and b'"unknown_job"' in answer.body:
        # A job that nobody has heard of is made by its first report, so this one is somebody else's.
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
