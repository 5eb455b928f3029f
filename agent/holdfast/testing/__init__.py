"""Tests that a store or a file transform of your own must pass; pytest, NumPy and safetensors run them.

    from holdfast.testing import StoreContract

    class TestTapeStore(StoreContract):
        @pytest.fixture
        def url(self, tmp_path):
            return f"tape://{tmp_path}/store"

        def unreferenced(self, store):
            return store.names_outside_checkpoints_and_records()

`url` is the address of a new, empty store, which other processes can open as well. Each test shows one guarantee
of `holdfast.store.base`. The tests of a file transform need its object as a fixture:

    class TestZip(FileTransformContract):
        @pytest.fixture
        def transform(self):
            return Zip
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "holdfast.testing.checkpoints",
    "holdfast.testing.records",
    "holdfast.testing.ranks",
    "holdfast.testing.transforms",
)

from holdfast.testing.checkpoints import CheckpointContract  # noqa: E402
from holdfast.testing.ranks import RankContract  # noqa: E402
from holdfast.testing.records import RecordContract  # noqa: E402
from holdfast.testing.transforms import FileTransformContract  # noqa: E402

__all__ = ["FileTransformContract", "StoreContract"]


class StoreContract(CheckpointContract, RankContract, RecordContract):
    """All tests of a store. Subclass it, with a fixture `url` and `unreferenced`."""
