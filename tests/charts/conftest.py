"""Fixtures of these tests."""

from __future__ import annotations

import pytest

from tests.support.server_fixtures import server_processes as server_processes
from tests.support.server_fixtures import spawn_server as spawn_server


@pytest.fixture
def new_database(tmp_path) -> str:
    return str(tmp_path / "holdfast.db")
