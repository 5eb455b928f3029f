"""Repairs of checkpoints that share a file, cut at every point; test_crash_matrix.py cuts their commits."""

import errno
import itertools
import mmap
import random
import shutil

import pytest

from holdfast.checkpoint import restore
from holdfast.checkpoint.scrub import scrub
from holdfast.format import manifest as fmt
from holdfast.format.parity_file import ParityCode
from holdfast.protocol.ids import checkpoint_id
from holdfast.save.draft import Draft
from holdfast.save.writer import write_checkpoint
from holdfast.store.local import LocalStore
from tests.support.simulated_files import (
    FailingFiles,
    SimulatedProcessDeath,
    crash_states,
    plant,
)

JOB = "job"
BASE = random.Random(0).randbytes(fmt.BLOCK_BYTES + 100)
CODE = ParityCode(2, 1)
FIRST, SECOND, THIRD = (checkpoint_id(iteration, 1) for iteration in (1, 2, 3))
SHARED = f"rank-0.{FIRST}.safetensors"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """As many kinds of write in a file of a few blocks as there are in one of a gigabyte."""
    monkeypatch.setattr("holdfast.store.local_writer.WRITE_BYTES", fmt.BLOCK_BYTES)
    monkeypatch.setattr("holdfast.store.local_writer.DIRECT_BYTES", fmt.BLOCK_BYTES)
    monkeypatch.setattr("holdfast.save.reuse.MIN_SHARED_BYTES", 1)


def commit(store, iteration, parent=None, attempt=1, parity=None):
    """Commit the base and an adapter as it is after `iteration`."""
    slots = fmt.lay_out([("base", "U8", (len(BASE),)), ("adapter", "U8", (8,))])
    payload = memoryview(mmap.mmap(-1, slots[-1].end))
    for slot in slots:
        payload[slot.start : slot.end] = BASE if slot.name == "base" else adapter(iteration)
    draft = Draft(
        job=JOB, iteration=iteration, lineage=1, attempt=attempt, kind="scheduled", created_at=0.0, parent=parent,
        world_size=1, parity=parity, slots=slots, unchanged={"base"},
    )  # fmt: skip
    return write_checkpoint(store, draft, payload)


def adapter(iteration):
    return bytes([iteration]) * 8


def require_sound(store):
    """Load every listed checkpoint; return the list."""
    there = store.checkpoints(JOB)
    for checkpoint in there:
        found = restore.load(store, JOB, checkpoint).tensors
        iteration = int(checkpoint.partition("-")[0])
        assert bytes(found["base"].numpy()) == BASE
        assert bytes(found["adapter"].numpy()) == adapter(iteration)
        restore.verify(store, JOB, checkpoint)
    return there


class Judge:
    """Plants states of a disk and looks at them; each state once."""

    def __init__(self, place, look):
        self.place, self.look, self.seen = place, look, {}

    def outcomes(self, files, point):
        for tree in crash_states(files, point):
            if (key := repr(tree)) not in self.seen:
                shutil.rmtree(self.place, ignore_errors=True)
                plant(tree, self.place)
                self.seen[key] = self.look(LocalStore(self.place / "store"))
            yield self.seen[key]


def test_a_second_try_after_a_failed_device_writes_all(memory, monkeypatch):
    store = LocalStore(memory / "store")
    store.acquire_attempt(JOB, "uid")
    commit(store, 1)
    rename, failed = store.files.rename, []

    def fail_once(source, target):
        if not failed:
            failed.append(target)
            raise OSError(errno.EIO, "the device failed")
        return rename(source, target)

    monkeypatch.setattr(store.files, "rename", fail_once)
    commit(store, 2, FIRST)
    assert failed
    assert [file.name for file in restore.manifest(store, JOB, SECOND).files] == ["rank-0.safetensors"]
    assert require_sound(store) == [FIRST, SECOND]


@pytest.fixture
def damaged(begun):
    """Three checkpoints that share a damaged file, which its parity file can repair."""
    pytest.importorskip("numpy")

    def make():
        store, files = begun()
        before = len(files.log)
        commit(store, 1, parity=CODE)
        commit(store, 2, FIRST, parity=CODE)
        commit(store, 3, SECOND, parity=CODE)
        path = store.path(JOB, FIRST) / SHARED
        broken = bytearray(path.read_bytes())
        broken[-1] ^= 1
        descriptor = files.open(path)
        inode = files._inodes[path]
        for at, entry in enumerate(files.log[before:], before):  # the disk damaged what was written
            change = getattr(entry, "change", None)
            if entry.inode == inode and isinstance(change, tuple) and change[0] + len(change[1]) == len(broken):
                files.log[at] = entry._replace(change=(change[0], bytes(broken[change[0] :])))
        files.close(descriptor)
        path.write_bytes(broken)
        return store, files

    return make


def states(store):
    return {scrub(store, JOB, each).state for each in (FIRST, SECOND, THIRD)}


def test_no_power_cut_during_a_repair_of_a_shared_file_loses_what_could_be_repaired(damaged, memory):
    store, files = damaged()
    assert states(store) == {"repairable"}
    before = len(files.log)
    assert scrub(store, JOB, SECOND, repair=True).state == "repaired"
    judge = Judge(memory / "after", states)
    for point in range(before, len(files.log)):
        for found in judge.outcomes(files, point):
            assert found <= {"repairable", "sound"}
    assert list(judge.outcomes(files, len(files.log))) == [{"sound"}]
    assert len(judge.seen) > 10


def test_a_killed_repair_of_a_shared_file_is_completed_by_the_next(damaged):
    for number in itertools.count(1):
        store, files = damaged()
        files.dies_at, files.changes = number, 0
        try:
            scrub(store, JOB, SECOND, repair=True)
        except SimulatedProcessDeath:
            files.revive()
        else:
            break
        assert states(store) <= {"repairable", "sound"}
        for checkpoint in FIRST, SECOND, THIRD:
            assert scrub(store, JOB, checkpoint, repair=True).state in ("repaired", "sound")
        assert states(store) == {"sound"}
        assert not list((store.root / JOB).glob("*/.repair-*"))
        assert require_sound(store) == [FIRST, SECOND, THIRD]
    assert number > 10


@pytest.mark.parametrize("error", [errno.EIO, errno.EMLINK], ids=errno.errorcode.get)
def test_a_repair_that_cannot_link_repairs_its_own_checkpoint(damaged, error):
    store, _ = damaged()
    plain = LocalStore(store.root, FailingFiles(("link",), 1, error, always=True))
    assert scrub(plain, JOB, SECOND, repair=True).state == "repaired"
    left = {each: scrub(store, JOB, each).state for each in (FIRST, SECOND, THIRD)}
    assert left == {FIRST: "repairable", SECOND: "sound", THIRD: "repairable"}
    assert scrub(store, JOB, THIRD, repair=True).state == "repaired"
    assert states(store) == {"sound"}
