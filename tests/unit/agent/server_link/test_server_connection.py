"""The link, against a real HTTP server in this process that behaves, or misbehaves, as each test asks."""

from __future__ import annotations

import contextlib
import logging
import queue
import re
import socket
import ssl
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from holdfast.protocol.wire import Ack, Batch, Desired, Notice, Samples, StallKind
from holdfast.server_link import event_queue, http_client
from holdfast.server_link.connection import ServerConnection
from holdfast.telemetry.iteration_metrics import Iteration
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.foreign_servers import PAGE, SILENT, SSH, WEB, other_server


class IngestServer:
    """Keeps what it was sent; `answer` may stand in for its usual way of answering an ingest."""

    def __init__(self, port: int = 0) -> None:
        self.changed = threading.Condition()
        self.batches: list[Batch] = []
        self.attempts = 0
        self.agents_asked = 0
        self.tokens: set[str | None] = set()
        self.desired = Desired()
        self.acked_version: int | None = None
        self.poll_open = True
        self.answer: Callable[[BaseHTTPRequestHandler, Batch], bool] | None = None
        self.answer_poll: Callable[[BaseHTTPRequestHandler], bool] | None = None
        self.closing = False
        self._http = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._http.daemon_threads = True
        self.connections: set[socket.socket] = set()
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE_SECONDS), "the server waited in vain"

    def want(self, desired: Desired) -> None:
        with self.changed:
            self.desired = desired
            self.changed.notify_all()

    @property
    def messages(self) -> list[str]:
        return [event.message for batch in self.batches for event in batch.events if isinstance(event, Notice)]

    @property
    def in_order(self) -> bool:
        """Nothing of a lane is missing, and nothing of it came twice."""
        for lane in ("control", "samples"):
            sequences = [batch.sequence for batch in self.batches if batch.lane == lane]
            if sequences != list(range(1, len(sequences) + 1)):
                return False
        return True

    @property
    def iterations(self) -> list[int]:
        return [iteration for batch in self.batches if batch.samples for iteration in batch.samples.iteration]


def _unpack(samples: Samples | None) -> None:
    """Columns came as bytes; tests read them as lists."""
    if samples is None:
        return
    for name in ("iteration", "lineage"):
        setattr(samples, name, array("q", getattr(samples, name)).tolist())
    for name in ("at", "seconds", "stall_seconds", "data_seconds"):
        setattr(samples, name, array("d", getattr(samples, name)).tolist())
    samples.metrics = {name: array("d", column).tolist() for name, column in samples.metrics.items()}


def _handler(server: IngestServer) -> type[BaseHTTPRequestHandler]:
    class IngestHandler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            server.connections.add(self.connection)

        def finish(self) -> None:
            server.connections.discard(self.connection)
            with contextlib.suppress(OSError):
                super().finish()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

        def do_POST(self) -> None:
            try:
                batch = msgspec.msgpack.decode(self.rfile.read(int(self.headers["Content-Length"])), type=Batch)
            except msgspec.DecodeError:
                self.reply(400, b"not a batch")
                return
            _unpack(batch.samples)
            with server.changed:
                server.attempts += 1
                server.tokens.add(self.headers.get("Authorization"))
                server.changed.notify_all()
                answer = server.answer
            if answer is not None and answer(self, batch):
                return
            with server.changed:
                server.batches.append(batch)
                version = server.desired.version if server.acked_version is None else server.acked_version
                server.changed.notify_all()
            self.reply(200, msgspec.msgpack.encode(Ack(acked=batch.sequence, version=version)))

        def do_GET(self) -> None:
            if server.answer_poll is not None and server.answer_poll(self):
                return
            query = parse_qs(urlsplit(self.path).query)
            with server.changed:
                server.agents_asked += 1
                server.changed.notify_all()
                if "after" in query:
                    after, kept = int(query["after"][0]), query.get("alert_pins", [""])[0]

                    def is_newer() -> bool:
                        return server.desired.version > after or ",".join(server.desired.alert_pins) != kept

                    server.changed.wait_for(lambda: server.closing or (server.poll_open and is_newer()), 25)
                    if server.closing or not is_newer():
                        self.reply(204, b"")
                        return
                desired = server.desired
            self.reply(200, msgspec.json.encode(desired))

        def reply(self, status: int, body: bytes, **headers: str) -> None:
            try:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except OSError:
                pass

    return IngestHandler


def always(status: int, body: bytes = b"", **headers: str) -> Callable[[BaseHTTPRequestHandler, Batch], bool]:
    def answer(handler: BaseHTTPRequestHandler, batch: Batch) -> bool:
        handler.reply(status, body, **headers)  # type: ignore[attr-defined]
        return True

    return answer


@pytest.fixture
def server() -> Iterator[IngestServer]:
    server = IngestServer()
    yield server
    server.close()


