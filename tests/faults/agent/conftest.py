"""Fixtures of these tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.store.local import LocalStore
from tests.support.agent_fixtures import (
    ignore_preexisting_processes_and_threads as ignore_preexisting_processes_and_threads,
)
from tests.support.agent_fixtures import launcher as launcher
from tests.support.agent_fixtures import moto as moto
from tests.support.agent_fixtures import rclone as rclone
from tests.support.simulated_files import RecordedFiles, memory_directory


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory."""
    with memory_directory() as directory:
        yield directory


@pytest.fixture
def begun(memory: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[LocalStore, RecordedFiles]]:
    """Creates stores whose changes are recorded, each with an attempt of the job `job`."""
    numbers = itertools.count()

    def begin() -> tuple[LocalStore, RecordedFiles]:
        tokens = itertools.count()
        monkeypatch.setattr("secrets.token_hex", lambda size: f"{next(tokens):0{2 * size}x}")
        base = memory / f"disk-{next(numbers)}"
        base.mkdir()
        files = RecordedFiles(base)
        store = LocalStore(base / "store", files)
        store.acquire_attempt("job", "uid")
        return store, files

    return begin
