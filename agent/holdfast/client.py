"""What an operator asks of a Holdfast server, typed: for the command line, the demo and anybody's scripts."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec
import urllib3

from holdfast.protocol import (
    DEFAULT_PORT,
    OPEN_ORDER_STATES,
    CheckpointKind,
    CheckpointState,
    Desired,
    OrderState,
    Paced,
)

DEFAULT_SERVER = f"http://127.0.0.1:{DEFAULT_PORT}"
PAGE = 500
"""The most rows that the server gives at once."""

T = TypeVar("T")
Number = float | str | None
"""The server writes what JSON has no number for as "nan", "inf" and "-inf"."""


class CheckpointRow(msgspec.Struct, kw_only=True):
    """A checkpoint as the server knows it."""

    id: str
    iteration: int
    lineage: int
    kind: CheckpointKind
    state: CheckpointState
    at: float = 0.0
    payload_bytes: int = 0
    stall_seconds: float | None = None
    snapshot_seconds: float | None = None
    persist_seconds: float | None = None
    reason: str | None = None
    abandoned: bool = False
    restorable: bool = False


class Order(msgspec.Struct, kw_only=True):
    """A restore order and how far it got."""

    id: str
    job: str
    checkpoint: str
    iteration: int
    state: OrderState
    created_at: float = 0.0
    from_iteration: int | None = None
    from_lineage: int | None = None
    new_lineage: int | None = None
    reason: str | None = None
    seconds: float | None = None
    safety_checkpoint: str | None = None


class Job(msgspec.Struct, kw_only=True):
    """A job as the fleet page sees it."""

    job: str
    status: str
    status_reason: str | None = None
    alive: bool = False
    iteration: int = 0
    lineage: int = 0
    attempt: int = 0
    restarts: int = 0
    iterations_per_second: float | None = None
    last_contact_seconds: float | None = None
    loss: Number = None
    paced: Paced | None = None
    measured_overhead: float | None = None
    measured_window_iterations: int | None = None
    budget: float | None = None
    interval: int | None = None
    policy: str | None = None
    exposure_iterations: int | None = None
    exposure_seconds: float | None = None
    last_durable: CheckpointRow | None = None
    desired: Desired = msgspec.field(default_factory=Desired)
    applied_version: int | None = None
    applied_iteration: int | None = None
    open_order: Order | None = None
    checkpoints_total: int = 0


class Edit(msgspec.Struct, kw_only=True):
    """One version of what is desired of a job, and from which iteration on it held."""

    version: int
    applied_iteration: int | None = None


class ServerError(Exception):
    """The server understood and said no; `str()` is its own sentence."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(body.get("message") or f"the server answered with HTTP status {status}")
        self.status = status
        self.code = str(body.get("error", ""))
        self.body = body


class UnreachableError(Exception):
    """Nobody answered, or somebody who is no Holdfast server, or it refused our token."""


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


