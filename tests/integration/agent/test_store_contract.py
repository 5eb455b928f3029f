"""What every store promises, whatever keeps its bytes. HOLDFAST_TEST_S3_URL adds a bucket of your own."""

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import uuid

import msgspec
import pytest

from holdfast.errors import DamagedCheckpoint, Fenced
from holdfast.store import (
    Attempt,
    Ending,
    Hold,
    Lineage,
    Pins,
    base,
    newest_attempt,
    newest_pins,
    open_store,
    read_manifest,
)
from tests.support import object_servers
from tests.support.small_checkpoints import FILE, FIRST, JOB, OTHER_FILE, SECOND, commit, joined, prepared, read

MIB = 1 << 20


GIVEN = os.environ.get("HOLDFAST_TEST_S3_URL")


@pytest.fixture(params=["directory", "rclone", "moto", *(["given"] if GIVEN else [])])
def url(request, tmp_path, monkeypatch):
    if request.param == "directory":
        return str(tmp_path / "store")
    if request.param == "given":
        return f"{GIVEN.rstrip('/')}/{uuid.uuid4().hex}"
    return object_servers.use(monkeypatch, request.getfixturevalue(request.param).address)


@pytest.fixture
def store(url):
    store = open_store(url)
    store.acquire_attempt(JOB, "first")
    return store


def leftovers(store):
    """What belongs to no committed checkpoint."""
    if hasattr(store, "root"):
        return [path.name for path in (store.root / JOB).iterdir() if path.name.startswith(".tmp")]
    committed = [f"{JOB}/{folder.path}/" for folder in store.survey(JOB).committed().values()]
    records = [f"{JOB}/{kind}/" for kind in ("attempts", "endings", "lineages", "pins")]
    return [name for name in store.bucket.sizes(f"{JOB}/") if not name.startswith((*committed, *records))]


def lineage(number=1, attempt=1):
    return Lineage(number=number, iteration=0, parent=None, order="o", attempt=attempt, created_at=1.0)


def test_a_checkpoint_is_invisible_until_it_is_committed(store):
    writer = prepared(store)
    assert store.checkpoints(JOB) == []
    with pytest.raises(DamagedCheckpoint):
        read_manifest(store, JOB, FIRST)
    writer.commit(b'{"it": "is"}')
    assert store.checkpoints(JOB) == [FIRST]
    assert read_manifest(store, JOB, FIRST) == b'{"it": "is"}'
    assert read(store) == b"tensors"
    assert leftovers(store) == []


def test_another_process_finds_what_was_committed(store, url):
    commit(store)
    store.append(JOB, lineage())
    other = open_store(other_url := store.url)
    assert (other.checkpoints(JOB), read(other)) == ([FIRST], b"tensors")
    assert (other.records(JOB, Lineage), other.latest_attempt(JOB)) == ([lineage()], 1)
    assert other_url == url


def test_checkpoints_are_listed_by_iteration_then_lineage(store):
    for checkpoint in ("000000000010-2", "000000000010-11", "000000000009-3"):
        commit(store, checkpoint)
    assert store.checkpoints(JOB) == ["000000000009-3", "000000000010-2", "000000000010-11"]


def test_a_directory_tells_how_much_room_is_left_and_a_bucket_has_no_end(store):
    free = store.free_bytes()
    assert free > MIB if hasattr(store, "root") else free is None


def test_jobs_are_told_apart(store):
    commit(store)
    store.acquire_attempt("job-2", "other")
    assert store.jobs() == ["job", "job-2"]
    assert store.checkpoints("job-2") == []
    assert (store.checkpoints("never"), store.records("never", Lineage), store.latest_attempt("never")) == (
        [],
        [],
        0,
    )


def test_a_store_that_is_not_there_yet_is_empty(url):
    store = open_store(url)
    assert (store.jobs(), store.checkpoints(JOB), store.latest_attempt(JOB)) == ([], [], 0)