@pytest.fixture
def links() -> Iterator[Callable[..., ServerConnection]]:
    made: list[ServerConnection] = []

    def make(server: IngestServer | str, **given: object) -> ServerConnection:
        arguments: dict[str, object] = {
            "server": server if isinstance(server, str) else server.url,
            "token": None,
            "job": "char-gpt",
            "uid": "a1",
            "attempt": 1,
            "rank": 0,
            "spool": None,
            "flush_seconds": 0.02,
        }
        link = ServerConnection(**{**arguments, **given})  # type: ignore[arg-type]
        made.append(link)
        return link

    yield make
    for link in made:
        link.close(2.0)


def notice(message: str, iteration: int = 0) -> Notice:
    return Notice(at=1.0, iteration=iteration, lineage=1, level="info", code="test", message=message)


def measured(iteration: int) -> Iteration:
    stalls: dict[StallKind, float] = {"snapshot_wait": 0.1, "data_fetch": 0.2}
    return Iteration(iteration, lineage=1, at=1.0, seconds=0.5, update_seconds=None, stalls=stalls)


def sample(link: ServerConnection, iteration: int, **metrics: float) -> None:
    link.sample(measured(iteration), metrics)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# Normal flow


def test_samples_and_events_arrive_once_and_in_order(
    server: IngestServer, links: Callable[..., ServerConnection]
) -> None:
    link = links(server, token="secret", attempt=7, rank=2)
    link.start()
    for iteration in range(1, 4501):
        sample(link, iteration, loss=iteration / 10)
    link.event(notice("one"))
    link.event(notice("two"))
    link.close()
    assert server.iterations == list(range(1, 4501))
    assert server.messages == ["one", "two"]
    assert server.in_order
    assert {(batch.job, batch.uid, batch.attempt, batch.rank) for batch in server.batches} == {
        ("char-gpt", "a1", 7, 2)
    }
    assert max(len(batch.samples.iteration) for batch in server.batches if batch.samples) <= 2000
    assert server.batches[-1].iteration == 4500
    assert server.tokens == {"Bearer secret"}


def test_what_is_measured_before_a_batch_is_sent_with_it(
    server: IngestServer, links: Callable[..., ServerConnection]
) -> None:
    threads: list[str] = []

    def measure() -> Notice | None:
        threads.append(threading.current_thread().name)
        return notice("measured") if len(threads) == 1 else None

    link = links(server, measures=[measure])
    link.start()
    eventually(lambda: server.messages == ["measured"])
    link.close()
    assert set(threads) == {"holdfast-send"}


def test_a_metric_that_some_iterations_lack_is_not_a_number_there(
    server: IngestServer, links: Callable[..., ServerConnection]
) -> None:
    link = links(server)
    sample(link, 1, loss=2.0)
    sample(link, 2, loss=float("nan"), accuracy=0.5)
    link.start()
    link.close()
    [samples] = [batch.samples for batch in server.batches if batch.samples]
    assert str(samples.metrics) == "{'loss': [2.0, nan], 'accuracy': [nan, 0.5]}"
    assert samples.stall_seconds == [0.1, 0.1]


def test_batches_without_content_say_that_the_job_is_alive(
    server: IngestServer, links: Callable[..., ServerConnection]
) -> None:
    links(server).start()
    server.wait(lambda: len(server.batches) >= 3)
    assert all(batch.samples is None and not batch.events for batch in server.batches)


def test_an_event_does_not_wait_for_the_next_flush(
    server: IngestServer, links: Callable[..., ServerConnection]
) -> None:
    link = links(server, flush_seconds=3600)
    link.start()
    link.event(notice("now"))
    server.wait(lambda: server.messages == ["now"])


def test_connections_are_kept_alive(server: IngestServer, links: Callable[..., ServerConnection]) -> None:
    links(server).start()
    server.wait(lambda: len(server.batches) >= 10)
    assert len(server.connections) == 2


# What is wanted


def test_the_desired_state_can_be_read_before_training_starts(server: IngestServer) -> None:
    server.want(Desired(version=4, budget=0.02))
    assert asked_once(server.url) == Desired(version=4, budget=0.02)


@pytest.mark.parametrize(
    "body",
    [
        b'{"version": -1}',
        b'{"version": 1%s}' % (b"0" * 300),
        b'{"checkpoint_request": 9007199254740993}',
        b'{"probe_request": -1}',
        b'{"restore": {"id": "o", "checkpoint": "000000000001-1", "fence": 1180591620717411303424}}',
        b'{"verify": [{"id": -1, "checkpoint": "000000000001-1"}]}',
        b'{"latest_attempt": 1%s}' % (b"0" * 9000),
        b'{"unknown": ' + b"[" * 200_000,
    ],
)
def test_an_answer_that_holds_what_none_can_hold_is_no_desired_state(server: IngestServer, body: bytes) -> None:
    server.answer_poll = lambda handler: handler.reply(200, body) or True  # type: ignore[attr-defined]
    with pytest.raises(http_client.RequestFailed, match="not a desired state"):
        asked_once(server.url)


