"""What a store guarantees for a checkpoint that several processes write."""

from __future__ import annotations

import contextlib

import pytest

from holdfast.errors import DamagedCheckpoint, Fenced
from holdfast.store import Store, open_store
from holdfast.testing.contract import Contract
from holdfast.testing.small_checkpoints import FILE, FIRST, JOB, OTHER_FILE, commit, joined, prepared, read

MIB = 1 << 20


class RankContract(Contract):
    """Tests of writers that join a checkpoint."""

    def test_files_of_several_processes_form_one_checkpoint(self, store: Store) -> None:
        writer = prepared(store)
        others = open_store(store.url)
        part = joined(others, writer.folder)
        assert part.folder == writer.folder
        assert store.checkpoints(JOB) == []
        writer.make_durable()
        writer.commit(b"{}")
        part.abort()
        assert (store.checkpoints(JOB), self.unreferenced(store)) == ([FIRST], [])
        assert (read(store), read(store, file=OTHER_FILE)) == (b"tensors", b"others")
        assert read(others, file=OTHER_FILE) == b"others"

    def test_the_process_that_began_a_checkpoint_can_also_join_it(self, store: Store) -> None:
        writer = store.begin(JOB, FIRST, 1, 13)
        part = store.join(JOB, FIRST, 1, writer.folder, 7)
        part.write(FILE, [b"tensors"])
        writer.commit(b"{}")
        assert read(store) == b"tensors"

    def test_only_the_process_that_began_a_checkpoint_commits_or_removes_it(self, store: Store) -> None:
        writer = prepared(store)
        part = joined(open_store(store.url), writer.folder)
        with pytest.raises(AssertionError):
            part.commit(b"{}")
        part.abort()
        assert store.checkpoints(JOB) == []
        writer.commit(b"{}")
        assert read(store, file=OTHER_FILE) == b"others"

    def test_abort_removes_the_files_of_all_processes(self, store: Store) -> None:
        writer = prepared(store)
        joined(open_store(store.url), writer.folder)
        writer.abort()
        assert (store.checkpoints(JOB), self.unreferenced(store)) == ([], [])
        again = prepared(store)
        joined(open_store(store.url), again.folder, data=b"anew")
        again.commit(b"{}")
        assert read(store, file=OTHER_FILE) == b"anew"

    def test_a_checkpoint_that_is_aborted_while_others_write_is_never_listed(self, store: Store) -> None:
        writer = prepared(store)
        part = open_store(store.url).join(JOB, FIRST, 1, writer.folder, 40 * MIB)
        with contextlib.suppress(OSError):
            part.write(OTHER_FILE, [bytes(40 * MIB)], pace=lambda _: writer.abort())
            part.make_durable()
        assert store.checkpoints(JOB) == []
        commit(store, data=b"another")
        store.acquire_attempt(JOB, "second")
        assert (store.checkpoints(JOB), self.unreferenced(store)) == ([FIRST], [])
        assert read(store) == b"another"
        with pytest.raises(DamagedCheckpoint):
            store.open_file(JOB, FIRST, OTHER_FILE)

    def test_the_next_attempt_removes_what_several_processes_left(self, store: Store) -> None:
        folder = prepared(store).folder
        others = open_store(store.url)
        part = joined(others, folder)
        newer = open_store(store.url)
        newer.acquire_attempt(JOB, "second")
        assert (newer.checkpoints(JOB), self.unreferenced(newer)) == ([], [])
        with pytest.raises(Fenced, match="attempt 2 of job has started"):
            others.join(JOB, FIRST, 1, folder, 7)
        with contextlib.suppress(Fenced):  # an object store may accept it, and never reads it
            part.write("rank-2.safetensors", [b"late"])
            part.make_durable()
        newer.acquire_attempt(JOB, "third")
        assert (newer.checkpoints(JOB), self.unreferenced(newer)) == ([], [])

    def test_a_folder_that_no_writer_can_have_begun_is_refused(self, store: Store) -> None:
        folder = prepared(store).folder
        for wrong in (
            "", ".", "..", f"../{folder}", f"{folder}/..", f"/{folder}", f"{folder}\0", f"{folder}\n",
            f"{folder}x", FIRST, "attempts",
        ):  # fmt: skip
            with pytest.raises(ValueError, match="attempt 1"):
                store.join(JOB, FIRST, 1, wrong, 7)
        store.acquire_attempt(JOB, "second")
        with pytest.raises(ValueError, match="attempt 2"):
            store.join(JOB, FIRST, 2, folder, 7)
