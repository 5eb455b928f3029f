"""Incremental checkpoints, cut at every point by a power cut, a kill or an error."""

import contextlib
import errno
import itertools
import mmap
import random
import shutil

import pytest

pytest.importorskip("numpy")

from holdfast.checkpoint import restore
from holdfast.checkpoint.scrub import scrub
from holdfast.errors import HoldfastError
from holdfast.format import manifest as fmt
from holdfast.format.parity_file import ParityCode
from holdfast.incremental.planner import IncrementalPlanner
from holdfast.protocol.ids import checkpoint_id
from holdfast.save.draft import Draft
from holdfast.save.writer import write_checkpoint
from holdfast.store.local import LocalStore
from tests.support.simulated_files import FailingFiles, SimulatedProcessDeath, crash_states, plant

JOB = "job"
ROWS, ROW_BYTES = 40, 128
CODE = ParityCode(2, 1)
IDS = [checkpoint_id(iteration, 1) for iteration in range(7)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """As many kinds of write in a file of a few blocks as there are in one of a gigabyte."""
    monkeypatch.setattr("holdfast.store.local_writer.WRITE_BYTES", fmt.BLOCK_BYTES)
    monkeypatch.setattr("holdfast.store.local_writer.DIRECT_BYTES", fmt.BLOCK_BYTES)
    monkeypatch.setattr("holdfast.incremental.planner.LEAST_TENSOR_BYTES", ROW_BYTES)


def table(iteration):
    """The rows of the table after `iteration`: each iteration changes one of them."""
    rows = [random.Random(row).randbytes(ROW_BYTES) for row in range(ROWS)]
    for each in range(1, iteration + 1):
        rows[each * 7 % ROWS] = random.Random(-each).randbytes(ROW_BYTES)
    return b"".join(rows)


def commit(store, planner, iteration, parent=None, attempt=1, parity=None):
    slots = fmt.lay_out([("table", "U8", (ROWS, ROW_BYTES)), ("step", "U8", (8,))])
    payload = memoryview(mmap.mmap(-1, slots[-1].end))
    for slot in slots:
        payload[slot.start : slot.end] = table(iteration) if slot.name == "table" else bytes([iteration]) * 8
    draft = Draft(
        job=JOB, iteration=iteration, lineage=1, attempt=attempt, kind="scheduled", created_at=0.0, parent=parent,
        world_size=1, parity=parity, slots=slots,
    )  # fmt: skip
    written = write_checkpoint(store, draft, payload, planner=planner)
    planner.settle(draft.id, is_durable=True)
    return written


def require_sound(store):
    """Load and scrub every listed checkpoint; return the list."""
    there = store.checkpoints(JOB)
    for checkpoint in there:
        found, iteration = restore.load(store, JOB, checkpoint).tensors, int(checkpoint.partition("-")[0])
        assert bytes(found["table"].numpy()) == table(iteration)
        assert bytes(found["step"].numpy()) == bytes([iteration]) * 8
        assert scrub(store, JOB, checkpoint).state == "sound"
    return there


def train(store, acknowledged=lambda listed: None, parity=None):
    """A base, a region, and a region that is merged with it; retention removes the first checkpoints."""
    planner = IncrementalPlanner(True, most_regions=1)
    for iteration in range(1, 5):
        commit(store, planner, iteration, IDS[iteration - 1] if iteration > 1 else None, parity=parity)
        kept = IDS[max(1, iteration - 2) : iteration + 1]
        acknowledged(kept)
        acknowledged(kept[1:])  # from here on the oldest may be gone
        if iteration > 2:
            store.delete(JOB, kept[0], 1)


def test_each_checkpoint_has_all_files_that_it_needs(begun):
    store, _ = begun()
    train(store)
    assert require_sound(store) == IDS[3:5]
    files = {file.name: file.written_by for file in restore.manifest(store, JOB, IDS[4]).files}
    assert files == {
        f"rank-0.{IDS[1]}.base": IDS[1],
        f"rank-0.{IDS[4]}.rows": None,
        "rank-0.safetensors": None,
    }, "one region file, with the rows that changed since the base"


def test_no_power_cut_lists_a_checkpoint_that_is_not_whole_or_loses_one(begun, memory):
    store, files = begun()
    promised = [(len(files.log), set())]
    train(store, lambda listed: promised.append((len(files.log), set(listed))))
    seen, place = {}, memory / "after"
    for point in range(promised[0][0], len(files.log) + 1):
        kept = [listed for at, listed in promised if at <= point][-1]
        for tree in crash_states(files, point):
            if (key := repr(tree)) not in seen:
                shutil.rmtree(place, ignore_errors=True)
                plant(tree, place)
                seen[key] = set(require_sound(LocalStore(place / "store")))
            assert kept <= seen[key]
    assert len(seen) > 40


@pytest.mark.parametrize("parity", [None, CODE], ids=["plain", "parity"])
def test_a_killed_commit_or_removal_leaves_sound_checkpoints_and_the_next_attempt_goes_on(begun, parity):
    for number in itertools.count(1):
        store, files = begun()
        promised = [set()]
        files.dies_at, files.changes = number, 0
        try:
            train(store, lambda listed, promised=promised: promised.append(set(listed)), parity)
        except SimulatedProcessDeath:
            files.revive()
        else:
            break
        there = require_sound(store)
        assert promised[-1] <= set(there)
        attempt = store.acquire_attempt(JOB, "next").number
        planner, newest = IncrementalPlanner(True), max(there, default=None)
        for iteration in 6, 7:
            commit(store, planner, iteration, newest, attempt, parity)
        assert require_sound(store) == [*there, checkpoint_id(6, 1), checkpoint_id(7, 1)]
        written_by = [file.written_by for file in restore.manifest(store, JOB, checkpoint_id(7, 1)).files]
        assert set(written_by) == {None, checkpoint_id(6, 1)}, "a new process writes a new base"
        assert not list((store.root / JOB).glob(".tmp-*"))
    assert number > 60


@pytest.mark.parametrize("call", ["link", "create", "sync", "rename", "sync_directory"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EMLINK, errno.EXDEV], ids=errno.errorcode.get)
def test_an_error_of_any_call_leaves_sound_checkpoints(memory, call, error):
    for nth in itertools.count(1):
        root = memory / f"{nth}"
        sound = LocalStore(root)
        sound.acquire_attempt(JOB, "uid")
        files = FailingFiles((call,), nth, error)
        with contextlib.suppress(OSError, HoldfastError):
            train(LocalStore(root, files))
        there = require_sound(sound)
        if call == "link" and files.failed:
            assert there == IDS[3:5], "what cannot be linked is written"
        if not files.failed:
            break
    assert nth > 2


def test_a_second_try_after_a_failed_device_writes_all_and_is_not_linked_from(memory, monkeypatch):
    store, planner = LocalStore(memory / "store"), IncrementalPlanner(True)
    store.acquire_attempt(JOB, "uid")
    commit(store, planner, 1)
    rename, failed = store.files.rename, []

    def fail_once(source, target):
        if not failed:
            failed.append(target)
            raise OSError(errno.EIO, "the device failed")
        return rename(source, target)

    monkeypatch.setattr(store.files, "rename", fail_once)
    commit(store, planner, 2, IDS[1])
    assert failed
    assert [file.name for file in restore.manifest(store, JOB, IDS[2]).files] == ["rank-0.safetensors"]
    third = commit(store, planner, 3, IDS[2])
    assert third.not_linked is None
    assert {file.written_by for file in third.files} == {IDS[1], None}, "the first has all that it needs"
    assert require_sound(store) == IDS[1:4]


def test_a_checkpoint_that_failed_is_not_linked_from(begun):
    store, _ = begun()
    planner = IncrementalPlanner(True)
    commit(store, planner, 1)
    with pytest.raises(FileExistsError):
        commit(store, planner, 1, IDS[1])
    planner.settle(IDS[1], is_durable=False)
    commit(store, planner, 2, IDS[1])
    assert require_sound(store) == IDS[1:3]


@pytest.mark.parametrize("suffix", [".base", ".rows"])
@pytest.mark.parametrize("parity", [None, CODE], ids=["plain", "parity"])
def test_damage_to_any_file_is_named_or_repaired(begun, suffix, parity):
    store, _ = begun()
    planner = IncrementalPlanner(True)
    for iteration in 1, 2, 3:
        commit(store, planner, iteration, parity=parity)
    name = max(file.name for file in restore.manifest(store, JOB, IDS[3]).files if file.name.endswith(suffix))
    path = store.path(JOB, IDS[3]) / name
    broken = bytearray(path.read_bytes())
    broken[-1] ^= 1
    path.write_bytes(broken)
    assert scrub(store, JOB, IDS[3]).state == ("damaged" if parity is None else "repairable")
    if parity is None:
        with pytest.raises(HoldfastError, match=name):
            restore.load(store, JOB, IDS[3])
        return
    loaded = restore.load(store, JOB, IDS[3])
    assert bytes(loaded.tensors["table"].numpy()) == table(3)
    assert any(name in each for each in loaded.repaired)
    assert scrub(store, JOB, IDS[3], repair=True).state == "repaired"
    assert require_sound(store) == IDS[1:4]