def test_no_desired_state_without_a_server() -> None:
    with pytest.raises(http_client.RequestFailed, match="refused"):
        asked_once(f"http://127.0.0.1:{free_port()}")


def test_a_server_that_never_answers_holds_up_a_request_no_longer_than_allowed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hole:
        begun = monotonic()
        with pytest.raises(http_client.RequestFailed, match="timed out"):
            asked_once(f"http://127.0.0.1:{hole.getsockname()[1]}", limit_seconds=0.2)
        assert monotonic() - begun < PATIENCE_SECONDS / 2


@pytest.fixture
def stuck_resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Name resolution that answers only after the test; the event says that it was asked."""
    asked, over = threading.Event(), threading.Event()

    def stuck(*_: object, **__: object) -> None:
        asked.set()
        over.wait(PATIENCE_SECONDS)
        raise socket.gaierror("stuck")

    monkeypatch.setattr(socket, "getaddrinfo", stuck)
    yield asked
    over.set()


def test_a_resolver_that_never_answers_holds_up_a_request_no_longer_than_allowed(
    stuck_resolver: threading.Event,
) -> None:
    begun = monotonic()
    with pytest.raises(http_client.RequestFailed, match="timed out"):
        asked_once("http://holdfast.invalid:7117", limit_seconds=0.2)
    assert monotonic() - begun < PATIENCE_SECONDS / 2


def test_closing_while_a_name_is_resolved_keeps_what_is_left_on_disk(
    stuck_resolver: threading.Event, links: Callable[..., ServerConnection], tmp_path: Path
) -> None:
    link = links("http://holdfast.invalid:7117", spool=tmp_path)
    link.start()
    assert stuck_resolver.wait(PATIENCE_SECONDS)
    link.event(notice("kept"))
    link.close(2.0)
    assert "kept" in spooled_text(tmp_path)


def test_a_request_on_a_kept_connection_has_its_own_time_to_be_sent(
    server: IngestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket still has the timeout of the answer before it."""
    client = http_client.AgentClient(server.url, None)
    client.desired("gpt", limit_seconds=0.5)
    timeouts = []
    sendall = socket.socket.sendall

    def noted(connection: socket.socket, *arguments: Any) -> None:
        timeouts.append(connection.gettimeout())
        sendall(connection, *arguments)

    monkeypatch.setattr(socket.socket, "sendall", noted)
    client.desired("gpt", limit_seconds=60.0)
    client.close()
    assert timeouts[0] == 60.0


def asked_once(address: str, limit_seconds: float = 60.0) -> Desired | None:
    client = http_client.AgentClient(address, None)
    try:
        return client.desired("char-gpt", limit_seconds=limit_seconds)
    finally:
        client.close()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (SILENT, "it closed the connection without a response; this is not a Holdfast server"),
        (SSH, "it does not speak HTTP; this is not a Holdfast server"),
        (WEB, "HTTP 404: this is not a Holdfast server"),
        (PAGE, "no Holdfast API here: give only the server's address, such as http://127.0.0.1:7117"),
    ],
)
def test_what_is_no_holdfast_server_is_named_in_one_plain_line(
    links: Callable[..., ServerConnection], caplog: pytest.LogCaptureFixture, answer: bytes, said: str
) -> None:
    with other_server(answer) as address:
        links(address).start()
        eventually(lambda: caplog.messages, "a log message")
    assert caplog.messages == [
        f"{address} does not accept reports ({said}). Training continues; reports are stored and sent later."
    ]


def test_a_change_is_delivered_by_the_long_poll(
    server: IngestServer, links: Callable[..., ServerConnection]
) -> None:
    seen: list[Desired] = []
    arrived = threading.Event()

    def on_desired(desired: Desired) -> None:
        seen.append(desired)
        if desired.version == 2:
            arrived.set()

    link = links(server, on_desired=on_desired, flush_seconds=3600)
    link.start()
    server.wait(lambda: server.agents_asked >= 2)
    server.want(Desired(version=1))
    server.wait(lambda: server.agents_asked >= 3)
    server.want(Desired(version=2, budget=0.01))
    assert arrived.wait(PATIENCE_SECONDS)
    assert seen == [Desired(), Desired(version=1), Desired(version=2, budget=0.01)]


