"""Whatever call fails: what is committed stays, the error comes out, and the next checkpoint is good."""

import errno
import itertools
import mmap
import os
import re

import pytest

from holdfast.errors import Fenced
from holdfast.format.manifest import BLOCK_BYTES
from holdfast.store import Lineage
from holdfast.store.local import LocalStore
from holdfast.system.files import Files
from tests.support.simulated_files import FailingFiles

JOB, FILE = "job", "rank-0.safetensors"
FIRST, SECOND, THIRD, NEXT = "000000000001-1", "000000000002-1", "000000000003-1", "000000000004-1"
CHANGES = (
    "make_directory", "create", "reserve", "write", "start_writing", "wait_written", "truncate", "sync", "close",
    "rename", "link", "unlink", "remove_directory", "sync_directory", "set_direct", "forget", "lock", "free_bytes",
)  # fmt: skip
FAULTS = [
    *((call, errno.EIO) for call in CHANGES),
    ("make_directory", errno.ENOSPC), ("create", errno.ENOSPC), ("reserve", errno.ENOSPC), ("write", errno.ENOSPC),
    ("write", errno.EDQUOT), ("close", errno.EDQUOT), ("create", errno.EACCES), ("make_directory", errno.EROFS),
]  # fmt: skip


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr("holdfast.store.local_writer.WRITE_BYTES", BLOCK_BYTES)
    monkeypatch.setattr("holdfast.store.local_writer.DIRECT_BYTES", BLOCK_BYTES)


def payload(value):
    memory = memoryview(mmap.mmap(-1, 2 * BLOCK_BYTES + 10))
    memory[:] = bytes([value]) * len(memory)
    return memory


def save(store, checkpoint, value, attempt, **options):
    writer = store.begin(JOB, checkpoint, attempt, 3 * BLOCK_BYTES)
    try:
        writer.write(FILE, [b"header", payload(value)])
        writer.commit(b"{}", **options)
    except BaseException:  # as a backend does
        writer.abort()
        raise


def read(store, checkpoint):
    with store.open_file(JOB, checkpoint, FILE) as file:
        data = memoryview(bytearray(file.size_bytes))
        file.read_into(0, data)
    assert (bytes(data[:6]), len(data), len(set(data[6:]))) == (b"header", 6 + len(payload(0)), 1)
    return data[6]


def contents(store):
    return {checkpoint: read(store, checkpoint) for checkpoint in store.checkpoints(JOB)}


class FaultyStoreJob:
    """A job on a store that may fail it: what it asked for, and whether it was told that it has it."""

    def __init__(self, root, files):
        self.sound = LocalStore(root)
        self.attempt = self.sound.acquire_attempt(JOB, "sound").number
        save(self.sound, FIRST, 1, self.attempt)
        save(self.sound, SECOND, 2, self.attempt)
        self.store = LocalStore(root, files)
        self.got = {}
        self.unnamed = 0

    def live(self):
        self.ask("attempt", self.start)
        self.ask("lineage", self.begin_lineage)
        self.ask("third", lambda: save(self.store, THIRD, 3, self.attempt))
        self.ask("replaced", lambda: save(self.store, SECOND, 4, self.attempt, replace=True))
        self.ask("deleted", lambda: self.store.delete(JOB, FIRST, self.attempt))

    def ask(self, what, call):
        self.got[what] = False
        try:
            call()
            self.got[what] = True
        except OSError as error:
            self.unnamed += not error.filename
        except Fenced:
            assert not self.got["attempt"], "by its own attempt alone, of which it was told nothing"
        self.check()

    def check(self):
        got, found = self.got, contents(self.sound)
        assert found.get(FIRST) in {None: {1}, False: {1, None}, True: {None}}[got.get("deleted")]
        assert found.get(SECOND) in {None: {2}, False: {2, None}, True: {4}}[got.get("replaced")]
        assert found.get(THIRD) == (3 if got.get("third") else None)
        if got["attempt"]:
            assert self.sound.latest_attempt(JOB) == self.attempt
        if got.get("lineage"):
            assert [lineage.number for lineage in self.sound.records(JOB, Lineage)] == [1]

    def start(self):
        self.attempt = self.store.acquire_attempt(JOB, "failing").number

    def begin_lineage(self):
        lineage = Lineage(number=1, iteration=0, parent=None, order=None, attempt=self.attempt, created_at=0.0)
        self.store.append(JOB, lineage)


@pytest.mark.parametrize(
    ("direct", "always"),
    [(True, False), (True, True), (False, False)],
    ids=["once", "from then on", "once through the cache"],
)
@pytest.mark.parametrize(("call", "error"), FAULTS, ids=lambda value: errno.errorcode.get(value, value))
def test_no_fault_harms_what_is_committed_or_what_comes_after(memory, call, error, direct, always):
    for nth in itertools.count(1):
        files = FailingFiles((call,), nth, error, always=always, direct=direct)
        job = FaultyStoreJob(memory / str(nth), files)
        job.live()
        assert job.unnamed == 0, "which file?"
        before = contents(job.sound)
        attempt = job.sound.acquire_attempt(JOB, "after").number
        save(job.sound, NEXT, 9, attempt)
        assert contents(job.sound) == before | {NEXT: 9}
        assert [p for p in job.sound.root.rglob("*") if re.search(r"/\.tmp|/\.\d+\.json|damaged", str(p))] == []
        if not files.failed:
            break
    assert all(job.got.values())


def test_a_fault_while_nothing_else_goes_wrong_leaves_no_temporary_directory(tmp_path):
    for nth in itertools.count(1):
        files = FailingFiles(("write", "sync", "close", "truncate"), nth, errno.EIO)
        job = FaultyStoreJob(tmp_path / str(nth), files)
        job.ask("attempt", job.start)
        job.ask("third", lambda job=job: save(job.store, THIRD, 3, job.attempt))
        assert [p.name for p in (job.sound.root / JOB).iterdir() if p.name.startswith(".tmp")] == []
        if not files.failed:
            break
    assert nth > 8


class Unlucky(Files):
    """The first sync fails, and nothing else does."""

    def __init__(self):
        self.calls = []

    def create(self, path):
        self.calls.append("create")
        return super().create(path)

    def sync(self, fd):
        self.calls.append("sync")
        if self.calls.count("sync") == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(fd)


def test_after_a_failed_sync_the_bytes_are_written_to_a_new_file_and_the_old_one_is_not_synced_again(tmp_path):
    store = LocalStore(tmp_path / "store")
    attempt = store.acquire_attempt(JOB, "uid").number
    store.files = files = Unlucky()
    with pytest.raises(OSError, match="Input/output"):
        save(store, FIRST, 1, attempt)
    save(store, FIRST, 1, attempt)
    assert files.calls == ["create", "sync"] * 3
    assert read(store, FIRST) == 1