def test_an_aborted_checkpoint_leaves_nothing_and_may_be_begun_again(store):
    prepared(store).abort()
    assert (store.checkpoints(JOB), leftovers(store)) == ([], [])
    commit(store, data=b"another")
    assert read(store) == b"another"


def test_there_are_no_two_checkpoints_of_a_name(store):
    commit(store)
    writer = prepared(store, data=b"unasked")
    with pytest.raises(FileExistsError, match="a checkpoint of that name"):
        writer.commit(b"{}")
    writer.abort()
    assert read(store) == b"tensors"
    assert leftovers(store) == []


def test_a_damaged_checkpoint_makes_way_for_the_sound_one(store):
    commit(store)
    commit(store, data=b"again!!", replace=True)
    assert (store.checkpoints(JOB), read(store)) == ([FIRST], b"again!!")
    store.acquire_attempt(JOB, "second")
    commit(store, attempt=2, data=b"and again", replace=True)
    assert (store.checkpoints(JOB), read(store)) == ([FIRST], b"and again")
    assert read(open_store(store.url)) == b"and again"
    store.delete(JOB, FIRST, attempt=2)
    assert store.checkpoints(JOB) == []


def test_a_deleted_checkpoint_is_gone(store):
    commit(store)
    commit(store, SECOND)
    store.delete(JOB, FIRST, attempt=1)
    assert (store.checkpoints(JOB), leftovers(store)) == ([SECOND], [])
    with pytest.raises(DamagedCheckpoint):
        read_manifest(store, JOB, FIRST)
    with pytest.raises(FileNotFoundError):
        store.delete(JOB, FIRST, attempt=1)


def test_an_older_attempt_commits_deletes_and_begins_nothing(store):
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


def test_an_attempt_fenced_between_payload_and_manifest_commits_nothing(store):
    stalled = prepared(store, SECOND)
    newer = open_store(store.url)
    newer.acquire_attempt(JOB, "second")
    commit(newer, SECOND, attempt=2, data=b"newer")
    with pytest.raises((Fenced, OSError)):
        stalled.commit(b"{}")
    stalled.abort()
    assert (newer.checkpoints(JOB), read(newer, SECOND)) == ([SECOND], b"newer")
    newer.acquire_attempt(JOB, "third")
    assert (newer.checkpoints(JOB), leftovers(newer)) == ([SECOND], [])


def test_attempts_count_up_past_what_a_server_has_seen(store):
    assert store.acquire_attempt(JOB, "x", at_least=40).number == 40
    assert store.acquire_attempt(JOB, "y").number == 41
    assert store.latest_attempt(JOB) == 41