class Client:
    """A conversation with one server.

    Args:
        server: its address, as in http://127.0.0.1:7117; ValueError for what is none.
        token: the shared secret, when the server asks for one.
        timeout_seconds: for each request.
    """

    def __init__(
        self, server: str = DEFAULT_SERVER, token: str | None = None, *, timeout_seconds: float = 10.0
    ) -> None:
        self.server = validate_server(server)
        headers = {"Accept": "application/json", "User-Agent": "holdfast-client"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._pool = urllib3.PoolManager(headers=headers, timeout=timeout_seconds, retries=False)

    def jobs(self) -> list[Job]:
        reply = self.get("/jobs")
        return _convert(reply["jobs"] if isinstance(reply, dict) else reply, list[Job])

    def job(self, job: str) -> Job:
        return _convert(self.get(_path(job)), Job)

    def checkpoints(self, job: str, *, limit: int = 50, before: str | None = None) -> list[CheckpointRow]:
        """The last taken first, in every state; `before` is the id that the page before ended with."""
        page = {"limit": limit} if before is None else {"limit": limit, "before": before}
        reply = self.get(_path(job, "checkpoints"), **page)
        return _convert(reply["checkpoints"] if isinstance(reply, dict) else reply, list[CheckpointRow])

    def oldest_restorable(self, job: str) -> CheckpointRow | None:
        """The one at the lowest iteration that a restore can go back to."""
        found: list[CheckpointRow] = []
        page = self.checkpoints(job, limit=PAGE)
        while page:
            found += [row for row in page if row.restorable]
            page = self.checkpoints(job, limit=PAGE, before=page[-1].id)
        return min(found, key=lambda row: row.iteration, default=None)

    def timeline(self, job: str, *, start: int | None = None, end: int | None = None, points: int = 1200) -> Any:
        """The timeline as the page reads it; its JSON is described at the server's /docs."""
        asked = {"from": start, "to": end, "points": points}
        return self.get(
            _path(job, "timeline"), **{key: value for key, value in asked.items() if value is not None}
        )

    def desired(self, job: str) -> Desired:
        reply = self.get(_path(job, "desired"))
        return Desired() if reply is None else _convert(reply, Desired)

    def applied_at(self, job: str, version: int) -> int | None:
        """The iteration from whose end on the job acts on a version of what is desired; None: not yet."""
        reply = self.get(_path(job, "edits"))
        edits = _convert(reply["edits"] if isinstance(reply, dict) else reply, list[Edit])
        return next((edit.applied_iteration for edit in edits if edit.version == version), None)

    def edit(self, job: str, **changes: float | int | str | bool | None) -> Desired:
        """Change budget, policy, every, paused or checkpoint_request; None takes an order back."""
        version = self.desired(job).version
        reply = self.send("PATCH", _path(job, "desired"), changes, {"If-Match": f'"{version}"'})
        return _convert(reply, Desired)

    def restore(self, job: str, iteration: int, *, key: str | None = None) -> Order:
        """Order a restore; the same key is the same order, however often it is sent."""
        body = {"iteration": iteration, "key": key or uuid.uuid4().hex}
        return _convert(self.send("POST", _path(job, "restores"), body), Order)

    def order(self, job: str, order: str) -> Order:
        return _convert(self.get(_path(job, "restores", order)), Order)

    def follow(
        self, order: Order, *, timeout_seconds: float = float("inf"), poll_seconds: float = 0.2
    ) -> Iterator[Order]:
        """The order each time that it has moved, up to the state that it ends in or the time is up."""
        deadline = time.monotonic() + timeout_seconds
        yield order
        while order.state in OPEN_ORDER_STATES and time.monotonic() < deadline:
            time.sleep(poll_seconds)
            newer = self.order(order.job, order.id)
            if newer.state != order.state:
                yield newer
            order = newer

    def get(self, path: str, **query: object) -> Any:
        return self.send("GET", path + (f"?{urlencode(query)}" if query else ""))

    def send(self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None) -> Any:
        """The decoded answer to one request under /api/v1.

        Raises:
            ServerError: the server said no.
            UnreachableError: there is no use in asking it anything else either.
        """
        url = f"{self.server}/api/v1{path}"
        sent = {**self._pool.headers, **(headers or {})}
        if body is not None:
            sent["Content-Type"] = "application/json"
        try:
            reply = self._pool.request(
                method, url, body=None if body is None else msgspec.json.encode(body), headers=sent
            )
        except urllib3.exceptions.HTTPError as error:
            reason = f"no Holdfast server answers at {self.server} ({_reason(error)})"
            raise UnreachableError(f"{reason}: start one with `holdfast serve` or give --server") from None
        return self._answer(reply)

    def _answer(self, reply: urllib3.BaseHTTPResponse) -> Any:
        if reply.status == 204:
            return None
        try:
            answer = msgspec.json.decode(reply.data)
        except msgspec.DecodeError:
            answer = None
        if reply.status in (401, 403):
            said = answer.get("message") if isinstance(answer, dict) else None
            refused = f"{self.server} refused: {said}" if said else f"{self.server} asks for its token"
            raise UnreachableError(f"{refused}; set HOLDFAST_TOKEN or give --token")
        if not isinstance(answer, dict | list):
            reason = f"HTTP status {reply.status} and no JSON"
            raise UnreachableError(f"what answers at {self.server} is no Holdfast server ({reason})")
        if reply.status >= 400:
            raise ServerError(reply.status, answer if isinstance(answer, dict) else {})
        return answer


def _path(job: str, *rest: str) -> str:
    return "/".join(["/jobs", *(quote(part, safe="") for part in (job, *rest))])


def _convert(reply: Any, kind: type[T]) -> T:
    try:
        return msgspec.convert(reply, kind, strict=False)
    except msgspec.ValidationError as error:
        raise UnreachableError(f"the server speaks another version of Holdfast's language: {error}") from None


def _reason(error: urllib3.exceptions.HTTPError) -> str:
    return str(error).rpartition(": ")[2] or type(error).__name__
