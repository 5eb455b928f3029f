"""A server behind a real nginx, set up as docs/deploying.md says: TLS, accounts, an agent with a key, streams."""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from holdfast_server.http.auth_middleware import COOKIE, HOST_PREFIX
from tests.support.fork_server import PATIENCE_SECONDS
from tests.support.postgres import ON_SQLITE

NAME = "holdfast.example"
ADDRESS = f"https://{NAME}"
FORM = {"Origin": ADDRESS, "Sec-Fetch-Site": "same-origin"}
PASSWORD = "a sentence of some words"
JOBS = "/api/v1/jobs"
GUIDE = Path(__file__).resolve().parents[3] / "docs" / "deploying.md"
WITHOUT_HEADERS = """
server {
    listen 443 ssl;
    ssl_certificate     /etc/ssl/holdfast.example.crt;
    ssl_certificate_key /etc/ssl/holdfast.example.key;
    location / { proxy_pass http://127.0.0.1:7117; proxy_http_version 1.0; }
}
"""
"""The shortest configuration, as nginx before 1.29.7 reads it: only HTTP/1.0 shows that there is a proxy."""
MAIN = """
daemon off;
{user}
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    scgi_temp_path {folder}/scgi;
    uwsgi_temp_path {folder}/uwsgi;
{server}
}}
"""
pytestmark = [pytest.mark.processes, ON_SQLITE]


@dataclass(frozen=True)
class NginxProxy:
    port: int
    certificate: Path

    def client(self) -> httpx2.Client:
        """As if `holdfast.example` led to the proxy."""
        trusted = ssl.create_default_context(cafile=str(self.certificate))
        client = httpx2.Client(
            base_url=f"https://127.0.0.1:{self.port}",
            verify=trusted,
            timeout=PATIENCE_SECONDS,
            headers={"Host": NAME},
        )
        client.event_hooks["request"] = [lambda request: request.extensions.update(sni_hostname=NAME)]
        return client


@pytest.fixture
def proxied(fast_path: Path) -> Iterator[Callable[[str, str], NginxProxy]]:
    """Starts nginx with a `server` block, in front of the server at a URL."""
    nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if nginx is None:
        pytest.skip("NO NGINX HERE: a server behind a proxy is not tried (Debian: apt-get install nginx-light)")
    if shutil.which("openssl") is None:
        pytest.skip("NO OPENSSL HERE: a server behind a proxy is not tried (Debian: apt-get install openssl)")
    certificate, key = fast_path / "holdfast.crt", fast_path / "holdfast.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-days", "2", "-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}",
         "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    running: list[subprocess.Popen[bytes]] = []

    def start(block: str, url: str) -> NginxProxy:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        for written, here in (
            ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
            ("http://127.0.0.1:7117", url),
            ("/etc/ssl/holdfast.example.crt", str(certificate)),
            ("/etc/ssl/holdfast.example.key", str(key)),
        ):
            assert block.count(written) == 1, written
            block = block.replace(written, here)
        settings = fast_path / "nginx.conf"
        user = "user root;" if os.getuid() == 0 else ""
        settings.write_text(MAIN.format(folder=fast_path, server=block, user=user))
        running.append(subprocess.Popen([nginx, "-p", fast_path, "-c", settings, "-e", fast_path / "error.log"]))
        while True:
            assert running[-1].poll() is None, (fast_path / "error.log").read_text()
            try:
                socket.create_connection(("127.0.0.1", port)).close()
            except ConnectionRefusedError:
                continue
            return NginxProxy(port, certificate)

    yield start
    for process in running:
        process.terminate()
        process.wait()


@pytest.fixture
def documented() -> str:
    """The `server` block of the guide."""
    (block,) = re.findall(r"^ *```nginx\n(.*?)^ *```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    return str(block)


def test_the_documented_set_up_asks_everybody_who_they_are(serve, proxied, documented, fresh_agent):
    server = serve("--address", ADDRESS)
    proxy = proxied(documented, server.url)
    link = re.search(rf"at {ADDRESS}/setup#(hfl_\w+)", server.output)[1]
    with proxy.client() as ada, proxy.client() as agent, proxy.client() as outsider:
        assert [outsider.get(path).status_code for path in (JOBS, "/metrics", "/docs")] == [401, 401, 401]
        assert outsider.patch(f"{JOBS}/char-gpt/desired", json={"paused": True}).status_code == 401
        assert (
            outsider.post("/setup", data={"code": link}, headers={"Origin": "https://evil.example"}).status_code
            == 403
        )

        made = ada.post("/setup", data={"code": link, "name": "ada", "password": PASSWORD}, headers=FORM)
        assert (made.status_code, made.headers["location"]) == (303, "/")
        assert made.headers["strict-transport-security"].startswith("max-age=")
        assert ada.cookies.get(f"{HOST_PREFIX}{COOKIE}") is not None
        assert COOKIE not in ada.cookies
        ada.post("/logout", headers=FORM)
        assert ada.get(JOBS).status_code == 401
        signed_in = ada.post("/login", data={"name": "ada", "password": PASSWORD}, headers=FORM)
        assert signed_in.status_code == 303
        assert "127.0.0.1" in ada.get("/settings").text

        wish = {"name": "cluster agents", "scopes": ["report"], "project": "default"}
        agent.headers["Authorization"] = (
            f"Bearer {ada.post('/api/v1/tokens', json=wish, headers=FORM).json()['token']}"
        )
        reporter = fresh_agent(agent)
        reporter.start()
        reporter.train(3)
        assert agent.get(JOBS).status_code == 403, "a key of an agent only reports"
        assert [job["job"] for job in ada.get(JOBS).json()["jobs"]] == ["char-gpt"]

        with ada.stream("GET", f"{JOBS}/char-gpt/stream") as stream:
            data = (line for line in stream.iter_lines() if line.startswith("data: "))
            assert '"iteration":3' in next(data)
            reporter.train(4)
            assert any('"iteration":7' in line for line in data), "ticks pass while the stream is open"


def test_a_batch_as_large_as_the_server_takes_passes(serve, proxied, documented):
    server = serve("--address", ADDRESS, HOLDFAST_TOKEN="a-shared-secret-of-some-length")
    with proxied(documented, server.url).client() as client:
        client.headers["Authorization"] = "Bearer a-shared-secret-of-some-length"
        reply = client.post(
            "/api/v1/ingest", content=b"\0" * (8 << 20), headers={"Content-Type": "application/msgpack"}
        )
        assert (reply.status_code, reply.json()["error"]) == (422, "invalid_batch"), (
            "it is the server that refuses"
        )


@pytest.mark.parametrize("kind", ["as documented", "without headers"])
def test_a_server_without_authentication_serves_nothing_through_a_proxy(serve, proxied, documented, kind):
    server = serve()
    block = documented if kind == "as documented" else WITHOUT_HEADERS
    with proxied(block, server.url).client() as outsider, server.client() as here:
        for path in ("/", JOBS, "/metrics", "/login", "/static/app.css"):
            reply = outsider.get(path)
            assert (reply.status_code, reply.json()["error"]) == (403, "behind_a_proxy"), path
            assert "--address" in reply.json()["message"]
        health = outsider.get("/healthz").status_code
        assert health == (421 if kind == "as documented" else 200), "a health check, but under no other name"
        assert outsider.post("/api/v1/ingest", content=b"").status_code == 403
        assert outsider.patch(f"{JOBS}/x/desired", json={"paused": True}, headers=FORM).status_code == 403
        assert here.get(JOBS).status_code == 200, "and its own machine everything"
