"""What the tests of a store have in common."""

from __future__ import annotations

import pytest

from holdfast.store import Store, open_store
from holdfast.testing.small_checkpoints import JOB


class Contract:
    """Base class of the tests of stores."""

    @pytest.fixture
    def url(self) -> str:
        """Address of a new, empty store that other processes can open as well."""
        raise NotImplementedError("override the fixture `url`")

    @pytest.fixture
    def store(self, url: str) -> Store:
        """The store at `url`, in which attempt 1 of `JOB` has begun."""
        store = open_store(url)
        store.acquire_attempt(JOB, "first")
        return store

    def unreferenced(self, store: Store) -> list[str]:
        """Return the names of all stored files that belong to no committed checkpoint and no record of `JOB`."""
        raise NotImplementedError("override `unreferenced`")
