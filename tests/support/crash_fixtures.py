"""Fixtures for crash tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import system_call_tracing
from tests.support.trial_pool import TrialPool


@pytest.fixture(scope="session")
def stores() -> Iterator[TrialPool]:
    """Processes that know the store and no torch."""
    pool = TrialPool("tests.support.store_workloads", "tests.support.power_cut_workloads")
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def trainers() -> Iterator[TrialPool]:
    """Processes that train."""
    pool = TrialPool("tests.support.store_workloads", "tests.support.training_workloads")
    yield pool
    pool.close()


@pytest.fixture
def strace() -> None:
    if not system_call_tracing.available():
        pytest.skip("NO STRACE HERE: crash points were not tried (Debian: apt-get install strace)")
