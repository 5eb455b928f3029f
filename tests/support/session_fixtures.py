"""Fixtures for tests of sessions: a store, an uninterrupted run, a fake server connection."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.engine import startup
from tests.support.fake_server_connection import FakeAgentClient, FakeServerConnection
from tests.support.tiny_job import Trainer


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses by iteration of a job that runs to its end without interruption."""
    trainer = Trainer(tmp_path_factory.mktemp("store") / "s").run()
    trainer.session.close()
    return dict(trainer.losses)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Path of an empty store."""
    return tmp_path / "store"


@pytest.fixture
def linked(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Session options for a job whose server connection is a `FakeServerConnection`."""
    monkeypatch.setattr(startup, "ServerConnection", FakeServerConnection)
    monkeypatch.setattr(startup, "AgentClient", FakeAgentClient)
    monkeypatch.setattr(FakeServerConnection, "first", None)
    return {"server": "http://127.0.0.1:1"}
