import errno
import fcntl
import itertools
import os
import shutil
import subprocess
import sys

import pytest

from holdfast.errors import DamagedCheckpoint, Fenced
from holdfast.store import Lineage, open_store
from holdfast.store.retention import expendable

JOB = "job"
FIRST = "000000000001-1"


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path / "store")
    store.acquire_attempt(JOB, "first")
    return store


def commit(store, checkpoint=FIRST, attempt=1, data=b"tensors", **options):
    writer = store.begin(JOB, checkpoint, attempt, len(data))
    writer.write("rank-0.safetensors", [data[:3], memoryview(data)[3:]])
    writer.commit(b"{}", **options)


def read(store, checkpoint=FIRST):
    with store.open_file(JOB, checkpoint, "rank-0.safetensors") as file:
        data = bytearray(file.size_bytes)
        file.read_into(0, memoryview(data))
    return bytes(data)


def leftovers(store):
    return [p.name for p in (store.root / JOB).iterdir() if p.name.startswith(".tmp")]


def test_a_checkpoint_is_invisible_until_it_is_committed(store):
    writer = store.begin(JOB, FIRST, 1, 7)
    writer.write("rank-0.safetensors", [b"tensors"])
    assert store.checkpoints(JOB) == []
    writer.commit(b"{}")
    assert store.checkpoints(JOB) == [FIRST]
    assert read(store) == b"tensors"
    assert leftovers(store) == []


def test_checkpoints_are_listed_by_iteration_then_lineage(store):
    for checkpoint in ("000000000010-2", "000000000010-11", "000000000009-3"):
        commit(store, checkpoint)
    (store.root / JOB / "notes").mkdir()
    assert store.checkpoints(JOB) == ["000000000009-3", "000000000010-2", "000000000010-11"]
    assert store.jobs() == [JOB]


def test_an_aborted_checkpoint_leaves_nothing(store):
    writer = store.begin(JOB, FIRST, 1, 7)
    writer.write("rank-0.safetensors", [b"tensors"])
    writer.abort()
    assert (store.checkpoints(JOB), leftovers(store)) == ([], [])


def test_an_older_attempt_commits_and_deletes_nothing(store):
    commit(store)
    old = store.begin(JOB, "000000000002-1", 1, 7)
    assert store.acquire_attempt(JOB, "second").number == 2
    with pytest.raises(Fenced, match="attempt 2 of job has started"):
        store.delete(JOB, FIRST, attempt=1)
    with pytest.raises(FileNotFoundError):  # its temporary directory went with the start of attempt 2
        old.write("rank-0.safetensors", [b"tensors"])
    assert store.checkpoints(JOB) == [FIRST]


def test_a_fenced_attempt_that_had_everything_written_still_commits_nothing(store, tmp_path):
    old = store.begin(JOB, FIRST, 1, 7)
    old.write("rank-0.safetensors", [b"tensors"])
    aside = tmp_path / "aside"
    os.rename(old._temporary, aside)
    store.acquire_attempt(JOB, "second")
    os.rename(aside, old._temporary)  # as if attempt 2 had not cleaned up
    with pytest.raises(Fenced):
        old.commit(b"{}")
    assert store.checkpoints(JOB) == []


def test_attempts_count_up_past_what_a_server_has_seen(store):
    assert store.acquire_attempt(JOB, "x", at_least=40).number == 40
    assert store.acquire_attempt(JOB, "y").number == 41
    assert store.latest_attempt(JOB) == 41


def test_a_lineage_is_noted_once(store):
    lineage = Lineage(number=1, iteration=0, parent=None, order="o", attempt=1, created_at=1.0)
    store.begin_lineage(JOB, lineage)
    with pytest.raises(FileExistsError):
        store.begin_lineage(JOB, lineage)
    assert store.lineages(JOB) == [lineage]


def test_a_damaged_checkpoint_makes_way_for_the_sound_one(store):
    commit(store)
    with pytest.raises(FileExistsError):
        commit(store, data=b"unasked")
    commit(store, data=b"again!!", replace=True)
    assert read(store) == b"again!!"
    assert len([p for p in (store.root / JOB).iterdir() if ".damaged-" in p.name]) == 1


def test_a_missing_file_is_named(store):
    commit(store)
    os.unlink(store.root / JOB / FIRST / "rank-0.safetensors")
    with pytest.raises(DamagedCheckpoint, match=r"rank-0\.safetensors: No such file"):
        read(store)


def test_no_room_is_known_before_anything_is_written(store, monkeypatch):
    usage = shutil.disk_usage(store.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    with pytest.raises(OSError, match="1 MB free, too little for a checkpoint of 5 MB") as caught:
        store.begin(JOB, FIRST, 1, 5_000_000)
    assert caught.value.errno == errno.ENOSPC
    assert leftovers(store) == []


def test_a_store_where_no_directory_can_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Not a directory"):
        open_store(tmp_path / "file" / "store").acquire_attempt(JOB, "x")


def test_other_kinds_of_address_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"s3://bucket.*give a path"):
        open_store("s3://bucket/prefix")


