"""Fixtures: the application, a fake agent, and a real browser."""

from __future__ import annotations

import os
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright
from starlette.testclient import TestClient

from holdfast_server.core.settings import ServerSettings
from holdfast_web import create_app
from tests.support import compiled_statements
from tests.support.clock import FakeClock
from tests.support.fake_agent import FakeAgent, over_client, over_http

compiled_statements.share()

NOW = 1_790_000_000.0
PATIENCE_MILLISECONDS = 120_000
"""Of a machine that is busy with other things; playwright's own five seconds are soon over there."""
expect.set_options(timeout=PATIENCE_MILLISECONDS)
CHROMIUM_ARGUMENTS = [
    "--no-sandbox", "--headless", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(NOW)


class PageClient(TestClient):
    """Collapses the white space of pages, as a browser does, so that tests do not depend on line breaks."""

    def request(self, *args: Any, **options: Any) -> Any:
        response = super().request(*args, **options)
        if response.headers.get("content-type", "").startswith("text/html"):
            flat = re.sub(rb"\s+", b" ", response.content)
            response._content = re.sub(rb"> <(/?(?:td|th|tr|svg|rect|path|circle))\b", rb"><\1", flat)
        return response


@pytest.fixture
def client(empty_database: str, clock: FakeClock) -> Iterator[TestClient]:
    """The application as a person without scripts meets it."""
    settings = ServerSettings(database=empty_database)
    with PageClient(
        create_app(settings, clock=clock),
        base_url="http://127.0.0.1:7117",
        headers={"Accept": "text/html"},
        follow_redirects=False,
    ) as client:
        yield client


@pytest.fixture
def agent(client: TestClient) -> FakeAgent:
    """Has trained 400 iterations, with a checkpoint every 40."""
    agent = FakeAgent(over_client(client), started_at=NOW - 120)
    agent.start()
    agent.train(15)
    agent.pace()
    agent.train(385)
    agent.send()
    return agent


@dataclass
class Served:
    url: str
    database: Path

    def agent(self, job: str, **fields: object) -> FakeAgent:
        return FakeAgent(over_http(self.url), job=job, **fields)  # type: ignore[arg-type]


def free_listener(port: int = 0) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


@contextmanager
def serving(settings: ServerSettings) -> Iterator[Served]:
    """Run the application on a port of its own."""
    listener = free_listener()
    port = listener.getsockname()[1]
    config = uvicorn.Config(
        create_app(replace(settings, port=port)), log_level="warning", timeout_graceful_shutdown=2
    )
    server = uvicorn.Server(config)
    # early connections wait in the queue of the listener
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="server")
    thread.start()
    try:
        yield Served(f"http://127.0.0.1:{port}", Path(settings.database))
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(ServerSettings(database=str(tmp_path_factory.mktemp("server") / "holdfast.db"))) as served:
        yield served


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """Debian's Chromium; without one the test is skipped, or fails where HOLDFAST_REQUIRE_BROWSER=1."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        missing = "no chromium on this machine: apt-get install chromium"
        if os.environ.get("HOLDFAST_REQUIRE_BROWSER") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM_ARGUMENTS)
        yield browser
        browser.close()


Open = Callable[..., Page]
REFUSALS = ("status of 404", "status of 409", "status of 422")
"""What a browser itself notes of an answer that the page then shows."""


@pytest.fixture
def open_page(chromium: Browser, served: Served) -> Iterator[Open]:
    """Opens pages, and fails a test in which one logged an error, of its content security policy for instance."""
    complaints: list[str] = []
    contexts = []

    def heard(message: ConsoleMessage, expected: tuple[str, ...]) -> None:
        if message.type in ("error", "warning") and not any(known in message.text for known in expected):
            complaints.append(f"{message.type}: {message.text} ({message.location.get('url')})")

    def open_page(
        path: str, *, width: int = 1440, theme: str = "light", scripts: bool = True, expected: tuple[str, ...] = ()
    ) -> Page:
        context = chromium.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=theme,  # type: ignore[arg-type]
            java_script_enabled=scripts,
        )
        context.set_default_timeout(PATIENCE_MILLISECONDS)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: heard(message, REFUSALS + expected))
        page.on("pageerror", lambda error: complaints.append(f"uncaught: {error}"))
        page.goto(served.url + path)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == [], complaints
