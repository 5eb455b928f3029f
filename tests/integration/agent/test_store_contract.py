"""The public contract, for directories, buckets and both as tiers.

HOLDFAST_TEST_STORE_URL adds a bucket of your own, of any service.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest

from holdfast.store import LocalStore, Store
from holdfast.store.tiers import TieredStore
from holdfast.testing import StoreContract
from holdfast.testing.checkpoints import MIB
from holdfast.testing.small_checkpoints import FIRST, JOB, joined, prepared
from tests.support import cloud_servers, object_servers

KINDS = ["directory", "rclone", "moto", "google", "azurite", "tiers"]
GIVEN = os.environ.get("HOLDFAST_TEST_STORE_URL")


class TestStores(StoreContract):
    @pytest.fixture(params=[*KINDS, *(["given"] if GIVEN else [])])
    def url(self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        if request.param == "directory":
            return str(tmp_path / "store")
        if request.param == "given":
            return f"{str(GIVEN).rstrip('/')}/{uuid.uuid4().hex}"
        if request.param == "tiers":
            return (
                f"{tmp_path / 'near'}+{object_servers.use(monkeypatch, request.getfixturevalue('moto').address)}"
            )
        address = request.getfixturevalue(request.param).address
        if scheme := {"google": "gs", "azurite": "az"}.get(request.param):
            return cloud_servers.use(monkeypatch, scheme, address)
        return object_servers.use(monkeypatch, address)

    def unreferenced(self, store: Store) -> list[str]:
        store = store.near if isinstance(store, TieredStore) else store
        if isinstance(store, LocalStore):
            return [path.name for path in (store.root / JOB).iterdir() if path.name.startswith(".tmp")]
        committed = [f"{JOB}/{folder.path}/" for folder in store.survey(JOB).committed().values()]
        records = [f"{JOB}/{kind}/" for kind in ("attempts", "endings", "lineages", "pins")]
        return [name for name in store.bucket.sizes(f"{JOB}/") if not name.startswith((*committed, *records))]

    def test_a_directory_has_free_space_and_that_of_a_bucket_is_unknown(self, store: Store) -> None:
        free_bytes = store.free_bytes()
        assert (free_bytes or 0) > MIB if isinstance(store, LocalStore | TieredStore) else free_bytes is None

    def test_a_refused_folder_is_named(self, store: Store) -> None:
        prepared(store)
        what = r"is not a (directory|folder) in which attempt 1 writes 000000000001-1"
        with pytest.raises(ValueError, match=what):
            store.join(JOB, FIRST, 1, "attempts", 7)

    def test_a_commit_by_a_writer_that_joined_says_which_process_commits(self, store: Store) -> None:
        part = joined(store, prepared(store).folder)
        with pytest.raises(AssertionError, match="the process that began"):
            part.commit(b"{}")