def test_what_alerts_keep_is_delivered_by_the_long_poll_without_a_new_version(
    server: IngestServer, links: Callable[..., ServerConnection]
) -> None:
    seen: queue.SimpleQueue[Desired] = queue.SimpleQueue()
    link = links(server, on_desired=seen.put, flush_seconds=3600)
    link.start()
    kept = [Desired(version=0), *(Desired(pins=pins, alert_pins=pins) for pins in (("a", "b"), ("c",), ()))]
    for number, desired in enumerate(kept):
        server.wait(lambda asked=number + 1: server.agents_asked >= asked)
        server.want(desired)
        assert seen.get(timeout=PATIENCE_SECONDS) == desired


def test_an_acknowledgement_tells_of_a_change_when_long_polls_are_cut(
    server: IngestServer, links: Callable[..., ServerConnection]
) -> None:
    arrived = threading.Event()
    link = links(server, on_desired=lambda desired: desired.version == 9 and arrived.set())
    link.start()
    server.wait(lambda: server.agents_asked >= 2)
    server.poll_open = False
    server.want(Desired(version=9))
    assert arrived.wait(PATIENCE_SECONDS)


def test_a_server_whose_versions_begin_anew_is_obeyed(
    server: IngestServer, links: Callable[..., ServerConnection]
) -> None:
    server.want(Desired(version=12, paused=True))
    seen: list[Desired] = []
    reset = threading.Event()

    def on_desired(desired: Desired) -> None:
        seen.append(desired)
        if desired.version == 1:
            reset.set()

    link = links(server, on_desired=on_desired)
    link.start()
    server.wait(lambda: server.agents_asked >= 2)
    server.want(Desired(version=1, budget=0.5))
    assert reset.wait(PATIENCE_SECONDS)
    assert seen == [Desired(version=12, paused=True), Desired(version=1, budget=0.5)]


def test_a_callback_that_fails_does_not_end_the_conversation(
    server: IngestServer, links: Callable[..., ServerConnection]
) -> None:
    seen: queue.SimpleQueue[int] = queue.SimpleQueue()

    def on_desired(desired: Desired) -> None:
        seen.put(desired.version)
        raise RuntimeError("not today")

    link = links(server, on_desired=on_desired)
    link.start()
    server.wait(lambda: server.agents_asked >= 2)
    server.want(Desired(version=3))
    count = len(server.batches)
    server.wait(lambda: len(server.batches) > count + 2)
    assert [seen.get(timeout=PATIENCE_SECONDS) for _ in range(2)] == [0, 3]


def test_a_poll_that_is_answered_at_once_without_news_does_not_spin(
    server: IngestServer, links: Callable[..., ServerConnection]
) -> None:
    polls: list[str] = []

    def empty(handler: BaseHTTPRequestHandler) -> bool:
        if "after" not in handler.path:
            return False
        polls.append(handler.path)
        handler.reply(204, b"")  # type: ignore[attr-defined]
        return True

    server.answer_poll = empty
    links(server).start()
    server.wait(lambda: len(server.batches) >= 30)
    assert len(polls) <= 3


# Servers that misbehave


def nonsense(handler: BaseHTTPRequestHandler, batch: Batch) -> bool:
    handler.wfile.write(b"\x00\xff not http at all\r\n\r\n")
    handler.close_connection = True
    return True


def endless(handler: BaseHTTPRequestHandler, batch: Batch) -> bool:
    handler.send_response(200)
    handler.send_header("Content-Length", str(10**12))
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(b"x" * 65536)
    except OSError:
        handler.close_connection = True
    return True


MISBEHAVIOUR = {
    "500": always(500, b"oops"),
    "502 html": always(502, b"<html>bad gateway</html>"),
    "html with 200": always(200, b"<html>welcome to the hotel</html>"),
    "json with 200": always(200, b'{"acked": "yes"}'),
    "another acknowledgement": always(200, msgspec.msgpack.encode(Ack(acked=10**6, version=0))),
    "empty 200": always(200),
    "redirect loop": always(302, b"", Location="/api/v1/ingest"),
    "404": always(404, b"no such page"),
    "429": always(429, b"", Retry_After="0"),
    "not http": nonsense,
    "endless body": endless,
}


@pytest.mark.parametrize("kind", MISBEHAVIOUR)
def test_what_a_misbehaving_server_did_not_take_it_gets_once_it_behaves(
    kind: str, server: IngestServer, links: Callable[..., ServerConnection], tmp_path: Path
) -> None:
    server.answer = MISBEHAVIOUR[kind]
    link = links(server, spool=tmp_path / "spool")
    link.start()
    link.event(notice("first"))
    sample(link, 1)
    server.wait(lambda: server.attempts >= 2)
    link.event(notice("second"))
    server.wait(lambda: server.attempts >= 3)
    server.answer = None
    server.wait(lambda: len(server.messages) >= 2)
    link.close()
    assert server.messages == ["first", "second"]
    assert server.iterations == [1]
    assert list(tmp_path.glob("spool/*")) == []