def test_threads_that_start_a_job_at_once_become_different_attempts(store):
    got, together = [], threading.Barrier(4)

    def start(uid):
        mine = open_store(store.url)
        together.wait()
        got.append(mine.acquire_attempt(JOB, uid).number)

    threads = [threading.Thread(target=start, args=(f"thread-{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(got)) == 4
    assert store.latest_attempt(JOB) == max(got)
    commit(store, attempt=max(got))
    assert store.checkpoints(JOB) == [FIRST]


def test_processes_that_start_a_job_at_once_become_different_attempts(store):
    program = (
        "import sys; from holdfast.store import open_store; store = open_store(sys.argv[1]); input(); "
        "print(store.acquire_attempt('job', sys.argv[2]).number)"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, store.url, f"process-{i}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for i in range(3)
    ]  # fmt: skip
    for process in processes:
        process.stdin.write("now\n")
        process.stdin.flush()
    got = [int(process.communicate()[0]) for process in processes]
    assert len(set(got)) == 3
    assert store.latest_attempt(JOB) == max(got)


def test_the_newest_attempt_says_where_it_runs(store):
    assert newest_attempt(store, "never") is None
    store.acquire_attempt(JOB, "second")
    newest = newest_attempt(open_store(store.url), JOB)
    assert (newest.number, newest.uid, newest.pid) == (2, "second", os.getpid())


def test_what_was_set_aside_as_damaged_can_be_listed_and_removed(store):
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


def test_a_lineage_is_noted_once(store):
    store.append(JOB, lineage(2))
    store.append(JOB, lineage(1))
    with pytest.raises(FileExistsError):
        store.append(JOB, lineage(2))
    assert store.records(JOB, Lineage) == [lineage(1), lineage(2)]
    store.acquire_attempt(JOB, "second")
    with pytest.raises(FileExistsError):
        store.append(JOB, lineage(2, attempt=2))
    store.append(JOB, lineage(3, attempt=2))
    assert store.records(JOB, Lineage) == [lineage(1), lineage(2), lineage(3, attempt=2)]


def put(store, name, data):
    """Something that a store did not write itself."""
    if hasattr(store, "root"):
        path = store.root / JOB / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    else:
        store.bucket.put_new(f"{JOB}/{name}", data)


def record_name(store, kind, number):
    """Of an attempt or a lineage, as this store names it."""
    if hasattr(store, "root"):
        return f"{kind}/{number:08d}.json" if kind == "attempts" else f"{kind}/{number:06d}.json"
    return f"{kind}/{number:08d}-uid.json" if kind == "attempts" else f"{kind}/{number:06d}-00000001.json"


def put_lineage(store, named, **changes):
    record = msgspec.to_builtins(lineage()) | {"number": named} | changes
    put(store, record_name(store, "lineages", named), json.dumps(record).encode())


@pytest.mark.parametrize("number", [2**31, 2**53, 10**40])
def test_an_attempt_of_a_number_that_there_cannot_be_is_none(store, number):
    record = {"number": number, "uid": "uid", "host": "h", "pid": 1, "started_at": 1.0}
    put(store, record_name(store, "attempts", number), json.dumps(record).encode())
    assert store.latest_attempt(JOB) == 1
    assert [each.number for each in store.records(JOB, Attempt)] == [1]
    assert newest_attempt(store, JOB).number == 1
    assert store.acquire_attempt(JOB, "second").number == 2
    commit(store, attempt=2)
    assert store.checkpoints(JOB) == [FIRST]


@pytest.mark.parametrize("number", [10**9, 10**9 + 1, 10**40])
def test_a_lineage_of_a_number_that_there_cannot_be_is_none(store, number):
    put_lineage(store, number)
    store.append(JOB, lineage())
    assert store.records(JOB, Lineage) == [lineage()]


@pytest.mark.parametrize(
    "change", [{"number": 3}, {"number": 10**9}, {"iteration": -1}, {"iteration": 10**12}, {"iteration": 2**70}]
)
def test_a_lineage_whose_record_says_what_cannot_be_is_passed_over(store, change):
    store.append(JOB, lineage())
    put_lineage(store, 2, **change)
    assert store.records(JOB, Lineage) == [lineage()]


@pytest.mark.parametrize("name", ["", "latest", "../000000000001-1", "000000000001-1 ", "٠٠٠٠٠٠٠٠٠٠٠١-1"])
def test_a_lineage_counts_without_the_parent_that_no_checkpoint_can_be(store, name):
    put_lineage(store, 2, parent=name, left=name)
    assert store.records(JOB, Lineage) == [lineage(2)]


def test_a_record_nested_without_end_is_passed_over(store):
    store.append(JOB, lineage())
    put(store, record_name(store, "lineages", 2), b'{"a":' + b"[" * 400_000)
    assert store.records(JOB, Lineage) == [lineage()]


def test_no_record_gets_a_number_beyond_the_largest(store):
    with pytest.raises(
        OSError,
        match=r"lineage 1000000000 of job exceeds the largest number 999999999.*holdfast fork job latest NEW",
    ):
        store.append(JOB, lineage(10**9))
    with pytest.raises(
        OSError,
        match=r"attempt 2147483648 of job exceeds the largest number 2147483647.*holdfast fork job latest NEW",
    ):
        store.acquire_attempt(JOB, "uid", 2**31)
    assert (store.records(JOB, Lineage), store.latest_attempt(JOB)) == ([], 1)
    store.append(JOB, lineage(999_999_999))
    assert store.acquire_attempt(JOB, "uid", 2**31 - 1).number == 2**31 - 1


def test_digits_of_other_scripts_make_no_number(store):
    put(store, "attempts/٠٠٠٠٠٠٠٩-uid.json" if not hasattr(store, "root") else "attempts/٠٠٠٠٠٠٠٩.json", b"{}")
    put(store, "٠٠٠٠٠٠٠٠٠٠٠٩-1/manifest.json", b"{}")
    assert (store.latest_attempt(JOB), store.checkpoints(JOB)) == (1, [])


def test_a_note_of_pins_of_an_attempt_that_there_cannot_be_counts_until_there_is_another(store, url):
    put(
        store,
        f"pins/{2**53:08d}-000001.json",
        msgspec.json.encode(Pins(attempt=2**53, checkpoints=(FIRST,), at=1.0)),
    )
    assert newest_pins(open_store(url), JOB).checkpoints == (FIRST,)
    store.append(JOB, Pins(attempt=1, checkpoints=(SECOND,), at=2.0))
    assert newest_pins(open_store(url), JOB).checkpoints == (SECOND,)


def test_a_manifest_larger_than_any_is_not_read_into_memory(store, monkeypatch):
    prepared(store).commit(b"{}" + b" " * 1000)
    monkeypatch.setattr(base, "MOST_MANIFEST_BYTES", 1000)
    with pytest.raises(DamagedCheckpoint, match="is 1,002 bytes long, too large for a manifest"):
        read_manifest(store, JOB, FIRST)


def test_how_attempts_ended_is_noted(store, url):
    assert store.records(JOB, Ending) == []
    ended = [
        Ending(attempt=3, reason="interrupted", iterations=7, at=1.0),
        Ending(attempt=1, reason="ValueError", iterations=0, at=2.0),
    ]
    for each in ended:
        store.append(JOB, each)
    assert open_store(url).records(JOB, Ending) == ended[::-1]
    assert store.records(JOB, Ending, since=2) == ended[:1]
    numbers = [store.acquire_attempt(JOB, uid).number for uid in ("second", "third")]
    assert [each.number for each in open_store(url).records(JOB, Attempt)] == [1, *numbers]
    assert [each.uid for each in store.records(JOB, Attempt, since=3)] == ["third"]
    with pytest.raises(Fenced):
        store.append(JOB, Ending(attempt=2, reason="finished", iterations=9, at=3.0))
    assert (store.latest_attempt(JOB), store.records(JOB, Lineage), store.checkpoints(JOB)) == (3, [], [])


def test_the_newest_note_of_pins_counts_and_the_ones_before_it_go(store, url):
    assert newest_pins(store, JOB) is None
    noted = [Pins(attempt=1, checkpoints=pins, at=1.0) for pins in ((FIRST,), (FIRST, SECOND), (SECOND,), ())]
    for each in noted:
        store.append(JOB, each)
        assert newest_pins(store, JOB) == newest_pins(open_store(url), JOB) == each
    assert len(notes_of_pins(store)) == 1
    assert leftovers(store) == []


def test_pins_are_noted_by_the_newest_attempt_only(store, url):
    newer, kept = open_store(url), Pins(attempt=1, checkpoints=(FIRST,), at=1.0)
    store.append(JOB, kept)
    newer.acquire_attempt(JOB, "second")
    with pytest.raises(Fenced):
        store.append(JOB, Pins(attempt=1, checkpoints=(), at=2.0))
    assert newest_pins(newer, JOB) == kept
    newer.append(JOB, Pins(attempt=2, checkpoints=(SECOND,), at=3.0))
    assert newest_pins(newer, JOB).checkpoints == (SECOND,)


def test_a_note_of_pins_that_cannot_be_read_is_no_note_of_none(store, url):
    store.append(JOB, Pins(attempt=1, checkpoints=(FIRST,), at=1.0))
    later = f"{JOB}/pins/00000001-000009.json"
    if hasattr(store, "root"):
        (store.root / later).write_bytes(b"{")
    else:
        store.bucket.put_new(later, b"{")
    with pytest.raises(OSError, match=r"is not a (Holdfast )?record"):
        newest_pins(open_store(url), JOB)


def test_a_file_of_another_jobs_checkpoint_stands_in_a_new_one_and_outlives_it(store):
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
    again.abort()
    assert store.checkpoints("other") == [SECOND]


def test_what_is_adopted_and_not_committed_is_gone(store):
    commit(store)
    writer = store.begin(JOB, SECOND, 1, 0)
    writer.copy_file(JOB, FIRST, FILE)
    writer.abort()
    assert (leftovers(store), store.checkpoints(JOB), read(store)) == ([], [FIRST], b"tensors")


def test_a_hold_stands_until_it_is_taken_back(store, url):
    commit(store)
    assert store.records(JOB, Hold) == []
    holds = [Hold(uid=uid, checkpoint=FIRST, at=1.0) for uid in ("one", "two")]
    for each in holds:
        store.append(JOB, each)
    assert open_store(url).records(JOB, Hold) == holds
    store.acquire_attempt(JOB, "second")  # whoever copies is no attempt of the job's
    open_store(url).remove_record(JOB, holds[0].name)
    assert store.records(JOB, Hold) == holds[1:]


def notes_of_pins(store):
    if hasattr(store, "root"):
        return [path.name for path in (store.root / JOB / "pins").iterdir()]
    return [name.rpartition("/")[2] for name in store.bucket.sizes(f"{JOB}/pins/")]


def test_a_large_payload_comes_back_in_any_ranges_on_several_threads(store):
    data = random.Random(1).randbytes(40 * MIB + 12_345)
    parts = [data[:4096], memoryview(data)[4096 : 30 * MIB], b"", memoryview(data)[30 * MIB :]]
    paced = []
    writer = store.begin(JOB, FIRST, 1, len(data))
    writer.write(FILE, parts, pace=paced.append)
    writer.commit(b"{}")
    assert sum(paced) == len(data)
    assert len(paced) > 1
    found = bytearray(len(data))
    cuts = [0, 1, 4096, 17 * MIB - 1, 17 * MIB, 33 * MIB, len(data)]

    def fetch(start, end):
        file.read_into(start, memoryview(found)[start:end])

    with store.open_file(JOB, FIRST, FILE) as file:
        assert file.size_bytes == len(data)
        threads = [threading.Thread(target=fetch, args=pair) for pair in itertools.pairwise(cuts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with pytest.raises(DamagedCheckpoint, match="ends at byte"):
            file.read_into(len(data) - 5, memoryview(bytearray(10)))
    assert found == data


def test_a_write_that_its_pace_breaks_off_leaves_nothing(store):
    class TrainingEnded(Exception):
        pass

    def pace(size_bytes):
        nonlocal left
        left -= 1
        if not left:
            raise TrainingEnded

    left = 2
    writer = store.begin(JOB, FIRST, 1, 40 * MIB)
    with pytest.raises(TrainingEnded):
        writer.write(FILE, [bytes(40 * MIB)], pace=pace)
    writer.abort()
    assert (store.checkpoints(JOB), leftovers(store)) == ([], [])


def test_a_missing_file_is_named(store):
    commit(store)
    with pytest.raises(DamagedCheckpoint, match=r"rank-1\.safetensors"):
        store.open_file(JOB, FIRST, "rank-1.safetensors")


def test_what_several_processes_write_in_one_place_is_one_checkpoint(store):
    writer = prepared(store)
    others = open_store(store.url)
    part = joined(others, writer.folder)
    assert part.folder == writer.folder
    assert store.checkpoints(JOB) == []
    writer.make_durable()
    writer.commit(b"{}")
    part.abort()
    assert (store.checkpoints(JOB), leftovers(store)) == ([FIRST], [])
    assert (read(store), read(store, file=OTHER_FILE)) == (b"tensors", b"others")
    assert read(others, file=OTHER_FILE) == b"others"


def test_the_process_that_has_begun_a_checkpoint_may_also_join_it(store):
    writer = store.begin(JOB, FIRST, 1, 13)
    part = store.join(JOB, FIRST, 1, writer.folder, 7)
    part.write(FILE, [b"tensors"])
    writer.commit(b"{}")
    assert read(store) == b"tensors"


def test_only_the_process_that_has_begun_a_checkpoint_commits_or_removes_it(store):
    writer = prepared(store)
    part = joined(open_store(store.url), writer.folder)
    with pytest.raises(AssertionError, match="the process that began"):
        part.commit(b"{}")
    part.abort()
    assert store.checkpoints(JOB) == []
    writer.commit(b"{}")
    assert read(store, file=OTHER_FILE) == b"others"


def test_what_others_wrote_goes_with_a_checkpoint_that_is_aborted(store):
    writer = prepared(store)
    joined(open_store(store.url), writer.folder)
    writer.abort()
    assert (store.checkpoints(JOB), leftovers(store)) == ([], [])
    again = prepared(store)
    joined(open_store(store.url), again.folder, data=b"anew")
    again.commit(b"{}")
    assert read(store, file=OTHER_FILE) == b"anew"


def test_a_checkpoint_that_is_aborted_while_others_write_never_comes_to_be(store):
    writer = prepared(store)
    part = open_store(store.url).join(JOB, FIRST, 1, writer.folder, 40 * MIB)
    with contextlib.suppress(OSError):
        part.write(OTHER_FILE, [bytes(40 * MIB)], pace=lambda _: writer.abort())
        part.make_durable()
    assert store.checkpoints(JOB) == []
    commit(store, data=b"another")
    store.acquire_attempt(JOB, "second")
    assert (store.checkpoints(JOB), leftovers(store)) == ([FIRST], [])
    assert read(store) == b"another"
    with pytest.raises(DamagedCheckpoint):
        store.open_file(JOB, FIRST, OTHER_FILE)


def test_what_several_left_half_done_goes_with_the_next_attempt(store):
    place = prepared(store).folder
    others = open_store(store.url)
    part = joined(others, place)
    newer = open_store(store.url)
    newer.acquire_attempt(JOB, "second")
    assert (newer.checkpoints(JOB), leftovers(newer)) == ([], [])
    with pytest.raises(Fenced, match="attempt 2 of job has started"):
        others.join(JOB, FIRST, 1, place, 7)
    with contextlib.suppress(Fenced):  # a bucket takes it, and nobody reads it
        part.write("rank-2.safetensors", [b"late"])
        part.make_durable()
    newer.acquire_attempt(JOB, "third")
    assert (newer.checkpoints(JOB), leftovers(newer)) == ([], [])


def test_a_place_that_nobody_can_have_begun_is_refused(store):
    place = prepared(store).folder
    of_another = place.replace("00000001", "00000002", 1)
    for wrong in (
        "", ".", "..", f"../{place}", f"{place}/..", f"/{place}", f"{place}\0", f"{place}\n", f"{place}x",
        of_another, FIRST, "attempts",
    ):  # fmt: skip
        with pytest.raises(
            ValueError, match=r"is not a (directory|folder) in which attempt 1 writes 000000000001-1"
        ):
            store.join(JOB, FIRST, 1, wrong, 7)
