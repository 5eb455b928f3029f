"""Real S3 servers for tests, and a proxy that injects faults in front of them."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO
from urllib.parse import unquote

import pytest

KEY, SECRET = "AKIAHOLDFAST", "not-much-of-a-secret"
BUCKET = "bucket"
SCRIPTS = Path(sys.executable).parent
_READY = re.compile(r"(?:running on|listens on|server on \[)\s*(http://[\d.]+:\d+)", re.IGNORECASE)


class ObjectServer:
    """A server process; it is there when it has said so."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.address, self.said = directory, "", ""

    def start(self) -> None:
        """On the same port as before, if it ran before."""
        port = self.address.rpartition(":")[2] or "0"
        self._process = subprocess.Popen(
            self.command(port), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.address, settled = "", threading.Event()
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout, settled))
        self._reader.start()
        settled.wait()
        assert self.address, f"{self.command(port)} did not start: {self.said}"

    def kill(self) -> None:
        """May be done twice."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join()

    def _read(self, output: IO[str], settled: threading.Event) -> None:
        with output:
            for line in output:
                self.said += line
                if found := re.search(
                    r"(?:running on|listens on|server on \[)\s*(http://[\d.]+:\d+)", line, re.IGNORECASE
                ):
                    self.address = found[1]
                    settled.set()
        settled.set()


class Rclone(ObjectServer):
    """Checks signatures, keeps objects as files; ignores If-None-Match, answers 200 to ranges."""

    def command(self, port: str) -> list[str]:
        (self.directory / BUCKET).mkdir(parents=True, exist_ok=True)
        return [
            str(SCRIPTS / "rclone"), "serve", "s3", str(self.directory), "--auth-key", f"{KEY},{SECRET}",
            "--addr", f"127.0.0.1:{port}", "--config", os.devnull,
        ]  # fmt: skip


class Moto(ObjectServer):
    """Enforces If-None-Match, answers 206, knows its unfinished uploads; checks no signature."""

    def command(self, port: str) -> list[str]:
        return [str(SCRIPTS / "moto_server"), "-H", "127.0.0.1", "-p", port]

    def start(self) -> None:
        super().start()
        urllib.request.urlopen(urllib.request.Request(f"{self.address}/{BUCKET}", method="PUT")).close()

    def unfinished_uploads(self) -> list[str]:
        with urllib.request.urlopen(f"{self.address}/{BUCKET}?uploads") as answer:
            return re.findall(r"<Key>(.*?)</Key>", answer.read().decode())


@contextlib.contextmanager
def running(server: ObjectServer) -> Iterator[ObjectServer]:
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rclone]:
    with running(Rclone(tmp_path_factory.mktemp("rclone"))) as server:
        yield server


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Moto]:
    with running(Moto(tmp_path_factory.mktemp("moto"))) as server:
        yield server


def variables(address: str) -> dict[str, str]:
    """What a process needs in its environment to use a server of ours."""
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }


def use(monkeypatch: pytest.MonkeyPatch, address: str) -> str:
    """The URL of an empty store at a server of ours."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name, value in variables(address).items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}/checkpoints"


@dataclass
class ProxiedRequest:
    """One request, as a rule sees it. What a rule does not change goes through."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    answer: tuple[int, str] | None = None
    """(status, code) to refuse it with, instead of passing it on."""
    cut: bool = False
    """Close the connection instead of answering; with `answer` None, after the server has acted."""
    unheard: bool = False
    """With `cut`: before the server hears of it."""
    cut_at: int | None = None
    """Close it after so many bytes of the answer's body."""

    @property
    def name(self) -> str:
        """The object's, without the bucket and the store's prefix."""
        return unquote(self.path.partition("?")[0]).partition("/checkpoints/")[2]


Rule = Callable[[ProxiedRequest], None]


@dataclass
class S3FaultProxy:
    """Passes requests on to a server; `rules` are shown each before it goes, on the thread that serves it."""

    target: str
    rules: list[Rule] = field(default_factory=list)
    requests: list[ProxiedRequest] = field(default_factory=list)
    address: str = ""

    def __enter__(self) -> S3FaultProxy:
        proxy = self

        class ProxyHandler(_S3ProxyHandler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), ProxyHandler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def seen(self, method: str, name: str) -> list[ProxiedRequest]:
        return [r for r in self.requests if r.method == method and re.search(name, r.path)]


class _S3ProxyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: S3FaultProxy

    def log_message(self, *_: object) -> None: ...

    def serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = ProxiedRequest(self.command, self.path, dict(self.headers), body)
        self.owner.requests.append(request)
        for rule in list(self.owner.rules):
            rule(request)
        if request.unheard:
            self.close_connection = True
        elif request.answer is not None:
            self._refuse(*request.answer)
        else:
            self._pass_on(request)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = serve  # noqa: N815

    def _refuse(self, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def _pass_on(self, request: ProxiedRequest) -> None:
        upstream = http.client.HTTPConnection(self.owner.target.removeprefix("http://"))
        try:
            # as it came, Host included: that is signed
            upstream.putrequest(request.method, request.path, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers.items():
                upstream.putheader(name, value)
            upstream.endheaders(request.body)
            answer = upstream.getresponse()
            body = answer.read()
        except OSError:
            self.close_connection = True  # as if the server itself had gone
            return
        finally:
            upstream.close()
        if request.cut:
            self.close_connection = True
            return
        self._answer(answer, body, request.cut_at)

    def _answer(self, answer: http.client.HTTPResponse, body: bytes, cut_at: int | None) -> None:
        self.send_response_only(answer.status, answer.reason)
        kept = [(k, v) for k, v in answer.getheaders() if k.lower() not in ("transfer-encoding", "content-length")]
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(body))
        for name, value in [*kept, ("Content-Length", length or "0")]:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[:cut_at])
        if cut_at is not None:
            self.close_connection = True
