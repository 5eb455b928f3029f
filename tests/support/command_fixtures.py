"""Fixtures for tests of the command line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.commands import control
from tests.support.fake_server import FakeServer, Holdfast, fake_server


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as running:
        yield running


@pytest.fixture
def holdfast(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> Holdfast:
    """Runs the command line against the fake server."""
    monkeypatch.setenv("HOLDFAST_SERVER", server.url)
    monkeypatch.delenv("HOLDFAST_TOKEN", raising=False)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def no_polling_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll the server without waiting between requests."""
    monkeypatch.setattr("holdfast.commands.requests.POLL_SECONDS", 0.0)
    monkeypatch.setattr(control, "POLL_SECONDS", 0.0)
