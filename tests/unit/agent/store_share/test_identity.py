"""The id in the root of a store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.store import open_store
from holdfast.store_share.identity import FILE, identify


def test_a_store_has_one_id_whatever_its_path(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    first = identify(open_store(str(tmp_path / "store")))
    assert len(first) == 32
    (tmp_path / "elsewhere").symlink_to(tmp_path / "store")
    assert identify(open_store(str(tmp_path / "elsewhere"))) == first
    assert identify(open_store(str(tmp_path / "other"))) != first


def test_of_many_that_begin_at_the_same_time_one_writes_it(tmp_path: Path) -> None:
    stores = [open_store(str(tmp_path / "store")) for _ in range(16)]
    with ThreadPoolExecutor(16) as threads:
        found = set(threads.map(identify, stores))
    assert len(found) == 1
    assert found != {""}
    assert [path.name for path in (tmp_path / "store").iterdir()] == [FILE]


def test_the_file_is_no_job(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    identify(store)
    assert store.jobs() == []


@pytest.mark.parametrize("content", [b"", b"{}", b'{"id": "../x"}', b"\xff" * 5000])
def test_a_store_with_another_file_of_that_name_has_no_id(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    assert identify(open_store(str(tmp_path))) == ""
    assert (tmp_path / FILE).read_bytes() == content


def test_a_store_that_cannot_be_written_has_no_id(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = open_store(str(tmp_path / "store"))
    store.root = tmp_path / "file" / "store"  # type: ignore[attr-defined]
    assert identify(store) == ""
