import contextlib
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
from holdfast.store.local import LocalStore
from holdfast.system.files import Files
from holdfast.testing.small_checkpoints import FIRST, JOB, SECOND, commit, read
from tests.support.simulated_files import FailingFiles


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path / "store")
    store.acquire_attempt(JOB, "first")
    return store


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
    # its temporary directory went with the start of attempt 2
    with pytest.raises(Fenced, match="attempt 2 of job has started"):
        old.write("rank-0.safetensors", [b"tensors"])
    with pytest.raises(Fenced, match="attempt 2 of job has started"):
        old.commit(b"{}")
    assert store.checkpoints(JOB) == [FIRST]


def test_an_attempt_that_is_fenced_before_it_syncs_what_it_wrote_says_so(tmp_path):
    class Overtaken(Files):
        def sync_directory(self, path):
            if path.name.startswith(".tmp-"):
                open_store(tmp_path / "store").acquire_attempt(JOB, "second")
            super().sync_directory(path)

    store = LocalStore(tmp_path / "store", Overtaken())
    store.acquire_attempt(JOB, "first")
    with pytest.raises(Fenced, match="attempt 2 of job has started"):
        commit(store)
    assert (store.checkpoints(JOB), leftovers(store)) == ([], [])


def test_a_directory_that_went_without_a_newer_attempt_is_missed_by_its_name(store):
    writer = store.begin(JOB, FIRST, 1, 7)
    shutil.rmtree(writer._temporary)
    with pytest.raises(FileNotFoundError, match=writer._temporary.name):
        writer.write("rank-0.safetensors", [b"tensors"])


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
    store.append(JOB, lineage)
    with pytest.raises(FileExistsError):
        store.append(JOB, lineage)
    assert store.records(JOB, Lineage) == [lineage]


def test_a_damaged_checkpoint_makes_way_for_the_sound_one(store):
    commit(store)
    with pytest.raises(FileExistsError):
        commit(store, data=b"unasked")
    commit(store, data=b"again!!", replace=True)
    assert read(store) == b"again!!"
    assert len(set_aside(store)) == 1


def set_aside(store):
    return [p.name for p in (store.root / JOB).iterdir() if ".damaged-" in p.name]


def test_what_was_set_aside_is_kept_to_be_looked_at_until_the_next_start(store):
    commit(store)
    commit(store, replace=True)
    commit(store, replace=True)
    assert len(set_aside(store)) == 2
    attempt = store.acquire_attempt(JOB, "second").number
    assert set_aside(store) == []
    commit(store, attempt=attempt, replace=True)
    assert len(set_aside(store)) == 1


def test_the_next_start_removes_only_what_attempts_before_it_left(store):
    job = store.root / JOB
    for name in (
        ".tmp-00000001-x",
        ".tmp-00000002-x",
        ".tmp-00000005-x",
        ".tmp-mine",
        f"{FIRST}.damaged-mine",
        "notes",
    ):
        (job / name).mkdir()
    (job / "lineages" / ".000001.json-0a").write_text("half a rec")
    store.acquire_attempt(JOB, "second")
    assert sorted(p.name for p in job.iterdir() if p.name not in (".lock", "attempts", "endings", "lineages")) == [
        ".tmp-00000002-x", ".tmp-00000005-x", ".tmp-mine", f"{FIRST}.damaged-mine", "notes",
    ]  # fmt: skip
    assert list((job / "lineages").iterdir()) == []


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


def test_a_small_checkpoint_without_room_is_named_with_its_size(store, monkeypatch):
    usage = shutil.disk_usage(store.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=197_000))
    with pytest.raises(OSError, match="197 kB free, too little for a checkpoint of 255 kB"):
        store.begin(JOB, FIRST, 1, 255_000)