def test_redirects_are_not_followed(server: IngestServer, links: Callable[..., ServerConnection]) -> None:
    elsewhere = IngestServer()
    try:
        server.answer = always(307, b"", Location=elsewhere.url + "/api/v1/ingest")
        links(server).start()
        server.wait(lambda: server.attempts >= 3)
        assert elsewhere.attempts == 0
    finally:
        elsewhere.close()


def test_retry_after_is_honoured(server: IngestServer, links: Callable[..., ServerConnection]) -> None:
    times: list[float] = []

    def busy(handler: BaseHTTPRequestHandler, batch: Batch) -> bool:
        times.append(monotonic())
        if len(times) > 1:
            return False
        handler.reply(429, b"", Retry_After="1")  # type: ignore[attr-defined]
        return True

    server.answer = busy
    links(server).start()
    server.wait(lambda: len(server.batches) >= 1)
    assert times[1] - times[0] >= 1.0


@pytest.mark.parametrize("status", [400, 413, 415, 422])
def test_a_refused_batch_is_dropped_and_life_goes_on(
    status: int,
    server: IngestServer,
    links: Callable[..., ServerConnection],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def picky(handler: BaseHTTPRequestHandler, batch: Batch) -> bool:
        if not any("poison" in event.message for event in batch.events if isinstance(event, Notice)):
            return False
        handler.reply(status, b"no")  # type: ignore[attr-defined]
        return True

    server.answer = picky
    link = links(server, spool=tmp_path)
    link.start()
    link.event(notice("poison"))
    server.wait(lambda: server.attempts > len(server.batches))
    link.event(notice("good"))
    server.wait(lambda: server.messages == ["good"])
    link.event(notice("more poison"))
    link.close()
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_token_is_told_once_and_not_tried_at_speed(
    server: IngestServer, links: Callable[..., ServerConnection], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    server.answer = always(401, b"")
    link = links(server, spool=tmp_path)
    link.start()
    server.wait(lambda: server.attempts >= 1)
    link.event(notice("kept"))
    await_spooled(tmp_path, "kept")
    assert server.attempts == 1
    [warning] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "HOLDFAST_TOKEN" in warning


def test_a_job_of_another_project_is_told_as_what_it_is(
    server: IngestServer, links: Callable[..., ServerConnection], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    server.answer = always(404, b'{"error": "unknown_job", "message": "no reports under this name"}')
    link = links(server, spool=tmp_path)
    link.start()
    server.wait(lambda: server.attempts >= 1)
    link.event(notice("kept"))
    await_spooled(tmp_path, "kept")
    [warning] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "belongs to another project" in warning
    assert "rename this job" in warning


def test_loss_and_return_of_the_server_are_one_line_each(
    links: Callable[..., ServerConnection], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    server = IngestServer()
    port = server.port
    link = links(server)
    link.start()
    server.wait(lambda: len(server.batches) >= 1)
    server.answer = always(503)
    attempts = server.attempts
    server.wait(lambda: server.attempts >= attempts + 4)
    server.answer = None
    count = len(server.batches)
    server.wait(lambda: len(server.batches) > count)
    link.close()
    server.close()
    levels = [record.levelname for record in caplog.records if record.name == "holdfast"]
    assert levels == ["WARNING", "INFO"]
    assert str(port) in caplog.records[0].getMessage()


def test_a_server_that_closes_a_connection_after_it_answered_is_one_of_holdfast(
    server: IngestServer, links: Callable[..., ServerConnection], caplog: pytest.LogCaptureFixture
) -> None:
    def hang_up(handler: BaseHTTPRequestHandler, batch: Batch) -> bool:
        handler.close_connection = True
        return True

    link = links(server)
    link.start()
    server.wait(lambda: len(server.batches) >= 1)
    server.answer = hang_up
    eventually(lambda: caplog.messages, "a log message")
    assert "does not accept reports (it closed the connection without a response). Training" in caplog.text


def test_a_server_that_drips_its_answer_is_given_up(
    server: IngestServer, links: Callable[..., ServerConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.server_link.batch_sender.REQUEST_SECONDS", 0.3)

    def drip(handler: BaseHTTPRequestHandler, batch: Batch) -> bool:
        if server.attempts > 1:
            return False
        handler.close_connection = True
        try:
            while not server.closing:
                handler.wfile.write(b"H")
                threading.Event().wait(0.02)
        except OSError:
            pass
        return True

    server.answer = drip
    link = links(server)
    link.event(notice("through"))
    link.start()
    server.wait(lambda: server.messages == ["through"])


# No server


def test_a_request_that_is_repeated_has_only_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now, given = [0.0], []
    monkeypatch.setattr(http_client, "monotonic", lambda: now[0])
    with other_server(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf") as address:
        client = http_client.HttpClient(address, None, "test")
        urlopen = client._pool.urlopen

        def slow(*arguments: Any, timeout: Any, **more: Any) -> Any:
            given.append(timeout.total)
            reply = urlopen(*arguments, timeout=timeout, **more)
            now[0] += 9.0
            return reply

        monkeypatch.setattr(client._pool, "urlopen", slow)
        with pytest.raises(http_client.RequestFailed):
            client.exchange("GET", "/", seconds=10.0, tries=2)
        client.close()
    assert given == [10.0, 1.0]


def test_what_was_kept_while_the_server_was_away_is_sent_once_and_in_order(
    links: Callable[..., ServerConnection], tmp_path: Path
) -> None:
    port = free_port()
    link = links(f"http://127.0.0.1:{port}", spool=tmp_path)
    link.start()
    for number in range(5):
        link.event(notice(f"event {number}"))
        sample(link, number + 1)
        await_spooled(tmp_path, f"event {number}")
    server = IngestServer(port)
    try:
        server.wait(lambda: len(server.messages) == 5 and len(server.iterations) == 5)
        link.close()
        assert server.messages == [f"event {number}" for number in range(5)]
        assert server.iterations == [1, 2, 3, 4, 5]
        assert server.in_order
        assert list(tmp_path.iterdir()) == []
    finally:
        server.close()


def test_the_next_attempt_sends_what_an_ended_one_left_under_its_old_keys(
    links: Callable[..., ServerConnection], tmp_path: Path
) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    for attempt, uid in ((9, "zz"), (10, "bb")):
        link = links(dead, spool=tmp_path, attempt=attempt, uid=uid)
        link.start()
        sample(link, attempt)
        link.event(notice(f"attempt {attempt}"))
        link.close()
    server = IngestServer()
    try:
        link = links(server, spool=tmp_path, attempt=11, uid="aa")
        link.start()
        link.event(notice("attempt 11"))
        server.wait(lambda: len(server.messages) == 3)
        link.close()
        assert server.messages == ["attempt 9", "attempt 10", "attempt 11"]
        assert server.iterations == [9, 10]
        assert [(batch.attempt, batch.uid) for batch in server.batches if batch.events] == [
            (9, "zz"),
            (10, "bb"),
            (11, "aa"),
        ]
        assert list(tmp_path.iterdir()) == []
    finally:
        server.close()


def test_what_is_spooled_survives_the_process(links: Callable[..., ServerConnection], tmp_path: Path) -> None:
    script = f"""
import os, pathlib, sys
from holdfast.server_link.connection import ServerConnection
from holdfast.protocol.wire import Notice
link = ServerConnection(server="http://127.0.0.1:{free_port()}", token=None, job="char-gpt", uid="dead",
                        attempt=1, rank=0,
            spool=pathlib.Path({str(tmp_path)!r}), flush_seconds=0.02)
link.start()
link.event(Notice(at=1.0, iteration=1, lineage=1, level="info", code="test", message="last words"))
sys.stdin.read()
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    try:
        await_spooled(tmp_path, "last words")
    finally:
        process.kill()
        process.communicate()
    server = IngestServer()
    try:
        links(server, spool=tmp_path, attempt=2, uid="next").start()
        server.wait(lambda: server.messages == ["last words"])
    finally:
        server.close()


def test_the_spool_stays_within_its_bound(
    links: Callable[..., ServerConnection], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.server_link.spool.LIMIT_BYTES", 20_000)
    link = links(f"http://127.0.0.1:{free_port()}", spool=tmp_path)
    link.start()
    for number in range(100):
        link.event(notice(f"{number} " + "x" * 1000))
        if number:
            eventually(lambda: any(tmp_path.iterdir()), "a spool file")
    link.close()
    assert 0 < sum(path.stat().st_size for path in tmp_path.iterdir()) <= 20_000


def test_a_spool_that_cannot_be_written_costs_a_warning_only(
    links: Callable[..., ServerConnection], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a directory")
    link = links(f"http://127.0.0.1:{free_port()}", spool=tmp_path / "file" / "spool")
    link.start()
    link.event(notice("lost"))
    link.close()
    assert any("Cannot store unsent reports" in record.getMessage() for record in caplog.records)


def test_a_damaged_spool_file_is_removed_when_the_server_refuses_it(
    server: IngestServer, links: Callable[..., ServerConnection], tmp_path: Path
) -> None:
    (tmp_path / "00000001.old.0.000000000001.2.batch").write_bytes(b"\xc1 rubbish")
    (tmp_path / "00000001.old.0.000000000002.2.batch.tmp").write_bytes(b"torn")
    (tmp_path / "what is this").write_text("left alone")
    link = links(server, spool=tmp_path, attempt=2)
    link.start()
    link.event(notice("good"))
    server.wait(lambda: server.messages == ["good"])
    link.close()
    assert [path.name for path in tmp_path.iterdir()] == ["what is this"]


def test_samples_are_thinned_and_counted_when_nobody_takes_them(
    server: IngestServer, links: Callable[..., ServerConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.server_link.event_queue.WAITING_SAMPLES", 1000)
    server.answer = always(503)
    link = links(server)
    link.start()
    server.wait(lambda: server.attempts >= 1)
    for iteration in range(1, 3001):
        sample(link, iteration)
    attempts = server.attempts
    server.wait(lambda: server.attempts >= attempts + 2)
    server.answer = None
    server.wait(lambda: 3000 in server.iterations)
    link.close()
    received = server.iterations
    assert len(received) <= 1000
    gaps = [gap for batch in server.batches for gap in batch.gaps]
    assert len(received) + sum(gap.dropped for gap in gaps) == 3000
    assert all(1 <= gap.first_iteration <= gap.last_iteration <= 2600 for gap in gaps)
    assert received == sorted(received)
    assert received[-400:] == list(range(2601, 3001))


@pytest.mark.parametrize("spooled", [True, False])
def test_closing_does_not_wait_for_a_server_that_never_answers(
    spooled: bool, links: Callable[..., ServerConnection], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=100) as hole:
        link = links(f"http://127.0.0.1:{hole.getsockname()[1]}", spool=tmp_path if spooled else None)
        link.start()
        link.event(notice("kept"))
        begun = monotonic()
        link.close(0.5)
        assert monotonic() - begun < PATIENCE_SECONDS / 2
    assert ("kept" in spooled_text(tmp_path)) == spooled


def test_closing_twice_or_before_the_start_does_nothing(
    server: IngestServer, links: Callable[..., ServerConnection]
) -> None:
    links(server).close()
    link = links(server)
    link.start()
    link.close()
    link.close()
    link.event(notice("too late"))
    assert "too late" not in server.messages


# Processes


def test_a_forked_child_sends_nothing(server: IngestServer, tmp_path: Path) -> None:
    script = f"""
import os, pathlib
from holdfast.server_link.connection import ServerConnection
from holdfast.protocol.wire import Notice
link = ServerConnection(server="{server.url}", token=None, job="char-gpt", uid="u", attempt=1, rank=0,
            spool=pathlib.Path({str(tmp_path)!r}), flush_seconds=0.02)
link.start()
def say(message):
    link.event(Notice(at=1.0, iteration=1, lineage=1, level="info", code="test", message=message))
say("parent before")
child = os.fork()
if child == 0:
    say("child")
    link.sample(None, {{}})
    link.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
say("parent after")
link.close()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True)
    assert server.messages == ["parent before", "parent after"]
    assert server.iterations == []
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_never_closes_its_link_ends_all_the_same(server: IngestServer) -> None:
    script = f"""
from holdfast.server_link.connection import ServerConnection
link = ServerConnection(server="{server.url}", token=None, job="char-gpt", uid="u", attempt=1, rank=0, spool=None)
link.start()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_closing_at_exit_delivers_the_last_words(server: IngestServer) -> None:
    script = f"""
import atexit
from holdfast.server_link.connection import ServerConnection
from holdfast.protocol.wire import Notice
link = ServerConnection(server="{server.url}", token=None, job="char-gpt", uid="u", attempt=1, rank=0, spool=None)
link.start()
atexit.register(link.close)
link.event(Notice(at=1.0, iteration=1, lineage=1, level="info", code="test", message="last words"))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert server.messages == ["last words"]


def test_the_training_process_keeps_its_own_random_state(server: IngestServer) -> None:
    script = f"""
import random
random.seed(1)
before = random.getstate()
from holdfast.server_link.connection import ServerConnection
link = ServerConnection(server="http://127.0.0.1:{free_port()}", token=None, job="j", uid="u", attempt=1, rank=0,
                        spool=None)
link.start()
link.close(1.0)
assert random.getstate() == before
"""
    subprocess.run([sys.executable, "-c", script], check=True)


# Odds


@pytest.mark.parametrize("address", ["ftp://host", "http://", "http://host:port", "//"])
def test_an_address_that_is_none_is_refused_by_name(address: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(address))):
        ServerConnection(server=address, token=None, job="j", uid="u", attempt=1, rank=0, spool=None)


def test_the_page_of_a_job_is_named_without_credentials() -> None:
    link = ServerConnection(
        server="user:secret@host:7117/base/", token=None, job="gpt", uid="u", attempt=1, rank=0, spool=None
    )
    assert link.page == "http://host:7117/base/jobs/gpt"


def spooled_text(directory: Path) -> str:
    text = ""
    for path in directory.glob("*.batch"):
        try:
            text += path.read_bytes().decode(errors="replace")
        except FileNotFoundError:
            continue
    return text


def await_spooled(directory: Path, words: str) -> None:
    eventually(lambda: words in spooled_text(directory), f"{words!r} in the spool")


def test_one_text_that_is_no_text_does_not_take_its_batch_along() -> None:
    notices = [
        Notice(at=0.0, iteration=1, lineage=1, level="info", code="x", message=message)
        for message in ("sound", "/mnt/\udcff")
    ]
    batch = Batch(
        job="j", uid="u", attempt=1, rank=0, sequence=1, sent_at=0.0, iteration=1, lineage=1, events=list(notices)
    )
    sent = msgspec.msgpack.decode(event_queue._encode(batch), type=Batch)
    assert sent.events == notices[:1]


def test_a_server_that_takes_no_samples_still_gets_what_happened(
    server: IngestServer, links: Callable[..., ServerConnection]
) -> None:
    def later(handler: BaseHTTPRequestHandler, batch: Batch) -> bool:
        return batch.lane != "control" and always(429, Retry_After="0.02")(handler, batch)

    server.answer = later
    link = links(server)
    link.start()
    for iteration in range(1, 51):
        sample(link, iteration)
    link.event(notice("one"))
    server.wait(lambda: server.messages == ["one"] and server.attempts >= 4)
    assert server.iterations == []
    server.answer = None
    server.wait(lambda: len(server.iterations) == 50)
    link.close()
    assert server.in_order


def test_samples_that_the_server_put_off_are_sent_once_more_at_the_end(
    server: IngestServer, links: Callable[..., ServerConnection]
) -> None:
    def later(handler: BaseHTTPRequestHandler, batch: Batch) -> bool:
        if batch.lane == "control":
            return False
        server.answer = None
        return always(429, Retry_After="600")(handler, batch)

    server.answer = later
    link = links(server)
    link.start()
    sample(link, 1)
    server.wait(lambda: server.answer is None)
    link.close()
    assert server.iterations == [1]


def test_requests_and_polls_are_made_by_two_threads_and_no_others(
    server: IngestServer, links: Callable[..., ServerConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        if thread.name.startswith("holdfast"):
            started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    links(server).start()
    server.wait(lambda: len(server.batches) >= 20)
    assert sorted(started) == ["holdfast-connect"] * 2 + ["holdfast-poll", "holdfast-send"]


def test_a_server_with_tls_is_verified_and_its_answers_are_limited_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = IngestServer()
    server._http.socket = context.wrap_socket(server._http.socket, server_side=True)
    client = http_client.AgentClient(server.url.replace("http", "https"), None)
    try:
        with pytest.raises(http_client.RequestFailed, match="CERTIFICATE_VERIFY_FAILED"):
            client.desired("gpt", after=None)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        server.want(Desired(version=3))
        assert client.desired("gpt", after=None) == Desired(version=3)
        monkeypatch.setattr(http_client, "REQUEST_SECONDS", 0.2)
        with pytest.raises(http_client.RequestFailed, match="timed out"):
            client.desired("gpt", after=3)
    finally:
        client.close()
        server.close()


@pytest.fixture
def silent_tls() -> Iterator[tuple[str, Callable[[], None]]]:
    """The address of a server that never answers a TLS handshake, and a function that waits for its beginning."""
    with socket.create_server(("127.0.0.1", 0)) as hole, contextlib.ExitStack() as opened:

        def handshake_begun() -> None:
            connection = opened.enter_context(hole.accept()[0])
            assert connection.recv(1) == b"\x16"

        yield f"https://127.0.0.1:{hole.getsockname()[1]}", handshake_begun


def test_a_tls_handshake_is_limited_as_connecting_is(
    silent_tls: tuple[str, Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, _ = silent_tls
    monkeypatch.setattr(http_client, "CONNECT_SECONDS", 0.2)
    with pytest.raises(http_client.RequestFailed, match="timed out"):
        http_client.HttpClient(address, None, "test").exchange("GET", "/", seconds=10 * PATIENCE_SECONDS)


def test_closing_ends_a_tls_handshake(
    silent_tls: tuple[str, Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, handshake_begun = silent_tls
    monkeypatch.setattr(http_client, "CONNECT_SECONDS", 10 * PATIENCE_SECONDS)
    client = http_client.HttpClient(address, None, "test")
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(client.exchange, "GET", "/", seconds=10 * PATIENCE_SECONDS)
        handshake_begun()
        client.shut()
        assert isinstance(request.exception(PATIENCE_SECONDS), http_client.RequestFailed)


def test_where_no_thread_can_be_started_a_connection_is_opened_without_one(
    server: IngestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "holdfast-connect":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    server.want(Desired(version=3))
    assert http_client.AgentClient(server.url, None).desired("gpt", after=None) == Desired(version=3)


def self_signed(directory: Path) -> tuple[Path, Path]:
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(private, hashes.SHA256())
    )
    key, certificate = directory / "key.pem", directory / "certificate.pem"
    key.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    return key, certificate
