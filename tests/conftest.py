from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest


def pytest_configure() -> None:
    """Where a script has put the tests in the background, Ctrl-C is ignored by them and all that they start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def _migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from holdfast_server.db import Database  # most tests need no server

    database = Database(str(tmp_path_factory.mktemp("migrated") / "holdfast.db"))
    database.prepare()
    database.release()
    return database.path


@pytest.fixture
def empty_database(_migrated: Path, tmp_path: Path) -> str:
    """Of a server that has run before: the tables are there, which saves each test the fsyncs of making them."""
    return str(shutil.copy(_migrated, tmp_path / "holdfast.db"))