def test_a_process_that_joins_needs_room_for_its_part(store, monkeypatch):
    writer = store.begin(JOB, FIRST, 1, 7)
    usage = shutil.disk_usage(store.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    with pytest.raises(OSError, match="1 MB free, too little for a checkpoint of 5 MB"):
        store.join(JOB, FIRST, 1, writer.folder, 5_000_000)


def test_a_place_that_another_host_does_not_see_is_told_with_the_way_out(store, tmp_path):
    writer = store.begin(JOB, FIRST, 1, 7)
    elsewhere = open_store(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match="all ranks need the same store") as caught:
        elsewhere.join(JOB, FIRST, 1, writer.folder, 7)
    assert caught.value.filename == str(elsewhere.root / JOB / writer.folder)
    assert not elsewhere.root.exists()


def test_a_place_is_that_of_one_checkpoint(store):
    place = store.begin(JOB, FIRST, 1, 7).folder
    with pytest.raises(ValueError, match=f"not a directory in which attempt 1 writes {SECOND}"):
        store.join(JOB, SECOND, 1, place, 7)


def test_nothing_stays_of_what_is_written_while_the_checkpoint_is_aborted(store):
    class Meanwhile(Files):
        """Others make files while it is removed."""

        def remove_directory(self, path):
            for name in ("late-1", "late-2"):
                with pytest.raises(FileNotFoundError):
                    part.write(name, [b"bytes"])
            super().remove_directory(path)

    store.files = Meanwhile()
    writer = store.begin(JOB, FIRST, 1, 7)
    part = LocalStore(store.root).join(JOB, FIRST, 1, writer.folder, 7)
    part.write("rank-1.safetensors", [b"early"])
    writer.abort()
    assert leftovers(store) == []
    with pytest.raises(FileNotFoundError):
        part.make_durable()


def test_what_is_cut_short_in_aborting_goes_with_the_next_attempt(store):
    class Stuck(Files):
        def remove_directory(self, path):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    store.files = Stuck()
    store.begin(JOB, FIRST, 1, 7).abort()
    assert len(leftovers(store)) == 1
    store.files = Files()
    store.acquire_attempt(JOB, "second")
    assert leftovers(store) == []


def test_a_store_where_no_directory_can_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Not a directory"):
        open_store(tmp_path / "file" / "store").acquire_attempt(JOB, "x")


def test_the_store_needs_no_torch():
    probe = "import holdfast.store, holdfast.format.manifest, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe]).returncode == 0


CHANGES = (
    "make_directory", "create", "write", "sync", "close", "rename", "link", "unlink", "remove_directory",
    "sync_directory", "lock",
)  # fmt: skip


class DyingFiles(Files):
    """Ends the process at the `point`-th call that changes the disk: no handler runs, nothing is tidied up."""

    def __init__(self, point):
        self.left = point
        for name in CHANGES:
            setattr(self, name, self._dying(getattr(self, name)))

    def _dying(self, real):
        def call(*args):
            self.left -= 1
            if not self.left:
                os._exit(9)
            return real(*args)

        return call


def save_two_and_delete_one(root, files, tell):
    store = LocalStore(root, files)
    attempt = store.acquire_attempt(JOB, "crash").number
    for checkpoint in (FIRST, SECOND):
        commit(store, checkpoint, attempt, b"payload")
        os.write(tell, f"{checkpoint}\n".encode())
    store.delete(JOB, FIRST, attempt)


def exit_code_and_acknowledged(root, point):
    """Of a process that dies at a point, and of what it was told is durable."""
    listen, tell = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            save_two_and_delete_one(root, DyingFiles(point), tell)
            os._exit(0)
        os._exit(1)
    os.close(tell)
    with open(listen) as told:
        acknowledged = told.read().split()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), acknowledged


def test_no_crash_point_loses_what_was_acknowledged_or_shows_what_was_not_written(tmp_path):
    """Dies at the 1st, 2nd, 3rd … call that changes the disk, until a run gets through."""
    for point in itertools.count(1):
        code, acknowledged = exit_code_and_acknowledged(tmp_path / str(point), point)
        store = open_store(tmp_path / str(point))
        present = store.checkpoints(JOB)
        assert set(acknowledged[-1:]) <= set(present)
        for checkpoint in present:
            assert read(store, checkpoint) == b"payload"
        store.acquire_attempt(JOB, "next")
        assert leftovers(store) == []
        if code == 0:
            break
        assert code == 9
    assert point > 40


def test_a_record_that_is_none_is_passed_over(store, caplog):
    lineage = Lineage(number=2, iteration=0, parent=None, order=None, attempt=1, created_at=1.0)
    store.append(JOB, lineage)
    (store.root / JOB / "lineages" / "000001.json").write_text("")
    (store.root / JOB / "attempts" / "00000001 copy.json").write_text("{}")
    (store.root / "README").write_text("")
    assert store.records(JOB, Lineage) == [lineage]
    assert "000001.json is not a Holdfast record" in caplog.text
    assert store.latest_attempt(JOB) == 1
    assert store.jobs() == [JOB]


class LostAnswers(Files):
    """A network file system that does as it is asked, loses the answer, and reports what asking again gave."""

    def rename(self, source, target):
        super().rename(source, target)
        super().rename(source, target)

    def link(self, source, target):
        super().link(source, target)
        super().link(source, target)


def test_what_was_done_though_the_file_system_says_that_it_failed_counts_as_done(tmp_path):
    store = LocalStore(tmp_path / "store", LostAnswers())
    assert store.acquire_attempt(JOB, "uid").number == 1
    commit(store)
    commit(store, data=b"again!!", replace=True)
    assert read(store) == b"again!!"
    store.delete(JOB, FIRST, 1)
    assert store.checkpoints(JOB) == []


