from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import tracing
from tests.support.sweep import Pool


@pytest.fixture(scope="session")
def stores() -> Iterator[Pool]:
    """Processes that know the store and no torch."""
    pool = Pool("tests.support.store_work", "tests.support.cut_work")
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def trainers() -> Iterator[Pool]:
    """Processes that train."""
    pool = Pool("tests.support.store_work", "tests.support.train_work")
    yield pool
    pool.close()


@pytest.fixture
def strace() -> None:
    if not tracing.available():
        pytest.skip("NO STRACE HERE: crash points were not tried (Debian: apt-get install strace)")
