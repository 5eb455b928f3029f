from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from stage import served

from holdfast.client import Client


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Client]:
    with served(tmp_path) as client:
        yield client
