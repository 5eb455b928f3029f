"""Incremental checkpoints after failures and damage; test_crash_matrix.py cuts their commits at every point."""

import errno
import mmap
import random

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
    """A base, a region, and a region that is merged with it; retention removes the first checkpoints.

    Then comes another such region, or a new base where so few checkpoints may link one.
    """
    planner = IncrementalPlanner(True, most_regions=1)
    for iteration in range(1, 5):
        commit(store, planner, iteration, IDS[iteration - 1] if iteration > 1 else None, parity=parity)
        kept = IDS[max(1, iteration - 2) : iteration + 1]
        acknowledged(kept)
        acknowledged(kept[1:])  # from here on the oldest may be gone
        if iteration > 2:
            store.delete(JOB, kept[0], 1)


def test_a_new_base_is_written_after_some_links(begun, monkeypatch):
    monkeypatch.setattr("holdfast.incremental.planner.MOST_LINKS", 2)
    store, _ = begun()
    train(store)
    assert require_sound(store) == IDS[3:5]
    files = {file.name: file.written_by for file in restore.manifest(store, JOB, IDS[4]).files}
    assert files == {f"rank-0.{IDS[4]}.base": None, "rank-0.safetensors": None}


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
    assert {file.written_by for file in third.files} == {None}, "what the failed try linked may be damaged"
    assert any(file.name.endswith(".base") for file in third.files)
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
