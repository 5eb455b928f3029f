"""The contract of stores, which each must pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.store import Store
from holdfast.testing import StoreContract
from holdfast.testing.small_checkpoints import JOB


class TestSqliteStore(StoreContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"sqlite://{tmp_path}/store.db"

    def unreferenced(self, store: Store) -> list[str]:
        found = store.rows("SELECT name FROM folders WHERE job = ? AND state = 'begun'", JOB)
        return [name for (name,) in found]
