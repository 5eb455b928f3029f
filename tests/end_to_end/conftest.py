from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from stage import served

from holdfast.client import Client


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """One for all jobs; each has a name of its own."""
    with served(tmp_path_factory.mktemp("server")) as client:
        yield client
