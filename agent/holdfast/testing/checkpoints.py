"""What a store guarantees for checkpoints, their files, and attempts that write at the same time."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import threading

import pytest

from holdfast.errors import DamagedCheckpoint, Fenced
from holdfast.store import Lineage, Store, base, newest_attempt, open_store, read_manifest
from holdfast.testing.contract import Contract
from holdfast.testing.small_checkpoints import FILE, FIRST, JOB, SECOND, commit, lineage, prepared, read

MIB = 1 << 20


class CheckpointContract(Contract):
    """Tests of checkpoints and attempts."""

    def test_a_checkpoint_is_invisible_until_it_is_committed(self, store: Store) -> None:
        writer = prepared(store)
        assert store.checkpoints(JOB) == []
        with pytest.raises(DamagedCheckpoint):
            read_manifest(store, JOB, FIRST)
        writer.commit(b'{"it": "is"}')
        assert store.checkpoints(JOB) == [FIRST]
        assert read_manifest(store, JOB, FIRST) == b'{"it": "is"}'
        assert read_manifest(store, JOB, FIRST, from_disk=True) == b'{"it": "is"}'
        assert read(store) == b"tensors"
        assert self.unreferenced(store) == []

    def test_another_process_finds_what_was_committed(self, store: Store, url: str) -> None:
        commit(store)
        store.append(JOB, lineage())
        other = open_store(store.url)
        assert (other.checkpoints(JOB), read(other)) == ([FIRST], b"tensors")
        assert (other.records(JOB, Lineage), other.latest_attempt(JOB)) == ([lineage()], 1)
        assert store.url == url

    def test_checkpoints_are_listed_by_iteration_then_lineage(self, store: Store) -> None:
        for checkpoint in ("000000000010-2", "000000000010-11", "000000000009-3"):
            commit(store, checkpoint)
        assert store.checkpoints(JOB) == ["000000000009-3", "000000000010-2", "000000000010-11"]

    def test_the_free_space_is_a_number_or_unknown(self, store: Store) -> None:
        free_bytes = store.free_bytes()
        assert free_bytes is None or free_bytes > MIB
        assert store.read_threads >= 1
        assert store.shares_files in (False, True)

    def test_jobs_are_separate(self, store: Store) -> None:
        commit(store)
        store.acquire_attempt("job-2", "other")
        assert store.jobs() == ["job", "job-2"]
        assert store.checkpoints("job-2") == []
        assert store.checkpoints("never") == []
        assert store.records("never", Lineage) == []
        assert store.latest_attempt("never") == 0

    def test_a_store_that_does_not_exist_yet_is_empty(self, url: str) -> None:
        store = open_store(url)
        assert (store.jobs(), store.checkpoints(JOB), store.latest_attempt(JOB)) == ([], [], 0)

    def test_an_aborted_checkpoint_leaves_nothing_and_can_be_begun_again(self, store: Store) -> None:
        prepared(store).abort()
        assert (store.checkpoints(JOB), self.unreferenced(store)) == ([], [])
        commit(store, data=b"another")
        assert read(store) == b"another"

    def test_a_checkpoint_does_not_overwrite_another_of_its_name(self, store: Store) -> None:
        commit(store)
        writer = prepared(store, data=b"unasked")
        with pytest.raises(FileExistsError, match="a checkpoint of that name"):
            writer.commit(b"{}")
        writer.abort()
        assert read(store) == b"tensors"
        assert self.unreferenced(store) == []

    def test_a_damaged_checkpoint_can_be_replaced(self, store: Store) -> None:
        commit(store)
        commit(store, data=b"again!!", replace=True)
        assert (store.checkpoints(JOB), read(store)) == ([FIRST], b"again!!")
        store.acquire_attempt(JOB, "second")
        commit(store, attempt=2, data=b"and again", replace=True)
        assert (store.checkpoints(JOB), read(store)) == ([FIRST], b"and again")
        assert read(open_store(store.url)) == b"and again"
        store.delete(JOB, FIRST, attempt=2)
        assert store.checkpoints(JOB) == []

    def test_a_deleted_checkpoint_is_gone(self, store: Store) -> None:
        commit(store)
        commit(store, SECOND)
        store.delete(JOB, FIRST, attempt=1)
        assert (store.checkpoints(JOB), self.unreferenced(store)) == ([SECOND], [])
        with pytest.raises(DamagedCheckpoint):
            read_manifest(store, JOB, FIRST)
        with pytest.raises(FileNotFoundError):
            store.delete(JOB, FIRST, attempt=1)

    def test_an_older_attempt_commits_deletes_and_begins_nothing(self, store: Store) -> None:
        commit(store)
        newer = open_store(store.url)
        assert newer.acquire_attempt(JOB, "second").number == 2
        with pytest.raises(Fenced, match="attempt 2 of job has started; attempt 1"):
            store.delete(JOB, FIRST, attempt=1)
        with pytest.raises(Fenced):
            store.append(JOB, lineage())
        with pytest.raises((Fenced, OSError)):
            commit(store, SECOND)
        assert (newer.checkpoints(JOB), newer.records(JOB, Lineage)) == ([FIRST], [])
        assert read(newer) == b"tensors"

    def test_an_attempt_fenced_between_payload_and_manifest_commits_nothing(self, store: Store) -> None:
        stalled = prepared(store, SECOND)
        newer = open_store(store.url)
        newer.acquire_attempt(JOB, "second")
        commit(newer, SECOND, attempt=2, data=b"newer")
        with pytest.raises((Fenced, OSError)):
            stalled.commit(b"{}")
        stalled.abort()
        assert (newer.checkpoints(JOB), read(newer, SECOND)) == ([SECOND], b"newer")
        newer.acquire_attempt(JOB, "third")
        assert (newer.checkpoints(JOB), self.unreferenced(newer)) == ([SECOND], [])

    def test_attempts_continue_above_the_number_that_the_server_knows(self, store: Store) -> None:
        assert store.acquire_attempt(JOB, "x", at_least=40).number == 40
        assert store.acquire_attempt(JOB, "y").number == 41
        assert store.latest_attempt(JOB) == 41

    def test_threads_that_start_a_job_at_once_become_different_attempts(self, store: Store) -> None:
        numbers, together = list[int](), threading.Barrier(4)

        def start(uid: str) -> None:
            mine = open_store(store.url)
            together.wait()
            numbers.append(mine.acquire_attempt(JOB, uid).number)

        threads = [threading.Thread(target=start, args=(f"thread-{i}",)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(numbers)) == 4
        assert store.latest_attempt(JOB) == max(numbers)
        commit(store, attempt=max(numbers))
        assert store.checkpoints(JOB) == [FIRST]

    def test_processes_that_start_a_job_at_once_become_different_attempts(self, store: Store) -> None:
        program = (
            "import sys; from holdfast.store import open_store; store = open_store(sys.argv[1]); input(); "
            "print(store.acquire_attempt('job', sys.argv[2]).number)"
        )
        processes = [
            subprocess.Popen(  # noqa: S603
                [sys.executable, "-c", program, store.url, f"process-{i}"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for i in range(3)
        ]  # fmt: skip
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("now\n")
            process.stdin.flush()
        numbers = [int(process.communicate()[0]) for process in processes]
        assert len(set(numbers)) == 3
        assert store.latest_attempt(JOB) == max(numbers)

    def test_the_newest_attempt_says_where_it_runs(self, store: Store) -> None:
        assert newest_attempt(store, "never") is None
        store.acquire_attempt(JOB, "second")
        newest = newest_attempt(open_store(store.url), JOB)
        assert newest is not None
        assert (newest.number, newest.uid, newest.pid) == (2, "second", os.getpid())

    def test_what_was_set_aside_as_damaged_can_be_listed_and_removed(self, store: Store) -> None:
        commit(store)
        assert store.leftovers(JOB) == []
        store.acquire_attempt(JOB, "second")
        prepared(store, SECOND, attempt=2)
        commit(store, attempt=2, data=b"again!!", replace=True)
        (damaged,) = store.leftovers(JOB)
        assert damaged.what == "set aside as damaged by attempt 2"
        assert damaged.size_bytes == len(b"tensors{}")
        store.remove_leftover(JOB, "nothing of that name")
        assert store.leftovers(JOB) == [damaged]
        store.remove_leftover(JOB, damaged.name)
        assert (store.leftovers(JOB), store.checkpoints(JOB), read(store)) == ([], [FIRST], b"again!!")

    def test_a_manifest_that_is_too_large_is_not_read_into_memory(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prepared(store).commit(b"{}" + b" " * 1000)
        monkeypatch.setattr(base, "MOST_MANIFEST_BYTES", 1000)
        with pytest.raises(DamagedCheckpoint, match="is 1,002 bytes long, too large for a manifest"):
            read_manifest(store, JOB, FIRST)

    def test_a_copied_file_outlives_the_checkpoint_of_another_job(self, store: Store) -> None:
        commit(store)
        store.acquire_attempt("other", "first")
        writer = store.begin("other", SECOND, 1, 0)
        writer.copy_file(JOB, FIRST, FILE)
        writer.commit(b'{"it": "is"}')
        store.delete(JOB, FIRST, 1)
        assert read(store, job="other", checkpoint=SECOND) == b"tensors"
        again = store.begin("other", FIRST, 1, 0)
        with pytest.raises(DamagedCheckpoint):
            again.copy_file(JOB, FIRST, FILE)
        with pytest.raises(DamagedCheckpoint):
            again.copy_file("other", SECOND, FILE, size_bytes=6)
        again.copy_file("other", SECOND, FILE, size_bytes=7)
        again.abort()
        assert store.checkpoints("other") == [SECOND]

    def test_a_copied_file_of_an_aborted_checkpoint_is_gone(self, store: Store) -> None:
        commit(store)
        writer = store.begin(JOB, SECOND, 1, 0)
        writer.copy_file(JOB, FIRST, FILE)
        writer.abort()
        assert (self.unreferenced(store), store.checkpoints(JOB), read(store)) == ([], [FIRST], b"tensors")

    def test_a_damaged_file_can_be_replaced_until_a_newer_attempt_begins(self, store: Store) -> None:
        commit(store)
        with pytest.raises(DamagedCheckpoint):
            store.file_replacer(JOB, SECOND)
        repair = store.file_replacer(JOB, FIRST)
        repair.replace(FILE, [b"repaired"])
        assert (store.checkpoints(JOB), read(store)) == ([FIRST], b"repaired")
        assert (read_manifest(store, JOB, FIRST), self.unreferenced(store)) == (b"{}", [])
        open_store(store.url).acquire_attempt(JOB, "second")
        with pytest.raises(Fenced):
            repair.replace(FILE, [b"too late"])
        assert read(store) == b"repaired"

    def test_a_repair_does_not_touch_a_checkpoint_that_was_replaced_meanwhile(self, store: Store) -> None:
        commit(store)
        repair = store.file_replacer(JOB, FIRST)
        commit(store, data=b"again!!", replace=True)
        with pytest.raises(Fenced):
            repair.replace(FILE, [b"too late"])
        assert read(store) == b"again!!"

    def test_a_large_payload_is_read_in_any_ranges_on_several_threads(self, store: Store) -> None:
        data = random.Random(1).randbytes(40 * MIB + 12_345)  # noqa: S311
        parts: list[memoryview | bytes] = [
            data[:4096],
            memoryview(data)[4096 : 30 * MIB],
            b"",
            memoryview(data)[30 * MIB :],
        ]
        paced = list[int]()
        writer = store.begin(JOB, FIRST, 1, len(data))
        writer.write(FILE, parts, pace=paced.append)
        writer.commit(b"{}")
        assert sum(paced) == len(data)
        assert len(paced) > 1
        target = bytearray(len(data))
        cuts = [0, 1, 4096, 17 * MIB - 1, 17 * MIB, 33 * MIB, len(data)]

        def fetch(start: int, end: int) -> None:
            file.read_into(start, memoryview(target)[start:end])

        with store.open_file(JOB, FIRST, FILE) as file:
            assert file.size_bytes == len(data)
            threads = [threading.Thread(target=fetch, args=pair) for pair in itertools.pairwise(cuts)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            with pytest.raises(DamagedCheckpoint, match="ends at byte"):
                file.read_into(len(data) - 5, memoryview(bytearray(10)))
        assert target == data

    def test_a_write_that_its_pace_ends_leaves_nothing(self, store: Store) -> None:
        class TrainingEnded(Exception):
            pass

        left = 2

        def pace(size_bytes: int) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise TrainingEnded

        writer = store.begin(JOB, FIRST, 1, 40 * MIB)
        with pytest.raises(TrainingEnded):
            writer.write(FILE, [bytes(40 * MIB)], pace=pace)
        writer.abort()
        assert (store.checkpoints(JOB), self.unreferenced(store)) == ([], [])

    def test_a_missing_file_is_named(self, store: Store) -> None:
        commit(store)
        with pytest.raises(DamagedCheckpoint, match=r"rank-1\.safetensors"):
            store.open_file(JOB, FIRST, "rank-1.safetensors")
