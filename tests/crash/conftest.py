from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import tracing
from sweep import Pool

ROOM_BYTES = 256 << 20


@pytest.fixture(scope="session")
def stores() -> Iterator[Pool]:
    """Processes that know the store and no torch."""
    pool = Pool("store_work", "cut_work")
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def trainers() -> Iterator[Pool]:
    """Processes that train."""
    pool = Pool("store_work", "train_work")
    yield pool
    pool.close()


@pytest.fixture
def fast_path(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is some to spare: a kill or an error is the same there, and fsync takes no time."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or shutil.disk_usage(memory).free < ROOM_BYTES:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as place:
        yield Path(place)


@pytest.fixture
def strace() -> None:
    if not tracing.available():
        pytest.skip("NO STRACE HERE: crash points were not tried (Debian: apt-get install strace)")
