"""Fixtures for end to end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.client import Client
from tests.support.job_processes import served


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """One for all jobs; each has a name of its own."""
    with served(tmp_path_factory.mktemp("server")) as client:
        yield client
