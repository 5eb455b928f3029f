"""What a store is asked when somebody tidies it: the same of every kind of store."""

import pytest

from holdfast.store import newest_attempt, open_store
from holdfast.testing.small_checkpoints import FIRST, JOB, prepared, read
from tests.support import object_servers


@pytest.fixture(params=["directory", "rclone", "moto"])
def store(request, tmp_path, monkeypatch):
    if request.param == "directory":
        return open_store(tmp_path / "store")
    return open_store(object_servers.use(monkeypatch, request.getfixturevalue(request.param).address))


def test_the_newest_attempt_is_known_with_all_that_it_recorded(store):
    assert newest_attempt(store, JOB) is None
    store.acquire_attempt(JOB, "first")
    second = store.acquire_attempt(JOB, "second")
    assert newest_attempt(store, JOB) == second


def test_a_damaged_checkpoint_that_was_set_aside_can_be_removed(store):
    store.acquire_attempt(JOB, "first")
    prepared(store, FIRST, 1).commit(b"{}")
    assert store.leftovers(JOB) == []
    prepared(store, FIRST, 1, b"again!!").commit(b"{}", replace=True)
    (found,) = store.leftovers(JOB)
    assert (found.what, found.size_bytes) == ("set aside as damaged by attempt 1", 9)
    store.remove_leftover(JOB, found.name)
    assert store.leftovers(JOB) == []
    assert (store.checkpoints(JOB), read(store, FIRST)) == ([FIRST], b"again!!")


def test_what_the_newest_attempt_is_writing_is_not_left_over(store):
    store.acquire_attempt(JOB, "first")
    writer = prepared(store, FIRST, 1)
    assert store.leftovers(JOB) == []
    writer.commit(b"{}")
    assert store.checkpoints(JOB) == [FIRST]


def test_nothing_but_a_leftover_is_removed(store):
    store.acquire_attempt(JOB, "first")
    prepared(store, FIRST, 1).commit(b"{}")
    for name in (FIRST, f"{FIRST}/00000001", "attempts", "../job"):
        store.remove_leftover(JOB, name)
    assert (store.checkpoints(JOB), store.latest_attempt(JOB)) == ([FIRST], 1)