def test_the_store_needs_no_torch():
    probe = "import holdfast.store, holdfast.format, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe]).returncode == 0


KILL_AT = """
import os, sys
sys.path[:0] = {path!r}
from holdfast.store import open_store
calls = 0
def crashing(name):
    real = getattr(os, name)
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == {point}:
            os._exit(9)
        return real(*args, **kwargs)
    return call
store = open_store({root!r})
attempt = store.acquire_attempt("job", "crash").number
for name in ("open", "write", "fsync", "rename", "mkdir", "unlink", "link", "close"):
    setattr(os, name, crashing(name))
for iteration in (1, 2):
    checkpoint = f"{{iteration:012d}}-1"
    writer = store.begin("job", checkpoint, attempt, 7)
    writer.write("rank-0.safetensors", [b"payload"])
    writer.commit(b"{{}}")
    sys.stdout.write(checkpoint + "\\n"); sys.stdout.flush()
store.delete("job", "000000000001-1", attempt)
"""


def test_no_crash_point_loses_what_was_acknowledged_or_shows_what_was_not_written(tmp_path):
    """Dies at the 1st, 2nd, 3rd … call that changes the disk, until a run gets through."""
    point = 0
    while True:
        point += 1
        root = tmp_path / str(point)
        script = KILL_AT.format(path=sys.path, root=str(root), point=point)
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        store = open_store(root)
        acknowledged, present = run.stdout.split(), store.checkpoints(JOB)
        assert set(acknowledged[-1:]) <= set(present)
        for checkpoint in present:
            assert read(store, checkpoint) == b"payload"
        store.acquire_attempt(JOB, "next")
        assert leftovers(store) == []
        if run.returncode == 0:
            break
        assert run.returncode == 9, run.stderr
    assert point > 20


def ids(*iterations):
    return [f"{i:012d}-1" for i in iterations]


def test_retention_keeps_the_newest_and_spaces_the_rest_ever_further_apart():
    kept, keep = [], 8
    for iteration in range(10, 5000, 10):
        kept += ids(iteration)
        gone = expendable(kept, keep)
        kept = [c for c in kept if c not in gone]
    assert kept[-4:] == ids(4960, 4970, 4980, 4990)
    assert len(kept) == keep
    iterations = [int(c[:12]) for c in kept]
    gaps = [b - a for a, b in itertools.pairwise(iterations)]
    assert gaps[0] > 100
    assert gaps[0] == max(gaps)


def test_retention_never_takes_what_is_protected():
    checkpoints = ids(1, 2, 3, 4, 5, 6)
    left = set(checkpoints) - set(expendable(checkpoints, 2, protected=ids(1, 3)))
    assert left == set(ids(1, 3, 6))


def test_after_a_restore_what_is_trained_now_is_newer_than_what_was_left():
    left, now = ["000000000080-1", "000000000090-1"], ["000000000050-2", "000000000060-2"]
    assert set(expendable([*left, *now], keep=2)) == set(left)


def test_a_record_that_is_none_is_passed_over(store, caplog):
    lineage = Lineage(number=2, iteration=0, parent=None, order=None, attempt=1, created_at=1.0)
    store.begin_lineage(JOB, lineage)
    (store.root / JOB / "lineages" / "000001.json").write_text("")
    (store.root / JOB / "attempts" / "00000001 copy.json").write_text("{}")
    (store.root / "README").write_text("")
    assert store.lineages(JOB) == [lineage]
    assert "000001.json is not a lineage's record" in caplog.text
    assert store.latest_attempt(JOB) == 1
    assert store.jobs() == [JOB]


def test_a_worker_forked_while_the_lock_is_held_does_not_keep_it(store):
    ready, go = os.pipe(), os.pipe()
    with store.only_newest(JOB, 1):
        child = os.fork()
        if child == 0:
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
    try:
        with open(store.root / JOB / ".lock", "a") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError if the child still held it
    finally:
        os.write(go[1], b"x")
        os.waitpid(child, 0)


def test_commit_syncs_files_then_their_directory_then_renames_then_syncs_the_parent(store, monkeypatch):
    log, names = [], {}

    def opened(path, *args, _real=os.open, **kwargs):
        fd = _real(path, *args, **kwargs)
        names[fd] = os.path.basename(path)
        return fd

    def fsync(fd, _real=os.fsync):
        log.append(("fsync", names[fd]))
        _real(fd)

    def rename(source, target, _real=os.rename):
        log.append(("rename", os.path.basename(target)))
        _real(source, target)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    writer = store.begin(JOB, FIRST, 1, 7)
    writer.write("rank-0.safetensors", [b"tensors"])
    writer.commit(b"{}")
    temporary = writer._temporary.name
    assert log == [
        ("fsync", "rank-0.safetensors"), ("fsync", "manifest.json"), ("fsync", temporary), ("rename", FIRST),
        ("fsync", JOB),
    ]  # fmt: skip