def test_a_rename_that_failed_is_a_failure(store):
    store.files = FailingFiles(("rename",), 1, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        commit(store)
    assert store.checkpoints(JOB) == []


@pytest.mark.parametrize("error", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_without_links_keeps_records_too(tmp_path, error):
    store = LocalStore(tmp_path / "store", FailingFiles(("link",), 1, error, always=True))
    assert [store.acquire_attempt(JOB, uid).number for uid in "abc"] == [1, 2, 3]
    lineage = Lineage(number=1, iteration=0, parent=None, order=None, attempt=3, created_at=1.0)
    store.append(JOB, lineage)
    with pytest.raises(FileExistsError):
        store.append(JOB, lineage)
    assert store.records(JOB, Lineage) == [lineage]


class NoLocks(Files):
    """Locks that do not reach from host to host: another takes each number first."""

    def __init__(self, taken):
        self.taken = taken

    def link(self, source, target):
        if self.taken:
            self.taken -= 1
            target.write_text("another's")
        super().link(source, target)


def test_two_that_start_at_once_without_a_lock_between_them_get_different_numbers(tmp_path):
    assert LocalStore(tmp_path / "store", NoLocks(taken=2)).acquire_attempt(JOB, "uid").number == 3


def test_a_job_whose_directory_was_removed_is_saved_all_the_same(store):
    shutil.rmtree(store.root)
    commit(store)
    assert (store.jobs(), store.checkpoints(JOB)) == ([JOB], [FIRST])


def test_a_directory_above_the_store_that_cannot_be_opened_is_no_hindrance(tmp_path):
    files = FailingFiles(("sync_directory",), 1, errno.EACCES)
    store = LocalStore(tmp_path / "store", files)
    assert store.acquire_attempt(JOB, "uid").number == 1
    assert files.failed == 1
    with pytest.raises(PermissionError, match="Permission denied"):
        LocalStore(tmp_path / "store", FailingFiles(("sync_directory",), 2, errno.EACCES)).acquire_attempt(
            JOB, "x"
        )


class HurriedFiles(Files):
    """Its time passes only when somebody sleeps."""

    time = 0.0

    def clock(self):
        return self.time

    def sleep(self, seconds):
        self.time += seconds


def test_a_lock_that_a_stopped_process_holds_is_given_up_after_a_while(store):
    files = HurriedFiles()
    with (
        store.fenced(JOB, 1),
        pytest.raises(BlockingIOError, match="held the lock for 10 s; check whether it is stopped"),
    ):
        LocalStore(store.root, files).acquire_attempt(JOB, "second")
    assert 10 <= files.time < 11
    assert store.acquire_attempt(JOB, "second").number == 2


def test_a_file_system_without_locks_is_named_with_the_way_out(store, monkeypatch):
    def flock(fd, how):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match=r"mount the file system with support for locks.*\.lock"):
        store.acquire_attempt(JOB, "second")


def test_a_checkpoint_that_may_not_last_is_withdrawn(store):
    store.files = FailingFiles(("sync_directory",), 2, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        commit(store)
    assert store.checkpoints(JOB) == []
    commit(store)
    assert read(store) == b"tensors"


def test_a_worker_forked_while_the_lock_is_held_does_not_keep_it(store):
    ready, go = os.pipe(), os.pipe()
    with store.fenced(JOB, 1):
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


@pytest.fixture
def syncs(monkeypatch):
    """What is synced and renamed, in order."""
    log, names = [], {}

    def opened(path, *args, _real=os.open, **kwargs):
        fd = _real(path, *args, **kwargs)
        names[fd] = os.path.basename(path)
        return fd

    def fsync(fd, _real=os.fsync):
        log.append(("fsync", names[fd]))
        _real(fd)

    def rename(source, target, _real=os.rename, **directories):
        log.append(("rename", os.path.basename(target)))
        _real(source, target, **directories)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    return log


def test_commit_syncs_files_then_their_directory_then_renames_then_syncs_the_parent(store, syncs):
    writer = store.begin(JOB, FIRST, 1, 7)
    writer.write("rank-0.safetensors", [b"tensors"])
    writer.commit(b"{}")
    temporary = writer._temporary.name
    assert syncs == [
        ("fsync", "rank-0.safetensors"), ("fsync", "manifest.json"), ("fsync", temporary), ("rename", FIRST),
        ("fsync", JOB),
    ]  # fmt: skip


def test_what_has_settled_is_synced_with_its_name(store, syncs):
    place = store.begin(JOB, FIRST, 1, 7).folder
    writer = store.join(JOB, FIRST, 1, place, 7)
    writer.write("rank-1.safetensors", [b"tensors"])
    writer.make_durable()
    assert syncs == [("fsync", "rank-1.safetensors"), ("fsync", place)]
