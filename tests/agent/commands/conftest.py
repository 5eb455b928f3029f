from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))

from fake_server import FakeServer, Holdfast, fake_server

from holdfast.cli import app


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
